"""From deltas to the events and the object of a response."""

from __future__ import annotations

import time
from itertools import count, pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError
from pytest_django.fixtures import Settings

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import WorkerLost
from inference_site.core.storage.cipher import unseal
from inference_site.gateway.api.payload import WireObject
from inference_site.runs.streams.batches import Sent
from responses_api.events import DONE, ItemEvents, accepted_frames, decode, encode, events_of
from responses_api.output import Output
from responses_api.stored_responses import recover
from responses_api.wire.objects import (
    Message,
    OutputText,
    ResponseObject,
    ResponseStateEvent,
    changed,
)
from tests.responses_api.deltas import (
    RESPONSE_ID,
    begun,
    call,
    final,
    logprob,
    new_assembler,
    new_response,
    read,
    sent,
    whole,
)
from tests.responses_api.validation import check

STOP = Finish("stop")
LIVELY: list[Delta] = [
    ReasoningDelta("Hm"),
    TextDelta("a", logprobs=(logprob("a"),)),
    TextDelta("b", logprobs=(logprob("b"),)),
    *call(0, "f", '{"x":', "1}"),
]


def texts(response: dict[str, Any]) -> list[str]:
    """The text of each output item."""
    return [
        item["content"][0]["text"]
        if "content" in item
        else item.get("arguments", item.get("input"))
        for item in response["output"]
    ]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{k: v for k, v in item.items() if k != "id"} for item in response["output"]]
    return {**response, "output": output, "completed_at": None}


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """The text, divided at random positions."""
    places = draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=6))
    bounds = [0, *sorted(place for place in places if place < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@hypothesis_settings(deadline=None)  # The first draw compiles the validators.
@given(st.data(), st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_pieces_do_not_matter(data: st.DataObject, thought: str, text: str) -> None:
    """However the texts are divided, the object is the same, and the deltas add up to its texts."""

    def told() -> list[Delta]:
        arguments = data.draw(cut(text))
        return [
            *(ReasoningDelta(piece) for piece in data.draw(cut(thought))),
            *(TextDelta(piece) for piece in data.draw(cut(text))),
            *call(0, "f", *arguments),
            *call(1, "g", *arguments, is_custom=True),
            STOP,
            Usage(1, 0, 2, 1),
        ]

    first, second = whole(told())[0], whole(told())[0]
    assert without_ids(final(first)) == without_ids(final(second))
    assert texts(final(first)) == [thought, text, text, text]
    deltas: dict[str, str] = {}
    for event in read(first):
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert list(deltas.values()) == texts(final(first))


def test_a_response_is_not_completed_before_it_was_created() -> None:
    """The clock of the worker may be behind that of the web process."""
    later = int(time.time()) + 300
    frames, _ = whole([TextDelta("Hi"), STOP], response={**new_response(), "created_at": later})
    assert final(frames)["completed_at"] == later


def test_answer_without_a_stream_is_the_same() -> None:
    deltas = [*LIVELY, STOP, Usage(1, 0, 2, 1)]
    streamed, _ = whole(deltas)
    frames, ending = whole(deltas, emits=False)
    assert frames == [DONE]
    body = orjson.loads(ending.body)
    check("response", body)
    assert without_ids(body) == without_ids(final(streamed))


def test_what_was_sent_is_counted_by_its_pieces() -> None:
    frames = begun(new_assembler(), LIVELY)
    assert Output(frames).pieces == 5


def test_stream_may_end_without_done() -> None:
    frames, _ = whole([TextDelta("a"), STOP], sends_done=False)
    assert DONE not in frames


def test_arguments_before_their_call_are_dropped() -> None:
    response = final(whole([ToolCallDelta(0, "{}"), TextDelta("a"), STOP])[0])
    assert texts(response) == ["a"]


def test_reasoning_is_sealed_once_for_its_project() -> None:
    events = read(whole([ReasoningDelta("deep"), TextDelta("a"), STOP], seal_for=3)[0])
    [done] = [
        event["item"]
        for event in events
        if event["type"] == "response.output_item.done" and event["item"]["type"] == "reasoning"
    ]
    assert done == events[-1]["response"]["output"][0]
    assert unseal(done["encrypted_content"], 3, "x") == "deep"
    [added] = [e["item"] for e in events if e["type"] == "response.output_item.added"][:1]
    assert "encrypted_content" not in added


@pytest.mark.parametrize("length", range(len(LIVELY) + 1))
def test_transcript_shows_what_the_frames_say(length: int) -> None:
    """At any point it is the final output, but for the status of the last item."""
    assembler = new_assembler()
    frames = begun(assembler, LIVELY[:length])
    shown = [item.model_dump() for item in Output(frames).so_far()]
    for item in shown:
        check("item", item)
    assembler.cancel()
    ended = assembler.response.model_dump()["output"]
    assert shown[:-1] == ended[:-1]
    assert [{**item, "status": "x"} for item in shown] == [
        {**item, "status": "x"} for item in ended
    ]
    assert [item["status"] for item in shown[-1:]] == ["in_progress"] * bool(shown)


@pytest.mark.parametrize("length", range(len(LIVELY) + 1))
@pytest.mark.parametrize("background", [False, True])
def test_stream_is_ended_in_place_of_its_worker(
    settings: Settings, length: int, background: bool
) -> None:
    response = new_response(background=background)
    frames = begun(new_assembler(response), LIVELY[:length])
    recovered = recover(RESPONSE_ID, sent(frames))
    assert recovered is not None
    ending = recovered.fail(WorkerLost())
    events = read([*frames, *ending.frames])
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["output"] == recovered.response.model_dump()["output"]
    assert ending.frames[-1] == DONE
    settings.RESPONSES_SEND_DONE = False
    again = recover(RESPONSE_ID, sent(frames))
    assert again is not None
    assert DONE not in again.cancel().frames


@pytest.mark.parametrize("length", range(len(LIVELY) + 1))
@pytest.mark.parametrize("is_recovered", [False, True])
def test_items_make_the_same_events_again(length: int, is_recovered: bool) -> None:
    """Also an item whose first deltas were read from its frames."""
    assembler = new_assembler()
    frames = begun(assembler, LIVELY[:length])
    if is_recovered:
        found = recover(RESPONSE_ID, sent(frames))
        assert found is not None
        assembler = found
    frames += assembler.cancel().frames
    deltas = assembler.deltas
    assert deltas is not None
    again = [
        encode(event)
        for index, (item, cut_) in enumerate(
            zip(assembler.response.output, deltas["items"], strict=True)
        )
        for event in ItemEvents(item.id, index, count(cut_["first"])).whole(
            item, cut_["sizes"], cut_["logprob_counts"]
        )
    ]
    assert again == frames[2 : deltas["end"]]


def test_impossible_token_does_not_keep_a_stream_from_being_ended() -> None:
    """JSON has no infinity: its log probability is null."""
    delta = TextDelta("a", logprobs=(logprob("a", -float("inf")),))
    frames = begun(new_assembler(), [delta])
    recovered = recover(RESPONSE_ID, sent(frames))
    assert recovered is not None
    [event] = [decode(frame) for frame in frames if b"output_text.delta" in frame][:1]
    assert event["logprobs"][0]["logprob"] is None
    assert recovered.fail(WorkerLost()).frames[-1] == DONE


def test_one_that_was_only_accepted_is_ended_too() -> None:
    frames = list(accepted_frames(new_response(background=True)))
    recovered = recover(RESPONSE_ID, sent(frames))
    assert recovered is not None
    assert final([*frames, *recovered.cancel().frames])["status"] == "cancelled"


def test_second_attempt_after_a_log_that_was_lost_begins_anew_with_higher_numbers() -> None:
    second = new_assembler(new_response(background=True))
    frames = [*second.restart(Sent(next=1000)), *begun(second, [TextDelta("again"), STOP])]
    told = [decode(frame) for frame in [*frames, *second.complete().frames][:-1]]
    assert [event["sequence_number"] for event in told] == list(range(1000, 1000 + len(told)))
    kinds = [event["type"] for event in told]
    assert kinds[:2] == ["response.in_progress", "response.output_item.added"]
    assert texts(told[-1]["response"]) == ["again"]


@pytest.mark.parametrize("length", range(len(LIVELY) + 1))
def test_second_attempt_goes_on_after_the_first(length: int) -> None:
    """The sent events stay, their item is closed, and the output is that of the second attempt."""
    response = new_response(background=True)
    first = begun(new_assembler(response), LIVELY[:length])
    second = new_assembler(response)
    closing = list(second.restart(sent(first)))
    frames = [*first, *closing, *begun(second, [TextDelta("again"), STOP])]
    frames += second.complete().frames
    assert texts(final(frames)) == ["again"]
    *ends, begins = [decode(frame) for frame in closing]
    assert begins["type"] == "response.in_progress"
    assert begins["response"]["output"] == []
    if length:
        assert ends[-1]["item"]["status"] == "incomplete"


@pytest.mark.parametrize(("background", "opening"), [(True, ["response.in_progress"]), (False, [])])
def test_attempt_of_what_was_only_accepted_opens_the_stream(
    background: bool, opening: list[str]
) -> None:
    response = new_response(background=background)
    first = list(accepted_frames(response))
    second = new_assembler(response)
    assert list(second.restart(sent(first))) == []
    assert [decode(frame)["type"] for frame in second.begin()] == opening


@pytest.mark.parametrize("deltas", [LIVELY, [ToolCallDelta(0, "{}", "call_1", "f")]])
def test_output_of_the_first_attempt_is_not_shown_with_that_of_the_second(
    deltas: list[Delta],
) -> None:
    response = new_response(background=True)
    first = begun(new_assembler(response), deltas)
    second = new_assembler(response)
    frames = [*first, *second.restart(sent(first))]
    assert Output(frames).so_far() == []
    frames += begun(second, [TextDelta("again")])
    assert [item.model_dump()["content"][0]["text"] for item in Output(frames).so_far()] == [
        "again"
    ]
    recovered = recover(RESPONSE_ID, sent(frames))
    assert recovered is not None
    assert texts(final([*frames, *recovered.fail(WorkerLost()).frames])) == ["again"]


@hypothesis_settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_frames_of_deltas_are_their_events_encoded(text: str) -> None:
    """Deltas are formatted without the wire models, because there is one for each token."""
    frames = begun(
        new_assembler(),
        [
            TextDelta(text),
            TextDelta(text, logprobs=(logprob(text, -0.1, text, "b"),)),
            ReasoningDelta(text),
            *call(0, "f", text),
            *call(1, "f", text, is_custom=True),
        ],
    )
    assert [encode(event) for event in events_of(frames)] == frames


@pytest.mark.parametrize("part", [OutputText, Message, ResponseStateEvent, ResponseObject])
def test_misspelt_field_fails_where_it_is_written(part: type[WireObject]) -> None:
    with pytest.raises(ValidationError):
        part.model_validate({"stauts": "completed"})
    with pytest.raises(TypeError, match="stauts"):
        changed(part.model_construct(), stauts="completed")
