"""PostgreSQL and Redis that keep connections, answer nothing, and come back on new ones."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
import pytest

from inference_site.supervisor.postgres import EmbeddedPostgres
from inference_site.supervisor.services import plan_redis, wait_for_redis
from tests import migrated_postgres
from tests.faults.test_processes_die import Reader, messages, slow
from tests.served_stack import ServedStack, served_stack
from tests.silent_proxy import SilentProxy

BACK_S = 10.0
"""Within this time of the end of a fault requests succeed again."""
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
    with served_stack("", found.around, SPARE_PROCESSES="false") as found.stack:
        yield found


class Asker:
    """Asks again and again on a few threads, and keeps how each request ended, and when."""

    def __init__(self, stack: ServedStack, threads: int) -> None:
        self.answers: list[tuple[float, float, int]] = []
        """When it began and ended, in monotonic time, and its status; 0 for none."""
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
                self.answers.append((began, time.monotonic(), status))
                self._stopped.wait(0.1)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("store", ["postgres", "redis"])
@pytest.mark.parametrize("silent_s", [4.0, pytest.param(60.0, marks=pytest.mark.stress)])
def test_a_store_that_falls_silent_is_used_again_soon_after_it_answers(
    silenced: Silenced, store: str, silent_s: float
) -> None:
    stack, proxy = silenced.stack, silenced.proxies[store]
    running = [Reader(stack, slow(20, 100)) for _ in range(2)]
    asker = Asker(stack, 6)
    time.sleep(1)  # So that the pools have connections.
    proxy.fall_silent()
    try:
        time.sleep(silent_s)
    finally:
        proxy.heal()
    healed_at = time.monotonic()
    time.sleep(BACK_S + 5)
    asker.stop()
    print("LONGEST", max(end - begin for begin, end, _ in asker.answers))
    late = [
        (round(b - healed_at, 1), round(e - healed_at, 1), s)
        for b, e, s in asker.answers
        if s != 200
    ]
    print("BAD", late)
    for reader in running:
        reader.wait(60)
        print(reader.error, len(reader.text), reader.ended_at - healed_at, stack.sql if 0 else "")
    os.system(
        f"cp -r {stack.data_dir}/log /tmp/silent-log-{store}-{int(silent_s)}; cp {stack.output} /tmp/silent-out-{store}-{int(silent_s)}"
    )
