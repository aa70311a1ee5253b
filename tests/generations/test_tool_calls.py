"""Rows of calls: each leaves a worker once, and only the worker that holds the generation sends."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from inference_site.accounts.models import ApiKey
from inference_site.core.domain.deltas import Usage
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult
from inference_site.runs.models import Claim, Generation, Status
from inference_site.runs.tool_calls.models import (
    CallStatus,
    SavedTurns,
    ToolCall,
    close,
    hash_of,
)
from tests.generations.rows import create_generation
from worker.runtime.site_calls import SiteCalls
from worker.tools.base import CallContext, register

pytestmark = pytest.mark.django_db
CALLS = [SiteCall(0, 0, "look", '{"at":1}'), SiteCall(1, 0, "look", '{"at":2}')]
PRICE = Decimal("0.25")
RESULT = ToolResult("seen\0", {"output": "seen"}, [Source("http://a", "A")])


@pytest.fixture
def claim(api_key: tuple[ApiKey, str]) -> Claim:
    """A generation that a worker runs."""
    row = create_generation(
        api_key[0], status=Status.RUNNING, worker="w", attempt=1, background=True
    )
    return Claim(row.public_id, row.kind, 1, "w", background=True)


def planned(claim: Claim) -> dict[int, ToolCall]:
    """Return the rows of the calls of a turn, which is saved."""
    rows = ToolCall.objects.plan(claim, CALLS, ["mcp"], {"items": []}, Usage(3, 0, 2))
    assert rows is not None
    return rows


def lost(claim: Claim) -> None:
    """Have the generation run by another worker."""
    Generation.objects.filter(public_id=claim.public_id).update(worker="other", attempt=2)


def test_a_call_is_sent_once_whoever_has_read_its_row(claim: Claim) -> None:
    rows, same = planned(claim), planned(claim)
    assert ToolCall.objects.send(claim, rows[0], rows[0].arguments_hash, PRICE)
    assert not ToolCall.objects.send(claim, same[0], same[0].arguments_hash, PRICE)
    assert planned(claim)[0].status == CallStatus.SENT
    assert planned(claim)[0].arguments_hash == hash_of('{"at":1}') != hash_of('{"at":2}')


def test_a_worker_that_lost_the_generation_plans_and_sends_nothing(claim: Claim) -> None:
    rows = planned(claim)
    lost(claim)
    assert not ToolCall.objects.send(claim, rows[0], rows[0].arguments_hash, PRICE)
    assert ToolCall.objects.plan(claim, CALLS, ["mcp"], {}, Usage()) is None


def test_a_result_counts_for_its_attempt_and_is_kept_until_the_end(claim: Claim) -> None:
    row = planned(claim)[0]
    ToolCall.objects.send(claim, row, row.arguments_hash, PRICE)
    again = planned(claim)[0]
    ToolCall.objects.send(claim, again, again.arguments_hash, PRICE)
    assert not ToolCall.objects.finish(row, RESULT, is_unknown=False, keeps=True)
    assert ToolCall.objects.finish(again, RESULT, is_unknown=False, keeps=True)
    stored = planned(claim)[0].stored_result
    assert stored is not None
    assert planned(claim)[0].cost == 2 * PRICE  # It has left twice.
    assert (stored.output, stored.sources) == ("seen\ufffd", [Source("http://a", "A")])


def test_the_end_removes_content_and_what_was_sent_is_unknown(claim: Claim) -> None:
    rows = planned(claim)
    ToolCall.objects.send(claim, rows[0], rows[0].arguments_hash, PRICE)
    ToolCall.objects.finish(rows[0], RESULT, is_unknown=False, keeps=True)
    ToolCall.objects.send(claim, rows[1], rows[1].arguments_hash, PRICE)
    assert SavedTurns.objects.get(generation_id=claim.public_id).usage_so_far == Usage(3, 0, 2)
    Generation.objects.finish(claim, Status.CANCELLED, cost=1)
    assert close(claim.public_id) == 2 * PRICE
    assert Generation.objects.get(public_id=claim.public_id).cost == 1 + 2 * PRICE
    found = ToolCall.objects.of(claim.public_id).values_list("status", "result")
    assert list(found) == [(CallStatus.DONE, None), (CallStatus.UNKNOWN, None)]
    assert not SavedTurns.objects.exists()
    # A result that comes late is known, and its content is not stored any more.
    assert ToolCall.objects.finish(rows[1], RESULT, is_unknown=False, keeps=True)
    late = ToolCall.objects.of(claim.public_id)[1]
    assert (late.status, late.result) == (CallStatus.DONE, None)


class Judge:
    """A tool that may be asked again; ``texts`` are those that it was asked about."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def is_idempotent(self, name: str) -> bool:
        return True

    def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        self.texts.append(arguments["text"])
        return ToolResult(f"of {arguments['text']}")


@pytest.mark.django_db(transaction=True)
def test_a_stored_result_counts_for_the_same_arguments_only(claim: Claim) -> None:
    """An answer that was generated again after a restart is judged again."""
    judge = Judge()
    register("judge", lambda options: judge)
    stream: Any = SimpleNamespace(cancelled=False)

    def judged(text: str, images: str = "") -> str:
        options = [{"type": "judge", "images_hash": images}]
        calls = SiteCalls(claim, stream, options, keeps=True)
        made = [SiteCall(7, 0, "judge", f'{{"text":"{text}"}}')]
        [result] = calls.run(made, {}, Usage(), lambda: ())
        return result.output

    said = [judged(text) for text in ("a", "a", "b", "b", "a")]
    assert said == ["of a", "of a", "of b", "of b", "of a"]
    assert judge.texts == ["a", "b", "a"]
    judged("a", "other images")
    assert judge.texts == ["a", "b", "a", "a"]
    judged("a", "other images")
    assert ToolCall.objects.get(generation_id=claim.public_id).attempt == 4
