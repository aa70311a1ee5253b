"""Restarts that were asked for: no request fails, be it in flight, new, or waiting."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import psutil
import pytest

from tests.faults.test_processes_die import Reader, is_ready, messages, slow, works
from tests.served_stack import ServedStack, wait_until

_LONG_S = 6
"""Longer than a process may take to end when everything stops."""


@pytest.fixture(scope="module")
def stack(scripted_stack: ServedStack) -> ServedStack:
    """The stack whose workers have one model."""
    return scripted_stack


class Steady:
    """Asks something short again and again, on several threads, and looks at the health."""

    def __init__(self, stack: ServedStack) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self.longest_s = 0.0
        self._stack, self._stopped = stack, threading.Event()
        acts = (self._ask, self._look)
        self._threads = [threading.Thread(target=self._repeat, args=(act,)) for act in acts]
        for thread in self._threads:
            thread.start()

    def _repeat(self, act: Callable[[openai.OpenAI], None]) -> None:
        client = self._stack.client()
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                act(client)
            except (openai.APIError, httpx.HTTPError, AssertionError) as exc:
                spent_s = time.monotonic() - began
                self.failures.append(f"{exc!r} after {spent_s:.1f} s: {exc.__cause__!r}")
            else:
                self.answered += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            time.sleep(0.1)

    def _ask(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="scripted", messages=messages({"text": "ok"}), timeout=90
        )
        assert answer.choices[0].message.content == "ok"

    def _look(self, _: openai.OpenAI) -> None:
        assert httpx.get(f"{self._stack.url}/health", timeout=60).status_code == 200

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(120)


@contextmanager
def nothing_fails(stack: ServedStack) -> Iterator[None]:
    """Have three streams in flight and steady new requests meanwhile; all of them succeed."""
    wait_until(lambda: works(stack), 120, "the stack")
    readers = [Reader(stack, slow(10 * _LONG_S)) for _ in range(3)]
    steady = Steady(stack)
    try:
        yield
        for reader in readers:
            reader.wait(120)
        answered = steady.answered
        wait_until(lambda: steady.answered > answered + 5, 60, "requests after it")
    finally:
        steady.stop()
    assert steady.failures == []
    assert [reader.error for reader in readers] == [None] * 3
    assert {reader.text for reader in readers} == {"x " * 10 * _LONG_S}


def is_gone(pid: int) -> bool:
    """Whether the process has ended and its parent knows."""
    return not psutil.pid_exists(pid)


def test_processes_that_are_stopped_are_replaced_and_no_request_fails(stack: ServedStack) -> None:
    with nothing_fails(stack):
        before = [stack.pid_of(name) for name in ("web", "worker")]
        for pid in before:
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: all(map(is_gone, before)), 60, "their ends")


def test_a_web_process_that_drains_says_that_it_closes_connections(stack: ServedStack) -> None:
    """A client that is not told sends its next request into the end of the connection."""
    wait_until(lambda: works(stack), 120, "the stack")
    holds = Reader(stack, slow(130))
    headers = {"Authorization": f"Bearer {stack.key}"}
    body = {"model": "scripted", "messages": messages({"sleep_ms": 4000}, {"text": "ok"})}
    with (
        httpx.Client(base_url=stack.url, headers=headers, timeout=60) as idle,
        httpx.Client(base_url=stack.url, headers=headers, timeout=60) as busy,
        ThreadPoolExecutor(1) as pool,
    ):
        kept = [client.get("/v1/models").headers.get("connection") for client in (idle, busy)]
        in_flight = pool.submit(busy.post, "/v1/chat/completions", json=body)
        time.sleep(1)
        os.kill(before := stack.pid_of("web"), signal.SIGTERM)
        time.sleep(1)
        told = [idle.get("/v1/models"), in_flight.result(60)]
        assert not is_gone(before)
        again = [client.get("/v1/models") for client in (idle, busy)]
    assert kept == [None, None]
    assert [answer.status_code for answer in told] == [200, 200]
    assert [answer.headers.get("connection") for answer in told] == ["close", "close"]
    assert [answer.status_code for answer in again] == [200, 200]
    holds.wait(120)
    assert holds.error is None


def test_a_process_that_hangs_up_goes_on_until_the_next_one_is_ready(stack: ServedStack) -> None:
    before, said = stack.pid_of("beat"), len(stack.text())
    os.kill(before, signal.SIGHUP)
    wait_until(lambda: is_gone(before), 60, "its end")
    told = [line for line in stack.text()[said:].splitlines() if "beat" in line]
    assert [line.partition("beat: ")[2] for line in told] == [
        "starting the next process",
        "the next process is ready",
    ]


def test_a_hangup_has_serve_replace_all_its_processes_and_no_request_fails(
    stack: ServedStack,
) -> None:
    assert stack.process is not None
    names = ("web", "worker", "beat")
    said = len(stack.text())
    with nothing_fails(stack):
        before = [stack.pid_of(name) for name in names]
        redis = stack.pid_of("redis")
        stack.process.send_signal(signal.SIGHUP)
        wait_until(lambda: all(map(is_gone, before)), 120, "the end of the processes before")
    assert stack.pid_of("redis") == redis
    assert not {stack.pid_of(name) for name in names} & set(before)
    assert is_ready(stack)
    assert stack.text()[said:].count("the next process is ready") == len(names)


def test_a_worker_whose_consumer_stands_still_says_so_and_reads_again(stack: ServedStack) -> None:
    wait_until(lambda: works(stack), 120, "the stack")
    worker = stack.pid_of("worker")
    reader = Reader(stack, slow(130))
    (stack.data_dir / "freeze-consumer").touch()
    wait_until(lambda: not is_ready(stack), 60, "what the lease says")
    wait_until(lambda: works(stack), 60, "a completion")
    reader.wait(120)
    assert (reader.error, reader.text) == (None, "x " * 130)
    assert stack.pid_of("worker") == worker
    log = (stack.data_dir / "log" / "worker.log").read_text()
    assert "no wake-up was read" in log
    assert "wake-ups are read again" in log
