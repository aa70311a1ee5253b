"""A stored response in the foreground waits for its client to come back, if it has a grace."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import make_key
from tests.e2e.scripts import slow
from tests.faults.on_demand.conftest import GRACE_S
from tests.served_stack import ServedStack, wait_until

SLACK_S = 5
"""What is added when nobody could say that the client left."""
LATE_S = 90
"""How long maintenance and the worker may take, on a busy machine."""
LONG = int((GRACE_S + SLACK_S + 2) / 0.05)
"""Words of a response that goes on only as long as it is read."""
ENDLESS = slow(6000)


@pytest.fixture(scope="module")
def client(stack: ServedStack) -> openai.OpenAI:
    return stack.client()


def begun(client: openai.OpenAI, given: str, **fields: Any) -> tuple[str, Any]:
    """Create a response and read what it begins with; return its id and its stream."""
    stream: Any = client.responses.create(model="scripted", input=given, stream=True, **fields)
    seen = [next(stream) for _ in range(6)]
    return str(seen[0].response.id), stream


def status(stack: ServedStack, response_id: str) -> str:
    return str(stack.row(response_id)["status"])


def test_client_that_comes_back_finds_it_going_on(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    """It is read for longer than any time limit, so that being read is what keeps it going."""
    response_id, stream = begun(client, slow(LONG, 50))
    stream.close()
    time.sleep(1)
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=5))
    assert [event.sequence_number for event in rest] == list(range(6, 6 + len(rest)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == "x " * LONG
    assert status(stack, response_id) == "completed"


def test_response_to_which_nobody_comes_back_is_stopped(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    response_id, stream = begun(client, ENDLESS)
    stream.close()
    waited = wait_until(
        lambda: status(stack, response_id) == "cancelled", GRACE_S + LATE_S, "cancelled"
    )
    assert waited > GRACE_S - 0.5
    stored = client.responses.retrieve(response_id)
    assert stored.status == "cancelled"
    assert stored.output_text.startswith("x x ")
    with stack.redis() as redis:
        wait_until(
            lambda: redis.zscore("disconnect-grace", response_id) is None, LATE_S, "forgotten"
        )


def test_reader_that_came_back_and_left_is_waited_for_too(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    response_id, stream = begun(client, ENDLESS)
    stream.close()
    time.sleep(1)
    again: Any = client.responses.retrieve(response_id, stream=True)
    next(again)
    time.sleep(GRACE_S)
    assert status(stack, response_id) == "running"
    again.close()
    wait_until(lambda: status(stack, response_id) == "cancelled", GRACE_S + LATE_S, "cancelled")


def test_reader_that_leaves_takes_nothing_from_the_client(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    response_id, stream = begun(client, slow(LONG, 50))
    other: Any = client.responses.retrieve(response_id, stream=True)
    next(other)
    other.close()
    assert [event.type for event in stream][-1] == "response.completed"


def test_client_that_did_not_stream_may_come_back_to_the_stream(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    response_id = left(stack, "leaver", {"model": "scripted", "input": slow(60, 50)})
    last = list(client.responses.retrieve(response_id, stream=True))[-1]
    assert last.type == "response.completed"


def left(stack: ServedStack, request_id: str, fields: dict[str, Any]) -> str:
    """Ask for a response and leave once it is accepted; return its id."""
    body = json.dumps(fields)
    request = (
        f"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {stack.key}\r\n"
        f"Content-Type: application/json\r\nX-Request-Id: {request_id}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    statement = "SELECT public_id FROM generations_generation WHERE request_id = %s"
    with socket.create_connection(("127.0.0.1", stack.port)) as connection:
        connection.sendall(request.encode())
        wait_until(lambda: stack.sql(statement, request_id), 120, "accepted")
    [(response_id,)] = stack.sql(statement, request_id)
    return str(response_id)


@pytest.mark.parametrize("stream", [False, True])
def test_response_that_is_not_stored_is_stopped_at_once(stack: ServedStack, stream: bool) -> None:
    body = {"model": "scripted", "input": ENDLESS, "store": False, "stream": stream}
    response_id = left(stack, f"unstored-{stream}", body)
    wait_until(lambda: status(stack, response_id) == "cancelled", LATE_S, "cancelled")
    with stack.redis() as redis:
        assert redis.zscore("disconnect-grace", response_id) is None  # It was never waited for.


@pytest.mark.parametrize(("own_s", "goes_on"), [(0, False), (300, True)])
def test_a_project_has_a_grace_of_its_own(stack: ServedStack, own_s: int, goes_on: bool) -> None:
    client = stack.client(make_key(stack, project_disconnect_grace_s=own_s).secret)
    response_id, stream = begun(client, ENDLESS)
    stream.close()
    if goes_on:
        time.sleep(GRACE_S + SLACK_S)
        assert status(stack, response_id) == "running"
        client.responses.delete(response_id)
        return
    with stack.redis() as redis:
        deadlines = set[float | None]()

        def is_cancelled() -> bool:
            deadlines.add(redis.zscore("disconnect-grace", response_id))
            return status(stack, response_id) == "cancelled"

        wait_until(is_cancelled, LATE_S, "cancelled")
    assert deadlines == {None}  # It was never waited for.


def test_one_that_waits_in_the_queue_is_stopped_too(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    holders = [
        client.responses.create(model="scripted", input=ENDLESS, background=True) for _ in range(4)
    ]
    for holder in holders:
        wait_until(lambda id_=holder.id: status(stack, id_) == "running", 120, "all slots")
    stream: Any = client.responses.create(model="scripted", input="late", stream=True)
    response_id = next(stream).response.id
    stream.close()
    wait_until(lambda: status(stack, response_id) == "cancelled", GRACE_S + LATE_S, "cancelled")
    assert stack.row(response_id)["claimed_at"] is None
    for holder in holders:
        client.responses.cancel(holder.id)


def test_it_holds_when_the_web_process_dies(stack: ServedStack) -> None:
    """One response is read again when there is a web process again, the other by nobody."""
    patient = stack.client(make_key(stack, project_disconnect_grace_s=120).secret)
    returned, stream = begun(patient, slow(400, 50))
    forsaken, other = begun(stack.client(), ENDLESS)
    os.kill(stack.pid_of("web"), signal.SIGKILL)
    for cut in (stream, other):
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(cut)
    last: list[Any] = []

    def read_again() -> bool:
        try:
            last.extend(patient.responses.retrieve(returned, stream=True, starting_after=5))
        except openai.APIConnectionError:  # It is not there yet.
            return False
        return True

    wait_until(read_again, 120, "a web process")
    assert last[-1].type == "response.completed"
    wait_until(lambda: status(stack, forsaken) == "cancelled", SLACK_S + LATE_S, "cancelled")
