"""Stored responses: history, end, conversations, deletion."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
from django.apps import apps
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django.fixtures import Settings

from inference_site.accounts.models import ApiKey, Project
from inference_site.core.domain.deltas import Delta, Finish, ReasoningDelta, TextDelta
from inference_site.core.domain.errors import ContextLengthExceeded
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.core.storage import postgresql
from inference_site.gateway.submission.context_bound import ContextBound
from inference_site.runs.models import Status
from inference_site.runs.queue import new_id
from responses_api import deletion
from responses_api.consistency import contradictions, mend
from responses_api.context import (
    Context,
    HistoryLimit,
    conversation_items,
    decode_item,
    find_conversation,
    history_of,
    input_of,
    newest_input_of,
)
from responses_api.creation import rebuild
from responses_api.deletion import delete, delete_conversation, remove_item
from responses_api.events import DONE
from responses_api.items import IdentifiedItem, new_item
from responses_api.models import Conversation, Item, StoredResponse
from responses_api.storage import ConversationLocked, accept, append, store_result
from responses_api.stored_responses import current_response, find_response, replay
from responses_api.wire.requests import ResponseRequest
from tests.responses_api.chains import LIMIT, STOP, Chain, end_generation
from tests.responses_api.deltas import call, new_assembler, read
from tests.responses_api.validation import check
from tests.statements import planned_each_time, prepared_runs, rows_fetched

pytestmark = pytest.mark.django_db
Key = tuple[ApiKey, str]


@pytest.fixture
def chain(api_key: Key) -> Chain:
    return Chain(api_key[0])


@pytest.fixture
def conversation(project: Project) -> Conversation:
    return Conversation.objects.create(public_id=new_id("conv_"), project=project)


def texts(items: list[IdentifiedItem]) -> list[str]:
    return [item.data["content"][0]["text"] for item in items]


def test_items_are_stored_once_however_long_the_chain(chain: Chain) -> None:
    last = chain.turn("0")
    for number in range(1, 10):
        last = chain.turn(str(number), previous_response_id=last.public_id)
    assert Item.objects.count() == 20


def thousand_turns(project: Project) -> list[StoredResponse]:
    """A chain with one item a turn."""
    turns = StoredResponse.objects.bulk_create(
        StoredResponse(public_id=f"resp_{n}", project=project, model="m", status="completed")
        for n in range(1000)
    )
    for last, turn in pairwise(turns):
        turn.previous = last
    StoredResponse.objects.bulk_update(turns, ["previous"])
    Item.objects.bulk_create(
        Item(
            public_id=f"msg_{n}",
            project=project,
            response=turn,
            data={"type": "message", "role": "user", "content": [{"text": str(n)}]},
        )
        for n, turn in enumerate(turns)
    )
    return turns


def test_history_a_thousand_turns_deep_is_two_statements(project: Project) -> None:
    turns, runs = thousand_turns(project), prepared_runs()
    with CaptureQueriesContext(connection) as queries:
        found = history_of(turns[-1], LIMIT)
    assert texts(found) == [str(number) for number in range(1000)]
    assert (len(queries), prepared_runs() - runs) == (0, 2)


SMALL = ContextBound(context_length=100, size=1600, items=100)


def test_a_history_is_read_no_further_than_the_context_can_hold(project: Project) -> None:
    last = thousand_turns(project)[-1]
    fetched = rows_fetched(StoredResponse._meta.db_table)
    with pytest.raises(ContextLengthExceeded, match="an estimated"):
        history_of(last, HistoryLimit(SMALL))
    newest = [str(number) for number in range(900, 1000)]
    assert (
        texts(history_of(last, HistoryLimit(replace(SMALL, size=10**6), may_truncate=True)))
        == newest
    )
    # Only the query for the root, for its instructions, follows the thousand responses.
    assert rows_fetched(StoredResponse._meta.db_table) - fetched < 2_500


def add_items(project: Project, *contents: tuple[str, str], **of: Any) -> None:
    Item.objects.bulk_create(
        Item(
            public_id=f"msg_{n}",
            project=project,
            data={"type": "message", "role": role, "content": [{"text": text}]},
            conversation_position=n,
            **of,
        )
        for n, (role, text) in enumerate(contents)
    )


def test_a_conversation_that_is_cut_keeps_its_instructions_and_its_newest_turns(
    project: Project, conversation: Conversation
) -> None:
    turns = [(role, str(n)) for n in range(100) for role in ("user", "assistant")]
    add_items(project, ("developer", "Be brief."), *turns, conversation=conversation)
    limit = HistoryLimit(replace(SMALL, items=11), may_truncate=True)
    kept = [str(n) for n in range(95, 100) for _ in range(2)]
    assert texts(conversation_items(conversation, limit)) == ["Be brief.", *kept]
    with pytest.raises(ContextLengthExceeded):
        conversation_items(conversation, replace(limit, may_truncate=False))


def test_a_few_long_items_are_enough_to_end_the_reading(
    project: Project, conversation: Conversation
) -> None:
    add_items(project, *[("user", "x" * 100)] * 300, conversation=conversation)
    with CaptureQueriesContext(connection) as queries, pytest.raises(ContextLengthExceeded):
        conversation_items(conversation, HistoryLimit(replace(SMALL, items=65_536)))
    assert len(queries) == 1
    assert "LIMIT 65" in queries[0]["sql"]


def test_a_result_whose_call_was_cut_off_is_cut_off_too(
    project: Project, conversation: Conversation
) -> None:
    one = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    other = {**one, "call_id": "b"}
    results = [{"type": "function_call_output", "call_id": c, "output": "1"} for c in "ab"]
    Item.objects.bulk_create(
        Item(
            public_id=f"i_{n}",
            project=project,
            data=data,
            conversation_position=n,
            conversation=conversation,
        )
        for n, data in enumerate([one, other, *results])
    )
    found = conversation_items(
        conversation, HistoryLimit(replace(SMALL, items=3), may_truncate=True)
    )
    assert [item.data.get("call_id") for item in found] == ["b", "b"]


def test_many_references_are_read_at_once_and_only_up_to_a_size(
    chain: Chain, settings: Settings
) -> None:
    first = chain.turn("a" * 1000)
    item = first.items.get(is_output=False).public_id
    reference = {"type": "item_reference", "id": item}
    with CaptureQueriesContext(connection) as queries:
        chain.accept([reference] * 50)
    assert sum("IN (" in query["sql"] for query in queries) == 1
    settings.MAX_BODY_BYTES = 40_000
    with pytest.raises(InvalidRequestError, match="too large") as caught:
        chain.accept([reference] * 50)
    assert caught.value.param == "input"


def test_what_reads_a_response_is_not_planned_each_time(chain: Chain) -> None:
    last = chain.turn("a", "A")
    for _ in range(7):  # PostgreSQL plans the first five.
        found = find_response(chain.project_id, last.public_id)
        assert current_response(found).id == last.public_id
        assert newest_texts(found, 21) == ["a"]
    assert planned_each_time() == []


def newest_texts(response: StoredResponse, most: int) -> list[str]:
    return texts([decode_item(item) for item in newest_input_of(response, most)])


def test_the_newest_of_a_thousand_turns_are_read_without_the_others(project: Project) -> None:
    turns, table = thousand_turns(project), StoredResponse._meta.db_table
    fetched = rows_fetched(table)
    assert newest_texts(turns[-1], 5) == ["999", "998", "997", "996", "995"]
    assert rows_fetched(table) - fetched < 10


def test_the_newest_are_the_end_of_all_that_came_before(
    chain: Chain, conversation: Conversation
) -> None:
    chain.turn("a", "A", conversation=conversation.public_id)
    chain.turn("b", "B", conversation=conversation.public_id)
    last = chain.turn("c", "C", conversation=conversation.public_id)
    for text in "de":
        last = chain.turn(text, text.upper(), previous_response_id=last.public_id)
    everything = texts(input_of(last))
    assert everything == list("aAbBcCdDe")
    for most in range(1, 12):
        assert newest_texts(last, most) == everything[::-1][:most]


def test_chain_may_begin_in_a_conversation(chain: Chain, conversation: Conversation) -> None:
    chain.turn("a", "A", conversation=conversation.public_id)
    second = chain.turn("b", "B", conversation=conversation.public_id)
    chain.turn("later", conversation=conversation.public_id)
    third = chain.accept("c", previous_response_id=second.public_id)
    assert texts(history_of(third, LIMIT)) == ["a", "A", "b", "B", "c"]
    assert texts(input_of(second)) == ["a", "A", "b"]


@pytest.mark.parametrize(
    ("deltas", "end"),
    [
        ([TextDelta("a"), TextDelta("b"), STOP], "complete"),
        ([ReasoningDelta("Hm"), TextDelta("a"), *call(0, "f", "{", "}"), STOP], "complete"),
        ([*call(0, "f"), *call(1, "run", is_custom=True), Finish("tool_calls")], "complete"),
        ([TextDelta("a"), Finish("length")], "complete"),
        ([STOP], "complete"),
        ([TextDelta("half")], "boom"),
        ([], "boom"),
        ([TextDelta("half")], "cancel"),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_stream_made_anew_is_that_which_was_sent_but_for_the_deltas(
    chain: Chain, deltas: list[Delta], end: str, background: bool
) -> None:
    ended, frames = chain.settle(chain.accept("x", background=background), *deltas, end=end)
    batch = replay(ended)
    assert batch.ending is not None

    def lasting(stream: list[bytes]) -> list[dict[str, Any]]:
        kept = (event for event in read(stream) if not event["type"].endswith(".delta"))
        return [{k: v for k, v in event.items() if k != "sequence_number"} for event in kept]

    assert lasting(list(batch.frames)) == lasting(frames)


def test_stream_made_anew_ends_as_the_site_has_it(chain: Chain, settings: Settings) -> None:
    ended = chain.turn("x")
    assert replay(ended).frames[-1] == DONE
    settings.RESPONSES_SEND_DONE = False
    assert DONE not in replay(ended).frames


def test_response_that_is_deleted_while_it_is_read_is_not_found(chain: Chain) -> None:
    """Its stream was a 500, and its object had no output."""
    stored = chain.turn("a", "A")
    delete(stored)
    for read_it in (current_response, replay):
        with pytest.raises(NotFoundError):
            read_it(stored)


def test_end_of_what_is_not_stored_is_not_kept() -> None:
    assembler = new_assembler()
    assembler.complete()
    store_result("resp_none", Status.COMPLETED, assembler, None)
    assert not StoredResponse.objects.exists()


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "f"},
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}, {"type": "mcp", "server_label": "x"}],
        },
    ],
)
def test_request_is_shown_again_as_it_was(chain: Chain, choice: Any) -> None:
    function = {"type": "function", "name": "f", "parameters": {"default": None}}
    hosted = {"type": "web_search", "filters": None, "x": [None]}
    stored = chain.accept("x", tools=[function, hosted], tool_choice=choice, stop=["a", "b"])
    response = current_response(stored).model_dump()
    assert response["tools"][0]["parameters"] == {"default": None}
    assert response["tools"][1] == hosted
    assert response["tool_choice"] == choice


def test_request_is_rebuilt_with_its_history(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    class Catalogue:
        def find(self, name: str) -> ModelSpec:
            return ModelSpec("m", "scripted")

    monkeypatch.setattr("responses_api.creation.catalogue", Catalogue)
    first = chain.turn("a", "A")
    stored = chain.accept(
        "b", previous_response_id=first.public_id, background=True, instructions="i",
        max_output_tokens=9, tools=[{"type": "function", "name": "f", "parameters": {"d": None}}],
    )  # fmt: skip
    document = rebuild(stored.public_id)
    assert document is not None
    assert [m.text for m in document.request.messages] == ["i", "a", "A", "b"]
    assert document.request.max_output_tokens == 9
    assert document.request.tools[0].parameters == {"d": None}
    assert document.assembly.response["id"] == stored.public_id
    assert rebuild("resp_none") is None


# --- Conversations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deltas", "end", "added"),
    [
        ([TextDelta("A"), STOP], "complete", ["a", "A"]),
        ([TextDelta("A"), Finish("length")], "complete", ["a", "A"]),
        ([TextDelta("A")], "boom", []),
        ([TextDelta("A")], "cancel", []),
    ],
)
def test_only_an_end_of_its_own_is_added_to_the_conversation(
    chain: Chain, conversation: Conversation, deltas: list[Delta], end: str, added: list[str]
) -> None:
    stored = chain.accept("a", conversation=conversation.public_id)
    assert texts(conversation_items(conversation, LIMIT)) == []
    chain.settle(stored, *deltas, end=end)
    assert texts(conversation_items(conversation, LIMIT)) == added
    conversation.refresh_from_db()
    assert conversation.locked_by == ""
    assert conversation.next_position == len(added)


def test_hold_ends_with_the_generation_whoever_ended_it(
    chain: Chain, conversation: Conversation
) -> None:
    first = chain.accept("a", conversation=conversation.public_id)
    end_generation(first, Status.FAILED)
    chain.accept("b", conversation=conversation.public_id)


def test_context_that_is_out_of_date_is_not_accepted(
    chain: Chain, conversation: Conversation, project: Project
) -> None:
    """Items that another response added after the context was read would be missing in it."""
    stale = Conversation.objects.get(pk=conversation.pk)
    data = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
    row = Item.objects.create(public_id=new_id("msg_"), project=project, data=data)
    append(conversation, [row])
    conversation.save()
    body = ResponseRequest.model_validate({"input": "a"})
    response = {"id": new_id("resp_"), "model": "m", "created_at": 0}
    context = Context([new_item(data)], conversation=stale)
    with pytest.raises(ConversationLocked):
        accept(project.pk, response, body, context)


def test_places_in_a_conversation_are_unique(conversation: Conversation, project: Project) -> None:
    for expected in (None, IntegrityError):
        item = Item(
            public_id=new_id("msg_"), project=project, data={}, conversation=conversation,
            conversation_position=0,
        )  # fmt: skip
        if expected is None:
            item.save()
        else:
            with pytest.raises(expected), transaction.atomic():
                item.save()


@pytest.mark.parametrize(
    "fields", [{"status": "failed", "completed_at": "2026-01-01T00:00Z"}, {"both": True}]
)
def test_rows_that_contradict_themselves_are_refused(
    project: Project, conversation: Conversation, fields: dict[str, Any]
) -> None:
    row = {"project": project, "model": "m", "status": "completed", **fields}
    if row.pop("both", False):
        row |= {
            "conversation": conversation,
            "previous": StoredResponse.objects.create(public_id="p", **row),
        }
    with pytest.raises(IntegrityError), transaction.atomic():
        StoredResponse.objects.create(public_id="x", **row)


# --- Deletion ------------------------------------------------------------------------------------


def kept() -> set[str]:
    return set(StoredResponse.objects.values_list("public_id", flat=True))


def test_deleted_response_is_gone_with_its_items(chain: Chain) -> None:
    delete(chain.turn("a"))
    assert kept() == set()
    assert not Item.objects.exists()


def test_deleted_response_stays_hidden_until_no_other_needs_it(chain: Chain) -> None:
    first = chain.turn("a")
    second = chain.turn("b", previous_response_id=first.public_id)
    other = chain.turn("c", previous_response_id=first.public_id)
    delete(first)
    delete(second)
    assert kept() == {first.public_id, other.public_id}
    assert texts(history_of(other, LIMIT)) == ["a", "ok", "c", "ok"]
    delete(other)
    assert kept() == set()


def test_a_user_is_forgotten_although_a_client_deletes_the_items_meanwhile(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ended with a traceback, and nothing was forgotten."""
    first = chain.turn("a")
    chain.turn("b", previous_response_id=first.public_id)
    empty = deletion._without_content

    def delete_meanwhile(data: dict[str, Any]) -> dict[str, Any]:
        Item.objects.filter(response=first).delete()
        return empty(data)

    monkeypatch.setattr(deletion, "_without_content", delete_meanwhile)
    forgotten = deletion.forget("ann", None, [first.public_id])
    assert forgotten == {"responses": 1, "conversations": 0}
    first.refresh_from_db()
    assert first.request == {}


