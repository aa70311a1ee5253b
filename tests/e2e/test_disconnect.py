"""A client that leaves frees its slot, streaming or not."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import openai
import pytest

from tests.served_stack import ServedStack, wait_until

ENDLESS = json.dumps([{"repeat": 4000, "steps": [{"text": "x "}, {"sleep_ms": 20}]}])


def busy(stack: ServedStack, model: str) -> int:
    """How many slots of the model are taken, as its workers last said (every 2 s)."""
    return sum(report["busy"] for report in stack.model_reports(model))


def run_s(stack: ServedStack, model: str) -> float:
    """How long the model's runs take and none runs, as its leases say; 0 when unknown."""
    reports = stack.model_reports(model)
    return float(sum(report["run_s"] for report in reports if not report["busy"]))


@pytest.mark.parametrize(
    ("model", "content"), [("scripted", ENDLESS), ("demo", "Tell me a story.")]
)
def test_closing_a_stream_frees_the_slot(
    stack: ServedStack, client: openai.OpenAI, model: str, content: str
) -> None:
    with stack.file("slow"):  # Else the demo may have ended before it is known that nobody reads.
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = next(iter(stream))
        for _ in range(3):
            next(stream)
        stream.close()
        wait_until(lambda: stack.row(first.id)["status"] == "cancelled", 120, "cancelled")
    row = stack.row(first.id)
    assert 3 <= row["output_tokens"] < 1900
    assert row["input_tokens"] > 0
    wait_until(lambda: busy(stack, model) == 0, 120, "a lease that says the slot is free")


def test_four_that_leave_make_room_for_four_more(stack: ServedStack, client: openai.OpenAI) -> None:
    def start() -> Any:
        stream = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": ENDLESS}], stream=True
        )
        next(iter(stream))
        return stream

    streams = [start() for _ in range(4)]
    for stream in streams:
        stream.close()
    started = time.monotonic()
    again = [start() for _ in range(4)]
    assert time.monotonic() - started < 60  # Each of the first would have gone on for 80 s.
    for stream in again:
        stream.close()


def test_leaving_without_a_stream_cancels_too(stack: ServedStack) -> None:
    body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": ENDLESS}]})
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {stack.key}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: leaver\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )

    def status() -> str | None:
        rows = stack.sql("SELECT status FROM generations_generation WHERE request_id = 'leaver'")
        return rows[0][0] if rows else None

    with socket.create_connection(("127.0.0.1", stack.port)) as connection:
        connection.sendall(request.encode())
        wait_until(lambda: status() == "running", 120, "running")
    wait_until(lambda: status() == "cancelled", 120, "cancelled")


def test_one_that_waits_in_the_queue_is_cancelled_without_running(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    holders = [
        client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": ENDLESS}], stream=True
        )
        for _ in range(4)
    ]
    for holder in holders:
        next(iter(holder))
    waiting = client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": ENDLESS}],
        stream=True,
        extra_headers={"x-request-id": "waiter"},
    )
    waiting.close()
    holders[0].close()

    def row() -> Any:
        return stack.sql(
            "SELECT status, first_token_at FROM generations_generation WHERE request_id = 'waiter'"
        )[0]

    wait_until(lambda: row()[0] == "cancelled", 120, "cancelled")
    assert row()[1] is None
    for holder in holders[1:]:
        holder.close()


def test_client_that_reads_nothing_holds_nobody_up(stack: ServedStack) -> None:
    """Its answer, larger than the sockets' buffers, is complete; then it reads all of it."""
    steps = [{"repeat": 4000, "steps": [{"text": "x" * 2000}]}]
    messages = [{"role": "user", "content": json.dumps(steps)}]
    body = json.dumps({"model": "scripted", "messages": messages, "stream": True})
    request = (
        f"POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {stack.key}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: sleeper\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )

    def status() -> str | None:
        rows = stack.sql("SELECT status FROM generations_generation WHERE request_id = 'sleeper'")
        return rows[0][0] if rows else None

    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", stack.port))
        connection.sendall(request.encode())
        wait_until(lambda: status() == "completed", 120, "completed")
        wait_until(lambda: busy(stack, "scripted") == 0, 120, "a lease that says the slot is free")
        with connection.makefile("rb") as answer:
            received = answer.read()
    assert received.count(b"x") >= 4000 * 2000
    assert received.endswith(b"data: [DONE]\n\n")
