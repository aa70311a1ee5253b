"""PostgreSQL and Redis that keep connections, answer nothing, and come back on new ones."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
import pytest

from inference_site.ops.serve.services import EmbeddedPostgres, plan_redis, wait_for_redis
from tests import migrated_postgres
from tests.faults.test_processes_die import Reader, messages, slow
from tests.served_stack import ServedStack, served_stack, wait_until
from tests.silent_proxy import SilentProxy

BACK_S = 15.0
"""Within this time of the end of a fault requests succeed again: two or three seconds, and time for
a machine that is busy."""
LONGEST_S = 30.0
"""No request waits for longer than this while a store is silent."""


class Silenced:
    """A stack whose stores are behind proxies that can fall silent."""

    def __init__(self) -> None:
        self.proxies: dict[str, SilentProxy] = {}
        self.urls: dict[str, str] = {}
        self.stack: ServedStack

    @contextmanager
    def around(self, data_dir: Path) -> Iterator[Mapping[str, str]]:
        """Start PostgreSQL and Redis, and return their addresses behind the proxies."""
        home = data_dir / "stores"
        home.mkdir()
        home.chmod(0o755)  # PostgreSQL runs as a user of its own when the tests run as root.
        migrated_postgres.copy_to(home)
        postgres = EmbeddedPostgres(home)
        self.urls["DATABASE_URL"] = postgres.start()
        socket_dir = unquote(parse_qs(urlsplit(self.urls["DATABASE_URL"]).query)["host"][0])
        plan = plan_redis(home)
        redis = subprocess.Popen(plan.command, stdout=subprocess.DEVNULL)
        self.urls["REDIS_URL"] = plan.url
        try:
            wait_for_redis(plan.url)
            self.proxies = {
                "postgres": SilentProxy(Path(socket_dir) / ".s.PGSQL.5432"),
                "redis": SilentProxy(Path(plan.url.removeprefix("unix://"))),
            }
            yield {
                "DATABASE_URL": f"postgresql://postgres@127.0.0.1:{self.proxies['postgres'].port}"
                "/postgres",
                "REDIS_URL": f"redis://127.0.0.1:{self.proxies['redis'].port}/0",
            }
        finally:
            for proxy in self.proxies.values():
                proxy.close()
            redis.terminate()
            redis.wait()
            postgres.stop()


@pytest.fixture(scope="module")
def silenced() -> Iterator[Silenced]:
    """A stack of this file's own."""
    found = Silenced()
    with served_stack("", found.around, START_MODELS="scripted") as found.stack:
        yield found


@dataclass(frozen=True)
class Answer:
    """When a request began and ended, in monotonic time, and its status; 0 for none."""

    began_at: float
    ended_at: float
    status: int


class Asker:
    """Asks again and again on a few threads, and keeps how each request ended, and when."""

    def __init__(self, stack: ServedStack, threads: int) -> None:
        self.answers: list[Answer] = []
        self._stack, self._stopped = stack, threading.Event()
        self._key = stack.key
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        body = {"model": "scripted", "messages": messages({"text": "ok"})}
        headers = {"Authorization": f"Bearer {self._key}"}
        with httpx.Client(base_url=self._stack.url, headers=headers, timeout=120) as http:
            while not self._stopped.is_set():
                began, status = time.monotonic(), 0
                with suppress(httpx.HTTPError):
                    status = http.post("/v1/chat/completions", json=body).status_code
                self.answers.append(Answer(began, time.monotonic(), status))
                self._stopped.wait(0.1)

    def succeeded(self, since: float) -> list[float]:
        """Return when requests have succeeded since this time."""
        ends = [answer.ended_at for answer in self.answers if answer.status == 200]
        return [end for end in ends if end > since]

    def stop(self) -> None:
        """Let the requests that run end."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()


def is_prompt(stack: ServedStack) -> bool:
    """Whether the words of a stream come one by one: the web process hears of each.

    With a subscription that is dead it reads the log, once a second.
    """
    arrived = []
    with stack.client().chat.completions.create(
        model="scripted", messages=slow(10), stream=True
    ) as stream:
        arrived += [time.monotonic() for _ in stream]
    return sum(later - earlier > 0.03 for earlier, later in pairwise(arrived)) > 5


@pytest.mark.parametrize("silent_s", [7.0, pytest.param(60.0, marks=pytest.mark.stress)])
@pytest.mark.parametrize("store", ["postgres", "redis"])
def test_a_store_that_falls_silent_is_used_again_soon_after_it_answers(
    silenced: Silenced, store: str, silent_s: float
) -> None:
    stack, proxy = silenced.stack, silenced.proxies[store]
    running = [Reader(stack, slow(20)) for _ in range(2)]
    asker = Asker(stack, 6)
    wait_until(lambda: len(asker.succeeded(0)) >= 12, 60, "requests before the fault")
    proxy.fall_silent()
    silent_at = time.monotonic()
    try:
        time.sleep(silent_s)
    finally:
        proxy.heal()
    healed_at = time.monotonic()
    try:
        wait_until(lambda: len(asker.succeeded(healed_at)) >= 12, 60, "requests after the fault")
        back_s = min(asker.succeeded(healed_at)) - healed_at
        time.sleep(max(0.0, back_s + 1))
    finally:
        asker.stop()
    assert back_s < BACK_S
    refused = [answer for answer in asker.answers if answer.status != 200]
    assert {answer.status for answer in refused} == {503}
    assert max(answer.ended_at for answer in refused) < healed_at + BACK_S
    longest_s = max(a.ended_at - a.began_at for a in asker.answers if a.began_at > silent_at)
    assert longest_s < LONGEST_S
    for reader in running:
        reader.wait(60)
        # The worker keeps what Redis does not take for EVENT_LOG_PATIENCE_S.
        if store == "postgres" or silent_s < 30:
            assert (reader.error, reader.text) == (None, "x " * 20)
            assert reader.ended_at < healed_at + BACK_S
    wait_until(lambda: is_prompt(stack), 30, "a new subscription")
