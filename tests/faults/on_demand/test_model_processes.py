"""A model whose server the worker has started: it is used, killed, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import openai
import psutil
import pytest

from tests.faults.on_demand.conftest import PROGRAM
from tests.served_stack import ServedStack, wait_until

pytestmark = pytest.mark.timeout(240)

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture
def client(stack: ServedStack) -> openai.OpenAI:
    return stack.client().with_options(max_retries=0)


@pytest.fixture(scope="module", autouse=True)
def loaded(stack: ServedStack) -> Iterator[None]:
    """Load the models of this file, which the worker of the stack does not start with."""
    with stack.http() as http:
        for model in ("own", "second"):
            wait_until(
                lambda name=model: (
                    http.post("/v1/models/load", json={"model": name}).status_code == 200
                ),
                120,
                "the order",
            )
            wait_until(
                lambda name=model: state(stack.client(), name) == "loaded", 120, "the models"
            )
        yield
        for model in ("own", "second"):
            http.post("/v1/models/unload", json={"model": model})


def servers(stack: ServedStack) -> list[psutil.Process]:
    """The processes of model servers of this stack, by their folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(PROGRAM) in process.cmdline() and str(stack.data_dir) in process.cwd():
                found.append(process)
    return found


def running_on(stack: ServedStack, model: str) -> int:
    query = "SELECT count(*) FROM generations_generation WHERE status = 'running' AND model = %s"
    return int(stack.sql(query, model)[0][0])


def state(client: openai.OpenAI, model: str = "own") -> str:
    return str(client.models.retrieve(model).model_dump()["status"])


def test_it_answers_as_the_engine_in_the_process_does(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"messages": STORY, "temperature": 0, "max_tokens": 40}
    own = client.chat.completions.create(model="own", **asked)
    demo = client.chat.completions.create(model="demo", **asked)
    assert own.choices[0].message.content == demo.choices[0].message.content
    assert own.usage is not None
    assert demo.usage is not None
    assert own.usage.prompt_tokens == demo.usage.prompt_tokens
    assert stack.row(own.id)["output_tokens"] == own.usage.completion_tokens
    pieces = client.chat.completions.create(model="own", stream=True, **asked)
    told = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert told == own.choices[0].message.content


def test_its_server_wants_a_key_that_is_not_told(stack: ServedStack) -> None:
    [server] = servers(stack)
    secrets = [name for name in server.environ() if "KEY" in name or "URL" in name]
    assert secrets == []
    [connection] = [c for c in server.net_connections("tcp") if c.status == "LISTEN"]
    assert connection.laddr.ip == "127.0.0.1"
    answer = stack.http().post(
        f"http://127.0.0.1:{connection.laddr.port}/v1/chat/completions", json={"messages": HELLO}
    )
    assert answer.status_code == 401


def test_a_killed_server_costs_its_own_runs_only(stack: ServedStack, client: openai.OpenAI) -> None:
    others: list[str | None] = []

    def ask_others() -> None:
        for _ in range(5):
            answer = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=8)
            others.append(answer.choices[0].message.content)

    beside = threading.Thread(target=ask_others)
    pool = ThreadPoolExecutor(1)
    [server] = servers(stack)
    server.suspend()  # Else the answer may have ended before the server does.
    asked = partial(client.chat.completions.create, model="own", messages=STORY, max_tokens=400)
    dying = pool.submit(asked)
    wait_until(lambda: running_on(stack, "own") == 1, 60, "its run")
    beside.start()
    server.kill()
    begun = time.monotonic()
    with pytest.raises(openai.APIError):
        dying.result()
    again = client.chat.completions.create(model="own", messages=HELLO, max_tokens=8)
    assert again.choices[0].message.content
    assert time.monotonic() - begun < 30, "the request waited for the next server"
    beside.join()
    assert len(others) == 5
    [replaced] = servers(stack)
    assert replaced.pid != server.pid
    wait_until(lambda: state(client) == "loaded", 10, "the view of its state")


def ended_while_it_runs(stack: ServedStack, response_id: str, number: signal.Signals) -> int:
    """End the model's server while the response runs on it; return which counted attempt that was.

    The server writes a long answer in a second or two: it is looked for before that begins. On a
    busy machine the next attempt may begin before the worker knows of the end; that one is spared.
    """
    server, until = None, time.monotonic() + 60
    while server is None or (row := stack.row(response_id))["status"] != "running":
        assert time.monotonic() < until, "its run: not within 60 s"
        with suppress(AssertionError):
            server = stack.server_of(stack.row(response_id)["model"])
        time.sleep(0.01)
    server.send_signal(number)
    wait_until(lambda: stack.row(response_id) != row, 60, "what comes of it")
    wait_until(lambda: not server.is_running(), 60, "the end of the process")
    return int(row["attempt"] - row["spared"])


def begin_long(client: openai.OpenAI, model: str) -> str:
    made = client.responses.create(
        model=model,
        input="Tell me a story.",
        background=True,
        max_output_tokens=700,
        extra_body={"ignore_eos": True},
    )
    return str(made.id)


def test_what_somebody_ends_counts_as_no_attempt_of_a_response_in_the_background(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    with stack.file("slow"):
        made = begin_long(client, "demo")
        for _ in range(3):
            assert ended_while_it_runs(stack, made, signal.SIGKILL) == 1
    wait_until(lambda: stack.row(made)["status"] == "completed", 120, "its end")
    row = stack.row(made)
    assert row["attempt"] >= 4
    assert (row["attempt"] - row["spared"], row["alone_since"]) == (1, None)


def test_a_response_in_the_background_that_ends_its_server_has_three_attempts(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    with stack.file("slow"):
        made = begin_long(client, "second")
        assert ended_while_it_runs(stack, made, signal.SIGSEGV) == 1
        assert stack.row(made)["alone_since"] is None
        assert ended_while_it_runs(stack, made, signal.SIGSEGV) == 2
        assert stack.row(made)["alone_since"] is not None  # Nothing runs beside the last.
        assert ended_while_it_runs(stack, made, signal.SIGSEGV) == 3
    response = client.responses.retrieve(made)
    assert response.status == "failed"
    assert response.error is not None
    assert "ended before the answer was complete" in response.error.message
    wait_until(lambda: state(client, "second") == "loaded", 60, "it")


def test_nothing_of_it_is_left_when_the_worker_is_killed(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    [server] = servers(stack)
    os.kill(stack.pid_of("worker"), signal.SIGKILL)
    until = time.monotonic() + 3
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)
    wait_until(lambda: asked_again(client), 120, "the model on the next worker")
    assert len(servers(stack)) == 1


def asked_again(client: openai.OpenAI) -> bool:
    """Whether the model answers; what asks for it loads it."""
    try:
        answer = client.chat.completions.create(model="own", messages=HELLO, max_tokens=8)
    except openai.InternalServerError:
        return False
    return bool(answer.choices[0].message.content)