def test_sweep_stops_at_what_is_not_deleted(chain: Chain) -> None:
    first = chain.turn("a")
    second = chain.turn("b", previous_response_id=first.public_id)
    delete(second)
    assert kept() == {first.public_id}


def test_deleted_response_goes_with_the_last_of_its_items_in_a_conversation(
    chain: Chain, conversation: Conversation
) -> None:
    delete(chain.turn("a", "A", conversation=conversation.public_id))
    first, last = Item.objects.filter(conversation=conversation)
    with transaction.atomic():
        remove_item(first)
    assert len(kept()) == 1
    with transaction.atomic():
        remove_item(last)
    assert kept() == set()
    assert not Item.objects.exists()


def test_deleted_conversation_goes_with_the_last_of_its_responses(
    chain: Chain, conversation: Conversation
) -> None:
    first = chain.turn("a", conversation=conversation.public_id)
    second = chain.turn("b", conversation=conversation.public_id)
    after = chain.turn("c", previous_response_id=first.public_id)
    delete_conversation(conversation)
    delete(first)
    delete(second)
    assert texts(history_of(after, LIMIT)) == ["a", "ok", "c", "ok"]
    delete(after)
    assert not kept()
    assert not Conversation.objects.exists()
    assert not Item.objects.exists()


def test_deleted_conversation_without_responses_is_gone_with_its_items(
    chain: Chain, conversation: Conversation, project: Project
) -> None:
    row = Item.objects.create(public_id=new_id("msg_"), project=project, data={})
    append(conversation, [row])
    conversation.save()
    delete(chain.turn("a", conversation=conversation.public_id))
    assert Item.objects.count() == 3
    delete_conversation(conversation)
    assert not Conversation.objects.exists()
    assert not Item.objects.exists()
    assert not kept()


