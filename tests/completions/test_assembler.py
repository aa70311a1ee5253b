"""Deltas in, chunks and one completion out: the same content, streamed or not."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai.types.chat as openai_chat
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions.assemblers.chat import CHAT, ChatAssembler, ChatAssembly
from completions.assemblers.completion import COMPLETION, CompletionAssembly
from completions.assemblers.site_tools import chat_assembler
from completions.assemblers.tokens import EmbeddingAssembler, EmbeddingAssembly
from completions.ollama.assembler import OLLAMA, OllamaAssembly
from completions.wire.chat import ChatCompletion, ChatCompletionChunk
from inference_site.core.domain.deltas import (
    Delta,
    EmbeddingDelta,
    Finish,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import (
    ContextLengthExceeded,
    DocumentLost,
    GenerationFailed,
    InvalidRequest,
    QueueTimeout,
)
from inference_site.core.domain.request import GenerationRequest, Message
from inference_site.core.domain.site_tools import Source, ToolResult
from inference_site.runs.kinds import failure, kind_of
from inference_site.runs.streams.batches import Ending, Sent
from inference_site.runs.streams.request_documents import Assembly
from inference_site.runs.tool_calls.turns import Turns

Frames = list[bytes]
DONE = b"data: [DONE]\n\n"
STOP = Finish("stop")
pieces = st.lists(
    st.one_of(st.builds(TextDelta, st.text()), st.builds(ReasoningDelta, st.text())), max_size=8
)
reasons = st.sampled_from(["stop", "length"])
counts = st.integers(0, 2**31)


def assembler(*, stream: bool = True, include_usage: bool = False) -> ChatAssembler:
    return ChatAssembler(ChatAssembly("chatcmpl-1", 1_700_000_000, "demo", stream, include_usage))


def run(deltas: Sequence[Delta], **options: bool) -> tuple[Frames, Ending]:
    """Return every frame, those of the ending included, and the ending."""
    fold = assembler(**options)
    frames = [frame for delta in deltas for frame in fold.feed(delta)]
    ending = fold.complete()
    return [*frames, *ending.frames], ending


def chunks(frames: Frames) -> list[dict[str, Any]]:
    """Decode the events before ``[DONE]``, which must be the last one."""
    assert frames[-1] == DONE
    for frame in frames:
        assert frame.startswith(b"data: ")
        assert frame.endswith(b"\n\n")
        assert frame.count(b"\n") == 2  # One line of data each, whatever the text holds.
    return [orjson.loads(frame[6:]) for frame in frames[:-1]]


def content(frames: Frames, key: str = "content") -> str:
    choices = [choice for chunk in chunks(frames) for choice in chunk["choices"]]
    return "".join(choice["delta"].get(key) or "" for choice in choices)


def completion(deltas: Sequence[Delta]) -> dict[str, Any]:
    frames, ending = run(deltas, stream=False)
    assert frames == [DONE]  # Nothing goes out before the end.
    decoded: dict[str, Any] = orjson.loads(ending.body)
    return decoded


@given(pieces, reasons, st.booleans())
def test_every_chunk_equals_its_wire_model(
    deltas: list[Delta], reason: FinishReason, include_usage: bool
) -> None:
    frames, _ = run([*deltas, Finish(reason), Usage(3, 1, 2, 1)], include_usage=include_usage)
    keys = {"id", "object", "created", "model", "choices", "service_tier", "system_fingerprint"}
    for chunk in chunks(frames):
        assert ChatCompletionChunk.model_validate(chunk).model_dump(exclude_unset=True) == chunk
        openai_chat.ChatCompletionChunk.model_validate(chunk)
        assert chunk.keys() == (keys | {"usage"} if include_usage else keys)
        for choice in chunk["choices"]:
            assert choice.keys() == {"index", "delta", "logprobs", "finish_reason"}
    firsts = {(c["id"], c["created"], c["model"], c["object"]) for c in chunks(frames)}
    assert firsts == {("chatcmpl-1", 1_700_000_000, "demo", "chat.completion.chunk")}


@given(pieces, reasons, counts, counts)
def test_the_completion_equals_its_wire_model(
    deltas: list[Delta], reason: FinishReason, input_tokens: int, output_tokens: int
) -> None:
    body = completion([*deltas, Finish(reason), Usage(input_tokens, 0, output_tokens)])
    assert ChatCompletion.model_validate(body).model_dump(exclude_unset=True) == body
    openai_chat.ChatCompletion.model_validate(body)
    assert body["usage"]["total_tokens"] == input_tokens + output_tokens


@given(st.text(), st.lists(st.integers(0, 60)), reasons)
def test_however_the_text_is_split_the_deltas_add_up_to_the_completion(
    text: str, cuts: list[int], reason: FinishReason
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    split = [TextDelta(text[a:b]) for a, b in itertools.pairwise(edges)]
    frames, _ = run([*split, Finish(reason)])
    (choice,) = completion([*split, Finish(reason)])["choices"]
    assert content(frames) == choice["message"]["content"] == text
    assert choice["finish_reason"] == chunks(frames)[-1]["choices"][0]["finish_reason"] == reason


def test_a_later_usage_replaces_an_earlier_one() -> None:
    body = completion([Usage(7, 0, 1), TextDelta("a"), STOP, Usage(7, 0, 9)])
    assert body["usage"]["completion_tokens"] == 9


def test_a_streamed_answer_keeps_no_body() -> None:
    _, ending = run([TextDelta("a"), STOP])
    assert (ending.status, ending.body, ending.finish_reason, ending.error_code) == (
        200,
        b"",
        "stop",
        "",
    )


def test_a_cancelled_stream_ends_without_a_finish_reason() -> None:
    fold = assembler(include_usage=True)
    fold.feed(TextDelta("a"))
    ending = fold.cancel()
    assert (list(ending.frames), ending.finish_reason, ending.error_code) == ([DONE], "", "")
    assert ending.status == 503  # Of another sending of the same request, which may try again.
    assert orjson.loads(ending.body)["error"]["code"] == "cancelled"


@pytest.mark.parametrize(
    ("error", "status", "type_", "param", "code"),
    [
        (
            ContextLengthExceeded(10, 20),
            400,
            "invalid_request_error",
            "messages",
            "context_length_exceeded",
        ),
        (GenerationFailed("boom"), 500, "server_error", None, "model_error"),
        (DocumentLost(), 503, "server_error", None, "worker_unavailable"),
        (QueueTimeout(), 504, "server_error", None, "queue_timeout"),
        (ZeroDivisionError("secret"), 500, "server_error", None, None),
    ],
)
def test_a_failure_is_a_status_and_an_event_with_the_same_envelope(
    error: Exception, status: int, type_: str, param: str | None, code: str | None
) -> None:
    ending = assembler().fail(error)
    assert ending == failure(error) == kind_of(CHAT).failure(error)
    event, done = ending.frames
    assert (event, done) == (b"data: " + ending.body + b"\n\n", DONE)
    envelope = orjson.loads(ending.body)
    assert envelope.keys() == {"error"}
    told = envelope["error"]
    assert (ending.status, told["type"], told["param"], told["code"]) == (
        status,
        type_,
        param,
        code,
    )
    assert told["message"]
    assert "secret" not in told["message"]
    assert ending.error_code == (code or type_)
    assert ending.finish_reason == ""
    assert (ending.retry_after_s is not None) == (status in (503, 504))


def test_embeddings_of_a_model_that_cannot_be_shortened_have_its_own_dimensions_only() -> None:
    vector = EmbeddingDelta(array("f", [0.6, 0.8]).tobytes())
    EmbeddingAssembler(EmbeddingAssembly("m", dimensions=2, may_shorten=False)).feed(vector)
    for wanted in (1, 3):
        assembler = EmbeddingAssembler(EmbeddingAssembly("m", dimensions=wanted, may_shorten=False))
        with pytest.raises(InvalidRequest, match="the model has 2") as caught:
            assembler.feed(vector)
        assert caught.value.param == "dimensions"


SAID: list[Delta] = [
    ReasoningDelta("Hm"),
    TextDelta("half "),
    TextDelta("an"),
    ToolCallDelta(0, "", "call_1", "f"),
    ToolCallDelta(0, '{"x":'),
    ToolCallDelta(0, "1}"),
]
PROSE: list[Delta] = [TextDelta("half "), TextDelta("an"), TextDelta("a", 1), Finish("length", 1)]
_HEAD = ("id-1", 1_700_000_000, "demo", True)


@pytest.mark.parametrize(
    ("kind", "assembly", "deltas", "pieces_sent"),
    [
        (CHAT, ChatAssembly(*_HEAD), SAID, 5),
        (CHAT, ChatAssembly(*_HEAD, is_legacy=True), SAID, 5),
        (CHAT, ChatAssembly(*_HEAD, include_usage=True, choices=2), PROSE, 3),
        (COMPLETION, CompletionAssembly(*_HEAD, echoes=["So: ", "So: "]), PROSE, 3),
        (OLLAMA, OllamaAssembly("demo", "chat", stream=True, started_at=0), SAID, 3),
    ],
)
def test_a_stream_is_ended_by_what_was_sent_as_by_its_own_worker(
    kind: str, assembly: Assembly, deltas: list[Delta], pieces_sent: int
) -> None:
    worker, other = (kind_of(kind).assembler(assembly) for _ in range(2))
    frames = [frame for delta in deltas for frame in worker.feed(delta)]
    other.recover(Sent(frames, len(frames)))
    assert other.pieces == pieces_sent
    ended = [fold.fail(GenerationFailed("boom")) for fold in (worker, other)]
    assert _without_ids(ended[0].body) == _without_ids(ended[1].body)
    assert not ended[1].is_early


def _without_ids(body: bytes) -> bytes:
    """Leave out what is made up for calls of the form that has no ids."""
    return body.replace(b'"call_1"', b'""').replace(b'"call"', b'""')


def test_calls_are_repeated_beside_the_message_where_a_site_says_so() -> None:
    deltas: list[Delta] = [ToolCallDelta(0, "{}", "call_1", "f"), Finish("tool_calls")]
    for repeats in (False, True):
        assembler = ChatAssembler(ChatAssembly("chatcmpl-1", 0, "m", repeats_calls=repeats))
        for delta in deltas:
            assembler.feed(delta)
        [choice] = orjson.loads(assembler.complete().body)["choices"]
        assert choice.get("tool_calls") == (choice["message"]["tool_calls"] if repeats else None)


def test_a_chat_that_searches_is_judged_before_its_first_and_after_its_last_turn() -> None:
    judge = {"type": "moderation", "shown_model": "judge", "input": "asked", "blocks": ["output"]}
    assembly = ChatAssembly("chatcmpl-1", 1_700_000_000, "demo", stream=True)
    fold = chat_assembler(replace(assembly, site_tools=[{"type": "web_search"}, judge]))
    request = GenerationRequest("demo", (Message("user", "asked"),))
    result = {"flagged": False, "categories": {}, "category_scores": {}}
    passed = ToolResult("", {"result": {**result, "category_applied_input_types": {}}})

    def called() -> list[tuple[int, int, str]]:
        return [(call.number, call.tool, call.arguments) for call in fold.calls()]

    assert called() == [(1_000_000, 1, '{"text":"asked"}')]
    assert fold.add_result(passed) == ()
    assert fold.next_request(request) == request
    search = ToolCallDelta(0, '{"query":"x"}', "call_1", "web_search")
    assert [fold.feed(delta) for delta in (TextDelta("Now. "), search, Finish("tool_calls"))] == [
        (),
        (),
        (),
    ]
    assert called() == [(0, 0, '{"query":"x"}')]
    found = ToolResult("found", sources=[Source("https://a.example/", "A")])
    assert fold.add_result(found) == ()
    following = fold.next_request(request)
    assert following is not None
    assert [message.role for message in following.messages] == ["user", "assistant", "tool"]
    assert [fold.feed(delta) for delta in (TextDelta("So [1]."), STOP)] == [(), ()]
    assert called() == [(1_000_001, 1, '{"text":"Now. So [1]."}')]
    frames = fold.add_result(passed)
    assert [b"Now. " in frame for frame in frames[:3]] == [False, True, False]
    assert b"annotations" in frames[3]
    assert fold.next_request(request) is None
    assert called() == []
    ending = fold.complete()
    assert [b"moderation_results" in frame for frame in ending.frames] == [True, False]
    assert ending.finish_reason == "stop"


def test_a_text_that_the_client_has_begun_is_of_the_first_turn_alone() -> None:
    turns = Turns(most_calls=2)
    request = GenerationRequest("demo", (Message("user", "?"),), response_prefix="The ")
    for _ in range(2):
        turns.take(TextDelta("answer"))
        turns.begin_call(0, "look", "call_1", "look")
        turns.take(Finish("tool_calls"))
        turns.add_result(ToolResult("seen"))
        following = turns.next_request(request)
        assert following is not None
        assert following.response_prefix == ""
        said = [message.text for message in following.messages if message.role == "assistant"]
    assert said == ["The answer", "answer"]
