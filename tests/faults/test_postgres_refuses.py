"""A PostgreSQL that is there and takes no writes, or holds a table locked."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psycopg
import pytest

from tests.e2e.keys import make_key
from tests.faults.test_processes_die import Reader, answers, messages, slow
from tests.served_stack import ServedStack, wait_until

LOCKED_S, LONGEST_S = 9.0, 6.0
"""For how long a table is locked, and what a bystander's chat may take meanwhile: one or two
seconds, and time for a machine that is busy."""


@contextlib.contextmanager
def read_only(stack: ServedStack) -> Iterator[None]:
    """Have PostgreSQL take no writes, in sessions that are open as well, as after a failover."""
    _alter(stack, "SET default_transaction_read_only = on")
    try:
        yield
    finally:
        _alter(stack, "RESET default_transaction_read_only")


def _alter(stack: ServedStack, change: str) -> None:
    with psycopg.connect(stack.services["DATABASE_URL"], autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(f"ALTER SYSTEM {change}".encode())
        connection.execute("SELECT pg_reload_conf()")


def background(http: httpx.Client, *steps: dict[str, Any]) -> str:
    """Begin a response in the background; return its id."""
    fields = {"model": "scripted", "input": json.dumps(steps), "background": True}
    begun = http.post("/v1/responses", json=fields)
    assert begun.status_code == 200, begun.text
    return str(begun.json()["id"])


def asked_status(http: httpx.Client) -> int:
    """Ask for a stored response; return the status of the answer."""
    return http.post("/v1/responses", json={"model": "scripted", "input": "[]"}).status_code


def statuses(stack: ServedStack, ids: list[str]) -> set[str]:
    """Return the statuses of these generations."""
    return {stack.row(id_)["status"] for id_ in ids}


def test_a_read_only_postgres_refuses_what_is_new_and_what_runs_waits(stack: ServedStack) -> None:
    with stack.http() as http:
        reader = Reader(stack, slow(10))
        stored = background(http, {"repeat": 10, "steps": [{"text": "x "}, {"sleep_ms": 100}]})
        wait_until(lambda: statuses(stack, [stored]) == {"running"}, 30, "the run")
        never_used = make_key(stack)
        with read_only(stack):
            with never_used.http(stack) as other:
                assert other.get("/v1/models").status_code == 200
            ready = "/health/ready"
            wait_until(lambda: http.get(ready).status_code == 503, 30, "the health check")
            assert http.get(ready).json()["checks"]["postgres"] == "it takes no writes"
            for path, fields in (
                ("/v1/chat/completions", {"messages": messages({"text": "ok"})}),
                ("/v1/responses", {"input": "[]"}),
                ("/v1/conversations", {}),
            ):
                refused = http.post(path, json={"model": "scripted", **fields})
                assert refused.status_code == 503, refused.text
                assert refused.json()["error"]["code"] == "database_unavailable"
                assert refused.headers["retry-after"]
            assert http.get(f"/v1/responses/{stored}").status_code == 200
            name = {"username": "nobody", "password": "x"}
            page = http.get("/admin/login/")
            name |= {"csrfmiddlewaretoken": page.cookies["csrftoken"]}
            page = http.post("/admin/login/", data=name, headers={"Referer": stack.url})
            assert (page.status_code, page.headers["retry-after"]) == (503, "5"), page.text
            time.sleep(2)  # Both runs are at their ends.
            assert statuses(stack, [reader.id, stored]) == {"running"}
        wait_until(lambda: answers(stack, "scripted"), 60, "the next request")
        reader.wait(60)
        assert (reader.error, reader.text) == (None, "x " * 10)
        done = {"completed"}
        wait_until(lambda: statuses(stack, [reader.id, stored]) == done, 60, "their records")


@pytest.mark.parametrize("table", ["responses_api_storedresponse"])
def test_a_locked_table_of_responses_delays_no_chat_of_another_project(
    stack: ServedStack, table: str
) -> None:
    other = stack.client(make_key(stack).secret)
    with stack.http() as http, psycopg.connect(stack.services["DATABASE_URL"]) as locker:
        steps = ({"text": "x"}, {"sleep_ms": 1000})
        ids = [background(http, *steps) for _ in range(4)]  # All slots of the model.
        wait_until(lambda: statuses(stack, ids) == {"running"}, 30, "the runs")
        locker.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
        # More of them, of two projects, whose acceptance waits for the table, too: each may have
        # half of the threads.
        second = make_key(stack).http(stack)
        with ThreadPoolExecutor(12) as pool, second:
            more = [pool.submit(asked_status, one) for _ in range(12) for one in (http, second)]
            longest_s, locked_at = 0.0, time.monotonic()
            while (began := time.monotonic()) < locked_at + LOCKED_S:
                other.chat.completions.create(model="scripted", messages=messages({"text": "ok"}))
                longest_s = max(longest_s, time.monotonic() - began)
                time.sleep(0.1)
            locker.rollback()
            assert {job.result() for job in more} <= {200, 503}
        assert longest_s < LONGEST_S
        wait_until(lambda: statuses(stack, ids) == {"completed"}, 60, "their ends")