def test_conversations_that_were_hidden_by_earlier_releases_are_swept(
    chain: Chain, project: Project
) -> None:
    def hidden(*, responses_too: bool = True) -> StoredResponse:
        conversation = Conversation.objects.create(public_id=new_id("conv_"), project=project)
        made = chain.turn("a", conversation=conversation.public_id)
        Conversation.objects.filter(pk=conversation.pk).update(deleted_at=timezone.now())
        if responses_too:
            StoredResponse.objects.filter(pk=made.pk).update(deleted_at=timezone.now())
        return made

    gone, shown, built_on = hidden(), hidden(responses_too=False), hidden(responses_too=False)
    chain.turn("b", previous_response_id=built_on.public_id)
    StoredResponse.objects.filter(pk=built_on.pk).update(deleted_at=timezone.now())
    migration = import_module("responses_api.migrations.0004_sweep_deleted_conversations")
    for _ in range(2):
        migration.sweep(apps, None)
        left = set(Conversation.objects.values_list("pk", flat=True))
        assert left == {shown.conversation_id, built_on.conversation_id}
    assert not Item.objects.filter(response=gone.pk).exists()
    assert not StoredResponse.objects.filter(pk=gone.pk).exists()


@pytest.mark.django_db(transaction=True)
def test_who_stands_still_in_a_transaction_holds_no_conversation_for_long(
    chain: Chain, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "_STILL_MS", 300)
    holds, is_over = threading.Event(), threading.Event()

    def stand_still() -> str:
        try:
            with transaction.atomic():
                find_conversation(chain.project_id, conversation.public_id, lock=True)
                holds.set()
                is_over.wait(30)
                Conversation.objects.update(metadata={"too": "late"})
        except DatabaseError as exc:
            return type(exc).__name__
        finally:
            connection.close()
        return "committed"

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(stand_still)
        assert holds.wait(60)
        with transaction.atomic():  # It waits for the row.
            chain.accept("a", conversation=conversation.public_id)
        is_over.set()
        assert other.result(60) != "committed"


