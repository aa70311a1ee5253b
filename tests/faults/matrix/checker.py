"""What must be true of a ledger and the stores, once everything has come to rest."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from tests.faults.matrix.ledger import Ledger, Request
from tests.served_stack import ServedStack

_ENDED = {
    "completed": {"completed", "incomplete"},
    "failed": {"failed"},
    "cancelled": {"cancelled"},
}
"""The statuses that a stored response may have beside that of its generation."""


class Row(NamedTuple):
    """A generation."""

    public_id: str
    tag: str
    status: str
    error_code: str
    input_tokens: int
    output_tokens: int
    response_status: str | None


@dataclass(frozen=True)
class Violation:
    """A promise that was broken, for whom, and when its request began."""

    promise: str
    detail: str
    began_at: float = 0.0


_ROWS = """
SELECT g.public_id, g.end_user, g.status, g.error_code, g.input_tokens, g.output_tokens, r.status
FROM generations_generation g LEFT JOIN responses_api_storedresponse r USING (public_id)
"""


def violations(stack: ServedStack, ledger: Ledger, rest_s: float = 90.0) -> list[Violation]:
    """Wait until nothing runs any more, then return all promises that were broken."""
    rows = _at_rest(stack, rest_s)
    by_tag: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_tag[row.tag].append(row)
    found = [*_of_rows(rows), *_of_locks(stack)]
    with stack.http() as http:
        for request in ledger.requests:
            for promise, detail in _of_request(request, by_tag[request.tag], http):
                name = f"{request.client} {request.id or request.tag}"
                found.append(Violation(promise, f"{name}: {detail}", request.began_at))
    return found


def _at_rest(stack: ServedStack, rest_s: float) -> list[Row]:
    """Return the rows once all have ended and all pairs agree, or after this time as they are."""
    deadline = time.monotonic() + rest_s
    while True:
        rows = [Row(*row) for row in stack.sql(_ROWS)]
        if not list(_of_rows(rows)) or time.monotonic() > deadline:
            return rows
        time.sleep(0.5)


def _of_rows(rows: list[Row]) -> Iterator[Violation]:
    for row in rows:
        if row.status not in _ENDED:
            yield Violation("accepted means ended", f"{row.public_id} is {row.status}")
        elif row.response_status is not None and row.response_status not in _ENDED[row.status]:
            detail = f"{row.public_id}: {row.status}, its response {row.response_status}"
            yield Violation("one truth", detail)


def _of_locks(stack: ServedStack) -> Iterator[Violation]:
    """A conversation is free once nothing runs on it."""
    held = stack.sql("SELECT public_id FROM responses_api_conversation WHERE deleted_at IS NULL")
    with stack.http() as http:
        for (conversation,) in held:
            body = {"model": "scripted", "input": '[{"text":"ok"}]', "conversation": conversation}
            answer = http.post("/v1/responses", json=body)
            if answer.status_code != 200:
                yield Violation("a conversation is free", f"{conversation}: {answer.text[:200]}")


def _of_request(request: Request, rows: list[Row], http: httpx.Client) -> Iterator[tuple[str, str]]:
    for problem in request.problems:
        yield "streams and answers are whole", problem
    completed = [row for row in rows if row.status == "completed"]
    if request.has_key and len(completed) > 1:
        yield "a key means one run", f"{len(completed)} runs were completed"
    if not request.has_key and len(rows) > 1:
        yield "accepted means ended", f"{len(rows)} generations for one request"
    own = next((row for row in rows if row.public_id == request.id), None)
    if request.outcome == "ok":
        yield from _of_success(request, own, http)
    elif request.outcome == "error" and completed and not request.has_key:
        yield "an error means no answer", f"told {request.told}, but it ran to its end"


def _of_success(request: Request, row: Row | None, http: httpx.Client) -> Iterator[tuple[str, str]]:
    if row is None or row.status != "completed":
        yield "told means stored", f"told as completed, stored as {row and row.status}"
        return
    if request.text != request.expected:
        yield "the text is exact", f"{len(request.text)} of {len(request.expected)} characters"
    if _counts(request.usage or {}) != (row.input_tokens, row.output_tokens):
        yield "usage adds up", f"told {request.usage}, stored {row}"
    if request.is_stored:
        path = "responses" if request.is_response else "chat/completions"
        kept = http.get(f"/v1/{path}/{request.id}")
        if kept.status_code != 200 or _counts(kept.json()["usage"]) != _counts(request.usage or {}):
            yield "told means stored", f"reading it again: {kept.status_code} {kept.text[:200]}"


def _counts(usage: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the input and output tokens, whatever an endpoint calls them."""
    given = usage.get("prompt_tokens", usage.get("input_tokens"))
    return given, usage.get("completion_tokens", usage.get("output_tokens"))
