"""Many models on two workers: loaded, unloaded, preferred and drained while requests come in."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.faults.test_responses_survive import Reader, begin, numbers, wait_until_ready
from tests.served_stack import ROOT, ServedStack, wait_until


@pytest.fixture(scope="module")
def http(stack: ServedStack) -> Iterator[httpx.Client]:
    """A client whose key may load models."""
    with stack.http() as plain:
        yield plain


def model(http: httpx.Client, name: str) -> dict[str, Any]:
    """What the API says of a model."""
    shown: dict[str, Any] = http.get(f"/v1/models/{name}").json()
    return shown


def events(http: httpx.Client, name: str) -> list[dict[str, Any]]:
    """The events of a model until nothing is under way."""
    with http.stream("GET", f"/v1/models/{name}/events") as stream:
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def script(*steps: dict[str, Any]) -> str:
    return json.dumps(steps)


LONG = script({"text": "x"}, {"sleep_ms": 60_000})


def ask(stack: ServedStack, name: str, what: str = "hello", **fields: Any) -> Any:
    return stack.client().responses.create(model=name, input=what, **fields)


def worker_of(stack: ServedStack, response: Any) -> str:
    worker: str = stack.row(response.id)["worker"]
    return worker


def test_a_model_that_is_wanted_is_loaded_and_can_be_dropped(
    stack: ServedStack, http: httpx.Client
) -> None:
    assert http.get("/health/ready").json()["status"] == "ready"
    assert model(http, "slow")["status"] == "unloaded"
    with pytest.raises(openai.InternalServerError) as refused:
        ask(stack, "sluggish")
    assert (refused.value.status_code, refused.value.code) == (503, "model_loading")
    assert refused.value.response.headers["retry-after"] == "10"
    assert model(http, "slow")["status"] == "loading"
    background = ask(stack, "slow", background=True)
    assert background.status == "queued"

    seen = events(http, "slow")
    assert (seen[0]["status"], seen[-1]["status"]) == ("loading", "loaded")
    assert "loading" in [worker["state"] for event in seen for worker in event["workers"]]
    wait_until(lambda: model(http, "slow")["workers"] == 1, 120, "the view of the web process")
    assert ask(stack, "slow").output_text == "hello"
    client = stack.client()
    wait_until(
        lambda: client.responses.retrieve(background.id).status == "completed", 120, "its turn"
    )

    assert http.post("/v1/models/unload", json={"model": "slow"}).status_code == 200
    assert events(http, "slow")[-1] == {
        "object": "model.event",
        "model": "slow",
        "status": "unloaded",
        "workers": [],
    }


def test_a_model_that_cannot_be_loaded_says_why_and_harms_nobody(
    stack: ServedStack, http: httpx.Client
) -> None:
    assert http.post("/v1/models/load", json={"model": "broken"}).status_code == 200
    last = events(http, "broken")[-1]
    assert last["status"] == "failed"
    assert "its weights are torn" in last["workers"][0]["reason"]
    wait_until(lambda: model(http, "broken")["status"] == "failed", 120, "the web process")
    with pytest.raises(openai.InternalServerError) as refused:
        ask(stack, "broken")
    assert refused.value.code == "no_worker"  # It is not tried again at once.
    assert ask(stack, "scripted").output_text == "hello"
    assert http.get("/health/ready").json()["status"] == "ready"


def is_back(http: httpx.Client, name: str, before: psutil.Process) -> bool:
    """Whether the model is loaded, and its process of before is gone."""
    return model(http, name)["status"] == "loaded" and not before.is_running()


def says_three_tokens(stack: ServedStack, name: str) -> bool:
    """Whether the model answers: the web process may have known the old process for a second."""
    try:
        answer = stack.client().chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Hello"}], max_tokens=3
        )
    except openai.InternalServerError:
        return False
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    return True


def is_unloaded(http: httpx.Client, name: str) -> bool:
    """Have the model unloaded; return whether nobody has it any more."""
    is_gone = http.post("/v1/models/unload", json={"model": name}).status_code == 409
    return is_gone and events(http, name)[-1]["status"] == "unloaded"


ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 400}


def stream(stack: ServedStack, name: str, what: str, **extra: Any) -> Any:
    return stack.client().chat.completions.create(
        model=name, messages=[{"role": "user", "content": what}], stream=True, extra_body=extra
    )


def endless(stack: ServedStack, name: str) -> list[Any]:
    """Read an answer that does not end by itself, to its end."""
    return list(stream(stack, name, "Tell me a story.", **ENDLESS))


def test_a_crash_takes_its_own_model_only_and_the_model_comes_back(
    stack: ServedStack, http: httpx.Client
) -> None:
    pool = ThreadPoolExecutor(1)
    if model(http, "apart")["status"] != "loaded":
        assert http.post("/v1/models/load", json={"model": "apart"}).status_code == 200
        wait_until(lambda: model(http, "apart")["workers"] == 1, 120, "the second library model")
    worker = stack.pid_of("worker")
    for victim, beside in (("demo", "apart"), ("apart", "demo")):
        process = stack.server_of(victim)
        # It stands still: else the answer may have ended before the signal is sent.
        process.suspend()
        dying = pool.submit(endless, stack, victim)
        wait_until(lambda: running(stack) == 1, 120, "its run")
        going_on = stream(stack, beside, "Tell me a story.", **ENDLESS)
        scripted = stream(
            stack, "scripted", script({"text": "a"}, {"sleep_ms": 1500}, {"text": "b"})
        )
        process.send_signal(signal.SIGSEGV)
        process.resume()
        with pytest.raises(openai.APIError, match="ended before the answer"):
            dying.result()
        texts = [chunk.choices[0].delta.content or "" for chunk in scripted if chunk.choices]
        assert "".join(texts) == "ab"
        *_, last = [chunk for chunk in going_on if chunk.choices]
        assert last.choices[0].finish_reason == "length"
        wait_until(partial(is_back, http, victim, process), 120, "the model is loaded again")
        wait_until(partial(says_three_tokens, stack, victim), 120, "an answer of the new process")
    assert stack.pid_of("worker") == worker


def test_a_model_that_was_loaded_on_demand_goes_when_it_is_idle_and_not_before(
    stack: ServedStack, http: httpx.Client
) -> None:
    with pytest.raises(openai.InternalServerError, match="being loaded"):
        ask(stack, "brief")
    wait_until(lambda: model(http, "brief")["status"] == "loaded", 120, "the load")
    # What runs for longer than it may be idle goes on to its end. It may be unloaded before: then
    # it is loaded anew for what waits in the background.
    steps = script({"text": "a"}, {"sleep_ms": 5000}, {"text": "b"})
    made = ask(stack, "brief", steps, background=True)
    seen = seen_while_it_runs(stack, http, made.id)
    # What is shown is a second old at most: it may be that of the load.
    assert set(itertools.dropwhile(lambda shown: shown == "loading", seen)) == {"loaded"}
    assert stack.client().responses.retrieve(made.id).output_text == "ab"
    wait_until(lambda: model(http, "brief")["status"] == "unloaded", 120, "its end")
    with pytest.raises(openai.InternalServerError) as refused:
        ask(stack, "brief")
    assert refused.value.code == "model_loading"
    assert http.get("/health/ready").json()["status"] == "ready"


def seen_while_it_runs(stack: ServedStack, http: httpx.Client, response_id: str) -> list[str]:
    """What the API said of the model of a response while it ran, until it has ended."""
    client, seen, now = stack.client(), list[str](), "queued"
    while now in ("queued", "in_progress"):
        before, shown = now, model(http, "brief")["status"]
        now = client.responses.retrieve(response_id).status or ""
        if before == now == "in_progress":
            seen.append(shown)
    return seen


def test_a_file_that_is_cut_off_is_told_and_harms_nobody(
    stack: ServedStack, http: httpx.Client
) -> None:
    assert http.post("/v1/models/load", json={"model": "cut"}).status_code == 200
    last = events(http, "cut")[-1]
    assert last["status"] == "failed"
    assert "damaged file" in last["workers"][0]["reason"]
    assert http.get("/health/ready").json()["status"] == "ready"


def test_loads_and_unloads_at_once_end_in_one_state(stack: ServedStack, http: httpx.Client) -> None:
    def command(path: str) -> int:
        with stack.http() as client:
            return client.post(f"/v1/models/{path}", json={"model": "slow"}).status_code

    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(command, ["load", "unload"] * 8))
    assert set(codes) <= {200, 409}
    # A worker that is loading obeys once it has loaded, so it is told until it is so.
    wait_until(lambda: is_unloaded(http, "slow"), 90, "the end of what was asked for")


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("load", {"model": "ghost"}, 404, "model_not_found"),
        ("load", {"model": "slow", "worker": "ghost"}, 404, "worker_not_found"),
        ("load", {"model": "demo"}, 409, "conflict"),
        ("unload", {"model": "slow"}, 409, "conflict"),
        ("load", {}, 400, "missing_required_parameter"),
    ],
)
def test_a_command_that_cannot_be_obeyed_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, code: str
) -> None:
    answer = http.post(f"/v1/models/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@contextmanager
def second_worker(stack: ServedStack) -> Iterator[subprocess.Popen[bytes]]:
    """Another worker of the model ``single``, as another host would have it."""
    environment = {**stack.env, **stack.services, "SECRET_KEY": "unused", "DRAIN_TIMEOUT_S": "1"}
    command = [sys.executable, "manage.py", "worker", "--models", "single"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        with stack.http() as http:
            wait_until(lambda: model(http, "single")["workers"] == 2, 120, "the second worker")
        yield process
    finally:
        process.terminate()
        process.wait(90)


def running(stack: ServedStack) -> int:
    """How many generations run."""
    count: int = stack.sql("SELECT count(*) FROM generations_generation WHERE status = 'running'")[
        0
    ][0]
    return count


def test_two_workers_share_the_work_and_each_keeps_its_conversations(stack: ServedStack) -> None:
    with second_worker(stack) as process, ThreadPoolExecutor(4) as pool:
        # A wake-up that a busy worker cannot answer is read by the other.
        long = [ask(stack, "single", LONG, background=True) for _ in range(2)]
        wait_until(lambda: running(stack) == 2, 120, "both run")
        assert len({worker_of(stack, response) for response in long}) == 2
        for response in long:
            stack.client().responses.cancel(response.id)
        wait_until(lambda: running(stack) == 0, 120, "both stopped")

        first = turn = ask(stack, "single")
        workers = set()
        for _ in range(8):
            turn = ask(stack, "single", previous_response_id=turn.id)
            workers.add(worker_of(stack, turn))
        assert workers == {worker_of(stack, first)}

        # It waits for that worker no longer than a moment.
        busy = ask(stack, "single", LONG, background=True, previous_response_id=first.id)
        wait_until(lambda: running(stack) == 1, 120, "the busy worker")
        assert worker_of(stack, busy) == worker_of(stack, first)
        other = ask(stack, "single", previous_response_id=first.id)
        assert worker_of(stack, other) != worker_of(stack, first)
        assert stack.row(other.id)["preferred_worker"] == worker_of(stack, first)
        stack.client().responses.cancel(busy.id)
        wait_until(lambda: running(stack) == 0, 120, "it stopped")

        # What runs in the background goes on elsewhere when its worker is stopped.
        mine = f":{process.pid}:"
        held = [ask(stack, "single", LONG, background=True) for _ in range(2)]
        wait_until(lambda: running(stack) == 2, 120, "both run")
        (moved,) = [response for response in held if mine in worker_of(stack, response)]
        (stays,) = [response for response in held if response is not moved]
        stopping = pool.submit(process.send_signal, signal.SIGTERM)
        stopping.result()
        wait_until(lambda: stack.row(moved.id)["status"] == "queued", 120, "given back")
        stack.client().responses.cancel(stays.id)
        wait_until(lambda: stack.row(moved.id)["status"] == "running", 120, "taken by the other")
        assert stack.row(moved.id)["attempt"] == 2
        stack.client().responses.cancel(moved.id)
        wait_until(lambda: running(stack) == 0, 120, "it stopped")


def test_only_a_key_with_the_scope_loads_models(stack: ServedStack, http: httpx.Client) -> None:
    stack.sql("UPDATE accounts_apikey SET scopes = '{inference}'")
    try:
        wait_until(
            lambda: http.post("/v1/models/load", json={"model": "slow"}).status_code == 403,
            120,
            "the scopes are remembered for some seconds",
        )
        refused = http.get("/v1/models/demo/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
        assert http.get("/v1/models").status_code == 200
    finally:
        stack.sql("UPDATE accounts_apikey SET scopes = '{inference,models:write}'")


def test_drained_worker_leaves_its_responses_in_the_background_to_the_next(
    stack: ServedStack,
) -> None:
    wait_until_ready(stack)
    response_id = begin(stack)
    reader = Reader(stack, response_id)
    os.kill(stack.pid_of("worker"), signal.SIGTERM)
    events = reader.wait()
    assert events[-1]["type"] == "response.completed"
    assert numbers(events) == list(range(len(events)))
    assert stack.row(response_id)["attempt"] == 2
