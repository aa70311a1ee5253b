"""Entries that say on which workers a model is, and on how many; workers die, freeze and come."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.served_stack import ROOT, ServedStack, served_stack, wait_until

pytestmark = pytest.mark.timeout(300)

MODELS = """
  single: {engine: scripted, slots: 2, load_ms: 300, replicas: 1}
  other: {engine: scripted, slots: 2, load_ms: 300, replicas: 1}
  pair: {engine: scripted, slots: 2, replicas: 2}
  labelled: {engine: scripted, slots: 2, hosts: [gpu, tpu]}
  nowhere: {engine: scripted, slots: 2, hosts: [moon]}
  lazy: {engine: scripted, slots: 2, load_ms: 2500, preload: false, keep_alive: 2}
"""
NAMES = "single,other,pair,labelled,nowhere"
HOLDS = ("loading", "ready")
TAKEN_OVER_S = 60


@pytest.fixture(scope="module")
def stack() -> Iterator[ServedStack]:
    """A stack whose own worker has none of these models."""
    with served_stack(
        MODELS,
        START_MODELS="scripted",
        LOAD_WAIT_S="60",
        DRAIN_TIMEOUT_S="5",
        KEEP_ALIVE_INTERVAL="300",
        WORKER_LABELS="main",
    ) as running:
        running.sql("UPDATE accounts_apikey SET scopes = '{inference,models:write}'")
        yield running


@contextmanager
def started(
    stack: ServedStack, label: str, names: str = NAMES, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker with a label, as another host would have it. It need not be ready."""
    environment = {**stack.env, **stack.services, "SECRET_KEY": "x", "WORKER_LABELS": label}
    environment |= env
    command = [sys.executable, "manage.py", "worker", "--models", names]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(90)


class Workers:
    """Two workers beside the stack's own. A test finds both; one that the last has ended is new."""

    def __init__(self, stack: ServedStack) -> None:
        self._stack, self._entered = stack, ExitStack()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def both(self) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
        """Return them once they have all that they will have."""
        for label in ("gpu", "cpu"):
            running = self._running.get(label)
            if running is None or running.poll() is not None:
                self._running[label] = self._entered.enter_context(started(self._stack, label))
        pids = {worker.pid for worker in self._running.values()}
        wait_until(lambda: holders(self._stack, "pair", "ready") == pids, 120, "both workers")
        wait_until(lambda: holders(self._stack, "single", "ready"), 60, "the single one")
        wait_until(lambda: holders(self._stack, "other", "ready"), 60, "the other one")
        return self._running["gpu"], self._running["cpu"]

    def sorted_by(self, model: str) -> list[subprocess.Popen[bytes]]:
        """Return the one that has the model, and the one that has not."""
        workers = self.both()
        (holder,) = holders(self._stack, model)
        assert holder in {worker.pid for worker in workers}
        return sorted(workers, key=lambda worker: worker.pid != holder)

    def end(self) -> None:
        """End both."""
        self._entered.close()
        self._running.clear()


@pytest.fixture(scope="module")
def workers(stack: ServedStack) -> Iterator[Workers]:
    """Two workers that were started at the same moment."""
    made = Workers(stack)
    yield made
    made.end()


def leases(stack: ServedStack) -> list[dict[str, Any]]:
    with stack.redis() as redis:
        found = [redis.get(b"worker:" + name) for name in redis.smembers("workers")]
    return [json.loads(lease) for lease in found if lease is not None]


def lease_of(stack: ServedStack, worker: subprocess.Popen[bytes]) -> str:
    """The id of a worker."""
    (found,) = [one["id"] for one in leases(stack) if f":{worker.pid}:" in one["id"]]
    return str(found)


def holders(stack: ServedStack, model: str, *states: str) -> set[int]:
    """The process ids of the workers that have a model."""
    return {
        int(lease["id"].split(":")[-2])
        for lease in leases(stack)
        for served in lease["models"]
        if served["id"] == model and served["state"] in (states or HOLDS)
    }


@contextmanager
def most_holders(stack: ServedStack, *models: str) -> Iterator[dict[str, int]]:
    """The most workers that had each of these models at any one moment."""
    most, over = dict.fromkeys(models, 0), threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            for model in models:
                most[model] = max(most[model], len(holders(stack, model)))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield most
    finally:
        over.set()
        looking.join()


def ask(stack: ServedStack, model: str) -> str:
    answer = stack.client().chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}]
    )
    return answer.choices[0].message.content or ""