def test_nothing_is_accepted_on_what_was_deleted_meanwhile(
    chain: Chain, conversation: Conversation
) -> None:
    body = ResponseRequest.model_validate({"input": "a"})
    response = {"id": new_id("resp_"), "model": "m", "created_at": 0}
    first = chain.turn("a")
    delete(first)
    with pytest.raises(InvalidRequestError) as refused:
        accept(chain.project_id, response, body, Context([], previous=first))
    assert refused.value.code == "previous_response_not_found"
    delete_conversation(conversation)
    with pytest.raises(NotFoundError):
        accept(chain.project_id, response, body, Context([], conversation=conversation))


# --- Contradictions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "told"), [(Status.FAILED, "failed"), (Status.CANCELLED, "cancelled")]
)
def test_response_whose_generation_has_ended_is_ended_too(
    chain: Chain, conversation: Conversation, status: Status, told: str
) -> None:
    torn = chain.accept("a", conversation=conversation.public_id)
    end_generation(torn, status)
    waits = chain.accept("b", background=True)
    assert list(contradictions().values()) == [1, 1]
    mend()
    assert list(contradictions().values()) == [0, 0]
    torn.refresh_from_db()
    waits.refresh_from_db()
    conversation.refresh_from_db()
    assert (torn.status, waits.status, conversation.locked_by) == (told, "queued", "")
    check("response", current_response(torn).model_dump())


def test_lock_of_a_response_that_runs_is_left_alone(
    chain: Chain, conversation: Conversation
) -> None:
    Conversation.objects.filter(pk=conversation.pk).update(locked_by="resp_gone")
    other = Conversation.objects.create(public_id=new_id("conv_"), project=conversation.project)
    runs = chain.accept("a", conversation=other.public_id)
    mend()
    locks = dict(Conversation.objects.values_list("public_id", "locked_by"))
    assert locks == {conversation.public_id: "", other.public_id: runs.public_id}


def test_nul_is_kept_as_another_character(chain: Chain) -> None:
    stored = chain.turn("a\0", "b\0", metadata={"\0": "\0"}, instructions="\0")
    found = StoredResponse.objects.get(pk=stored.pk)
    assert texts(history_of(found, LIMIT)) == ["a\ufffd", "b\ufffd"]
    assert found.metadata == {"\ufffd": "\ufffd"}
    assert found.request["instructions"] == "\ufffd"
    assert StoredResponse.objects.filter(metadata__contains={"\0": "\0"}).exists()