def shown(http: httpx.Client, model: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/models/{model}").json()
    return found


def test_workers_that_start_at_one_moment_share_the_places(
    stack: ServedStack, workers: Workers
) -> None:
    with most_holders(stack, "single", "other", "pair") as most:
        gpu, cpu = workers.both()
        time.sleep(3)
        assert holders(stack, "single") | holders(stack, "other") <= {gpu.pid, cpu.pid}
        assert holders(stack, "labelled") == {gpu.pid}
        assert holders(stack, "nowhere") == set()
        assert [ask(stack, name) for name in ("single", "other", "pair", "labelled")] == [
            "hello"
        ] * 4
        # Not while they end: the place of a worker that drains is another's already.
        assert most == {"single": 1, "other": 1, "pair": 2}


def test_no_more_than_its_replicas_are_loaded_on_command(
    stack: ServedStack, workers: Workers
) -> None:
    gpu, _ = workers.both()
    with stack.http() as http:
        refused = http.post("/v1/models/load", json={"model": "single"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            409,
            "The model 'single' has all of its replicas (1).",
        )
        assert http.post("/v1/models/unload", json={"model": "single"}).status_code == 200
        wait_until(lambda: not holders(stack, "single"), 60, "unloaded")
        time.sleep(3)
        assert holders(stack, "single") == set()  # Nobody takes what was unloaded everywhere.
        # Not the stack's own worker, whose memory is as much.
        wanted = {"model": "single", "worker": lease_of(stack, gpu)}
        assert http.post("/v1/models/load", json=wanted).status_code == 200
        wait_until(lambda: holders(stack, "single", "ready") == {gpu.pid}, 60, "loaded again")


def order(stack: ServedStack, state: str, worker: str) -> None:
    """Give an order to a worker, which gets no hint of it."""
    stack.sql(
        "INSERT INTO model_store_workerorder (worker, model_id, state) VALUES (%s, '', %s)"
        " ON CONFLICT (worker, model_id) DO UPDATE SET state = excluded.state, ordered_at = now(),"
        " seen_at = NULL",
        worker,
        state,
    )


def test_a_drained_workers_places_go_to_another(stack: ServedStack, workers: Workers) -> None:
    holder, heir = workers.sorted_by("single")
    drained = lease_of(stack, holder)
    order(stack, "drained", drained)
    try:
        wait_until(lambda: holders(stack, "single", "ready") == {heir.pid}, 30, "taken over")
        assert ask(stack, "single") == "hello"
    finally:
        order(stack, "active", drained)


def test_a_frozen_worker_has_lost_its_place_when_it_thaws(
    stack: ServedStack, workers: Workers
) -> None:
    frozen, heir = workers.sorted_by("single")
    frozen.send_signal(signal.SIGSTOP)
    wait_until(lambda: holders(stack, "single", "ready") == {heir.pid}, TAKEN_OVER_S, "taken over")
    assert ask(stack, "single") == "hello"
    frozen.send_signal(signal.SIGCONT)
    wait_until(lambda: holders(stack, "pair") == {frozen.pid, heir.pid}, 60, "it lives again")
    took_s = wait_until(
        lambda: (
            holders(stack, "single") == {heir.pid}
            and not holders(stack, "single", "draining", "failed")
        ),
        30,
        "it has dropped the model",
    )
    assert took_s < 10
    assert ask(stack, "single") == "hello"


def test_a_stopped_workers_places_go_to_another_at_once(
    stack: ServedStack, workers: Workers
) -> None:
    leaving, heir = workers.sorted_by("other")
    leaving.terminate()
    wait_until(lambda: holders(stack, "other", "ready") == {heir.pid}, 30, "taken over")
    assert ask(stack, "other") == "hello"
    leaving.wait(90)


def test_a_model_that_one_worker_cannot_load_goes_to_the_next(
    stack: ServedStack, workers: Workers, tmp_path: Path
) -> None:
    workers.end()
    torn = tmp_path / "models.yaml"
    torn.write_text(
        f"models:{MODELS}".replace("slots: 2, load_ms: 300", "load_fails: torn, slots: 2")
    )
    names = "single,pair"
    with started(stack, "gpu", names, MODELS_FILE=str(torn)) as unlucky:
        wait_until(lambda: holders(stack, "single", "failed") == {unlucky.pid}, 120, "its failure")
        with started(stack, "cpu", names) as lucky:
            wait_until(lambda: holders(stack, "single", "ready") == {lucky.pid}, 120, "the next")
            assert ask(stack, "single") == "hello"


def test_a_model_for_a_label_that_nobody_has_says_so(stack: ServedStack) -> None:
    with pytest.raises(openai.InternalServerError) as refused:
        ask(stack, "nowhere")
    assert (refused.value.status_code, refused.value.code) == (503, "no_worker")
    assert "No worker has the label moon." in refused.value.message
    with stack.http() as http:
        found = shown(http, "nowhere")
        assert (found["status"], found["reason"]) == ("unloaded", "No worker has the label moon.")
        assert http.get("/health/ready").status_code == 200


def test_who_waits_for_a_load_is_told_how_long(stack: ServedStack) -> None:
    """The model is loaded by its first request, is dropped when idle, and loaded again."""
    with stack.http() as http:
        assert shown(http, "lazy")["status"] == "unloaded"
        first = comments(http, "lazy")
        assert first
        assert set(first) == {": loading position=1"}  # Nobody knows yet how long it takes.
        wait_until(lambda: not holders(stack, "lazy", *HOLDS, "draining"), 60, "it was idle")
        again = comments(http, "lazy")
        assert all(comment.startswith(": loading position=1") for comment in again)
        expected = [int(said.partition("expected_s=")[2]) for said in again if "_s=" in said]
        assert expected, again
        assert expected == sorted(expected, reverse=True)
        assert max(expected) <= 6


def comments(http: httpx.Client, model: str) -> list[str]:
    """The comments of a stream that waits for its model, and what the API says meanwhile."""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    found = list[str]()
    with http.stream("POST", "/v1/chat/completions", json=body) as stream, httpx_of(http) as other:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if line.startswith(": loading"):
                found.append(line)
                said = shown(other, model)
                assert said["status"] in ("loading", "loaded")
                assert (said["loading"] is None) == (said["status"] == "loaded")
                if said["loading"]:
                    assert said["loading"]["waiting"] in (0, 1)  # It may have been begun just now.
    return found


def httpx_of(http: httpx.Client) -> httpx.Client:
    return httpx.Client(base_url=http.base_url, headers=http.headers, timeout=60)
