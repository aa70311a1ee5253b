"""What is read out of the streams of servers, good ones and odd ones."""

from __future__ import annotations

import json
import logging
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_site.core.domain.deltas import (
    Finish,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    Usage,
)
from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.domain.request import GenerationRequest, Message
from tests.sinks import RecordingSink
from tests.upstream_server import UpstreamServer, chunks, delta, finish, text, usage
from tests.worker.engines.openai_upstream.conftest import Load
from worker.engines.base import Engine
from worker.engines.openai_upstream import chunks as stream_of_chunks
from worker.engines.openai_upstream.chunks import EventLines, NoEventStream

pytestmark = pytest.mark.slow  # A server of its own answers each.

HELLO = GenerationRequest("m", (Message("user", "Hello"),))


def chat(engine: Engine, **fields: Any) -> RecordingSink:
    """Ask it, to the end."""
    sink = RecordingSink()
    engine.run(GenerationRequest("m", (Message("user", "Hello"),), **fields), sink)
    return sink


def test_a_good_stream_is_read_as_it_is(server: UpstreamServer, engine: Engine) -> None:
    sink = chat(engine)
    assert sink.deltas[:3] == [TextDelta("Hello"), TextDelta(" there"), Finish("stop")]
    assert (sink.usage.input_tokens, sink.usage.output_tokens) == (7, 2)


RECORDED_END = (
    b'data: {"id":"18bdba0e-9551-4889-8538-a1bd3d859b76","choices":[{"delta":{},"index":0,'
    b'"finish_reason":"stop"}],"created":1795583056,"model":"/data/weights@main",'
    b'"object":"chat.completion.chunk","system_fingerprint":"","usage":{"completion_tokens":16,'
    b'"prompt_tokens":39,"total_tokens":55}}\n\n'
)
"""The last event of ``transformers serve`` 5.19, whose answers end after the stop text."""


@pytest.mark.parametrize("stop", ["4", "\n4", " 3\n4", "2. 2\n3. 3\n4"])
def test_stop_text_that_a_server_sends_is_cut(
    server: UpstreamServer, engine: Engine, stop: str
) -> None:
    whole = "1. 1\n2. 2\n3. 3\n4"
    server.answers = [chunks(*map(text, whole), RECORDED_END)]
    sink = chat(engine, stop=(stop, "nowhere"))
    assert sink.text == whole.removesuffix(stop)
    [end] = [delta for delta in sink.deltas if isinstance(delta, Finish)]
    assert end == Finish("stop", 0, stop)
    assert (sink.usage.input_tokens, sink.usage.output_tokens) == (39, 16)


def test_beginning_of_a_stop_text_is_sent_at_the_end(
    server: UpstreamServer, engine: Engine
) -> None:
    server.answers = [chunks(text("One "), text("tw"), finish("length"), usage())]
    sink = chat(engine, stop=("two",))
    assert (sink.text, sink.finishes) == ("One tw", ["length"])


DETAILS = {
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 1},
}


@pytest.mark.parametrize(
    "sent",
    [
        [text("a"), text("b"), finish(), usage(7, 2, **DETAILS)],
        [text("a"), text("b"), {**finish(), "usage": usage(7, 2, **DETAILS)["usage"]}],
        [
            {**text("a"), "usage": usage(7, 1)["usage"]},
            {**text("b"), "usage": usage(7, 2, **DETAILS)["usage"]},
            finish(),
        ],
        [usage(7, 2, **DETAILS), text("a"), text("b"), finish()],
        [text("a"), text("b"), finish(usage=usage(7, 2, **DETAILS)["usage"])],
    ],
    ids=[
        "after the choices",
        "with the last chunk",
        "with every chunk",
        "before everything",
        "in the choice",
    ],
)
def test_usage_is_taken_from_any_chunk(
    server: UpstreamServer, engine: Engine, sent: list[Any]
) -> None:
    server.answers = [chunks(*sent)]
    told = chat(engine).usage
    assert (told.input_tokens, told.cached_tokens) == (7, 3)
    assert (told.output_tokens, told.reasoning_tokens) == (2, 1)
    assert told.prefill_ms > 0


@pytest.mark.parametrize("name", ["prompt_cache_hit_tokens", "cached_tokens"])
def test_cached_tokens_have_older_names(server: UpstreamServer, engine: Engine, name: str) -> None:
    """Those of DeepSeek's and of Moonshot's API."""
    server.answers = [chunks(text("a"), finish(), usage(7, 2, **{name: 3}))]
    assert chat(engine).usage.cached_tokens == 3


def test_usage_of_several_choices_counts_the_prompt_once(
    server: UpstreamServer, engine: Engine
) -> None:
    sent = [
        {**finish(index=index), "usage": usage(7, tokens)["usage"]}
        for index, tokens in ((0, 2), (1, 3))
    ]
    server.answers = [chunks(text("a"), text("b", 1), *sent)]
    told = chat(engine, choices=2).usage
    assert (told.input_tokens, told.output_tokens) == (7, 5)


def test_usage_that_follows_the_end_of_each_choice_is_added_up(
    server: UpstreamServer, engine: Engine
) -> None:
    ends = [(finish(index=index), usage(7, tokens)) for index, tokens in ((1, 2), (0, 3), (2, 5))]
    server.answers = [chunks(*(text("a", i) for i in range(3)), *(c for end in ends for c in end))]
    told = chat(engine, choices=3).usage
    assert (told.input_tokens, told.output_tokens) == (7, 10)


def test_usage_of_the_whole_run_counts_once_after_reports_of_its_choices(
    server: UpstreamServer, engine: Engine
) -> None:
    sent = [
        {**finish(index=i), "usage": usage(7, tokens)["usage"]} for i, tokens in ((0, 2), (1, 3))
    ]
    server.answers = [chunks(text("a"), text("b", 1), *sent, usage(7, 5))]
    told = chat(engine, choices=2).usage
    assert (told.input_tokens, told.output_tokens) == (7, 5)


def test_without_usage_each_piece_counts_as_a_token_and_the_log_says_so_once(
    server: UpstreamServer, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers = [chunks(delta({"reasoning": "Hm"}), text("a"), text("b"), finish())]
    with caplog.at_level(logging.WARNING):
        told = [chat(engine).usage for _ in range(2)][1]
    assert (told.output_tokens, told.reasoning_tokens) == (3, 1)
    assert told.input_tokens == 2  # Five characters, four to a token.
    assert [r.getMessage() for r in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "reports no usage" in caplog.text


@pytest.mark.parametrize(
    "reported",
    [
        {"prompt_tokens": 7, "completion_tokens": None},
        {"total_tokens": 9},
        {"completion_tokens": 2},
    ],
)
def test_counts_that_are_not_reported_are_estimates(
    server: UpstreamServer, engine: Engine, reported: dict[str, Any]
) -> None:
    report = {"choices": [], "usage": reported}
    server.answers = [chunks(text("a"), text("b"), finish(), report)]
    told = chat(engine).usage
    assert (told.input_tokens, told.output_tokens) == (2, 2)


def test_estimate_counts_what_is_beside_a_prompt_that_is_filled_in(
    server: UpstreamServer, engine: Engine
) -> None:
    server.answers = [chunks({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})]
    beside: dict[str, Any] = {"suffix": "four", "other_files": (("a.py", "four"),)}
    sink = RecordingSink()
    engine.run(GenerationRequest("m", operation="complete", prompts=("four",), **beside), sink)
    assert sink.usage.input_tokens == 3


def test_answer_with_text_is_not_free(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [chunks(text("a"), text("b"), finish(), usage(0, 0))]
    told = chat(engine).usage
    assert (told.input_tokens, told.output_tokens) == (2, 2)


def test_answer_without_text_has_no_tokens(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [chunks(finish(), usage(7, 0))]
    assert chat(engine).usage.output_tokens == 0


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_has_two_spellings(server: UpstreamServer, engine: Engine, name: str) -> None:
    server.answers = [chunks(delta({name: "Hm"}), text("Yes"), finish(), usage())]
    sink = chat(engine)
    assert sink.deltas[:2] == [ReasoningDelta("Hm"), TextDelta("Yes")]


def test_reasoning_under_both_spellings_is_read_once(
    server: UpstreamServer, engine: Engine
) -> None:
    server.answers = [chunks(delta({"reasoning_content": "Hm", "reasoning": "Hm"}), finish())]
    assert chat(engine).pieces == ["Hm"]


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}], "closed": True}
REFERENCE = {"type": "reference", "reference_ids": [1]}


@pytest.mark.parametrize(
    "sent",
    [
        [delta({"content": [THOUGHT]}), delta({"content": [{"type": "text", "text": "Yes"}]})],
        [delta({"content": [THOUGHT, {"type": "text", "text": "Ye"}, REFERENCE]}), text("s")],
        [delta({"content": [{"type": "thinking", "thinking": "Hm"}]}), text("Yes")],
    ],
    ids=["one by one", "together", "thinking as a text"],
)
def test_content_in_parts_is_reasoning_and_text(
    server: UpstreamServer, engine: Engine, sent: list[Any]
) -> None:
    """Mistral's API sends it so for models that reason or cite."""
    server.answers = [chunks(*sent, finish(), usage())]
    sink = chat(engine)
    assert sink.deltas[0] == ReasoningDelta("Hm")
    assert (sink.text, sink.finishes) == ("Yes", ["stop"])


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("eos_token", "stop"),
        ("content_filter", "content_filter"),
        ("sensitive", "content_filter"),
        ("content_filter: SAFETY", "content_filter"),
        ("model_context_window_exceeded", "length"),
        ("MAX_TOKENS", "length"),
        ("FinishReason.MAX_TOKENS", "length"),
        ("STOP", "stop"),
        ("tool_calls", "stop"),  # It made none.
    ],
)
def test_finish_reasons_are_mapped(
    server: UpstreamServer, engine: Engine, told: str, reason: str
) -> None:
    server.answers = [chunks(text("a"), finish(told), usage())]
    assert chat(engine).finishes == [reason]


@pytest.mark.parametrize("told", ["abort", "insufficient_system_resource", "network_error"])
def test_a_server_that_gives_up_has_failed(
    server: UpstreamServer, engine: Engine, told: str
) -> None:
    server.answers = [chunks(text("a"), finish(told), usage())]
    with pytest.raises(GenerationFailed, match=told):
        chat(engine)


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ({"stop_reason": "END"}, {"stop": ("END",)}),
        ({"matched_stop": 42}, {"stop_token_ids": (42,)}),
    ],
)
def test_what_stopped_it_is_told(
    server: UpstreamServer, load: Load, sent: dict[str, Any], asked: dict[str, Any]
) -> None:
    server.answers = [chunks(text("a"), finish(**sent), usage())]
    [end] = [d for d in chat(load(flavor="vllm"), **asked).deltas if isinstance(d, Finish)]
    assert end.stop == next(iter(sent.values()))


def test_an_end_of_sequence_token_is_no_stop_of_ours(server: UpstreamServer, load: Load) -> None:
    server.answers = [chunks(text("a"), finish(matched_stop=2), usage())]
    assert Finish("stop") in chat(load(flavor="sglang"), stop=("END",)).deltas


def test_an_end_without_done_is_an_end(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [chunks(text("a"), finish(), done=False)]
    assert chat(engine).finishes == ["stop"]


def test_a_last_line_without_its_end_is_read(server: UpstreamServer, engine: Engine) -> None:
    last = b"data: " + json.dumps(finish()).encode()
    server.answers = [chunks(text("a"), last, done=False)]
    assert chat(engine).finishes == ["stop"]


@pytest.mark.parametrize("after", [b"<html>Bad gateway</html>\n", b"data: {not json}\n\n"])
def test_what_comes_after_done_is_ignored(
    server: UpstreamServer, engine: Engine, after: bytes
) -> None:
    server.answers = [chunks(text("a"), finish(), usage(), b"data: [DONE]\n\n" + after, done=False)]
    sink = chat(engine)
    assert (sink.text, sink.finishes, sink.usage.output_tokens) == ("a", ["stop"], 2)


def test_done_without_a_finish_reason_is_an_end(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [chunks(text("a"), usage())]
    assert chat(engine).finishes == ["stop"]


@pytest.mark.parametrize("sent", [[text("a")], []])
def test_an_end_without_done_or_a_finish_reason_is_a_failure(
    server: UpstreamServer, engine: Engine, sent: list[Any]
) -> None:
    server.answers = [chunks(*sent, done=False)]
    sink = RecordingSink()
    with pytest.raises(GenerationFailed, match="ended the stream"):
        engine.run(HELLO, sink)
    assert sink.finishes == []


def test_nothing_but_done_is_a_failure(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [chunks()]
    with pytest.raises(GenerationFailed, match="without an answer"):
        chat(engine)


def test_what_a_cut_stream_used_is_accounted(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [chunks(text("a"), text("b"), done=False)]
    sink = RecordingSink()
    with pytest.raises(GenerationFailed):
        engine.run(HELLO, sink)
    assert sink.usage.output_tokens == 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"<html>Bad gateway</html>\n",
        b"data: {not json}\n\n",
        b"data: [1, 2]\n\n",
        b'data: "text"\n\n',
        b'data: {"choices": [{"index": 9, "delta": {"content": "x"}}]}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"content": {"a": 1}}}]}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"content": ["x"]}}]}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"tool_calls": "x"}}]}\n\n',
        b'data: {"choices": 5}\n\n',
        b'data: {"choices": [], "usage": {"completion_tokens": "many"}}\n\n',
        b"\xff\xfe\x00\n",
        b'data: {"choices": [], "a": NaN, "b": 1%s}\n\n' % (b"0" * 30),
        pytest.param(b'data: {"NaN": ' + b"[" * 100_000 + b"\n\n", id="nested"),
    ],
)
@pytest.mark.parametrize("before", [[], [text("a")]], ids=["at once", "later"])
def test_garbage_is_a_failure(
    server: UpstreamServer, engine: Engine, garbage: bytes, before: list[Any]
) -> None:
    server.answers = [chunks(*before, garbage, finish())]
    with pytest.raises(GenerationFailed, match="cannot be read"):
        chat(engine)


def test_a_line_without_an_end_is_garbage() -> None:
    reader, piece = EventLines(), b"data: " + b"x" * 2**20
    for _ in range(15):
        assert list(reader.feed(piece)) == []
    with pytest.raises(NoEventStream, match="a line of more than"):
        list(reader.feed(piece * 2))


def test_the_time_for_a_long_line_does_not_grow_with_the_square_of_its_length() -> None:
    reader, line = EventLines(), b"data: " + b"x" * 15 * 2**20 + b"\n"
    began, read = time.perf_counter(), list[bytes]()
    for at in range(0, len(line), 4096):
        read += reader.feed(line[at : at + 4096])
    assert read == [b"x" * 15 * 2**20]
    assert time.perf_counter() - began < 10  # A hundredth of it, and ten times it before.


@pytest.mark.parametrize("kind", ["content", "reasoning", "tool_calls"])
def test_an_answer_that_does_not_end_is_a_failure(
    server: UpstreamServer, engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(stream_of_chunks, "_MAX_CHARACTERS", 100)
    call = [{"index": 0, "function": {"name": "f", "arguments": "x" * 10}}]
    piece = delta({kind: call if kind == "tool_calls" else "x" * 10})
    server.answers = [chunks(*[piece] * 10, finish()), chunks(*[piece] * 11, finish())]
    assert chat(engine).finishes
    with pytest.raises(GenerationFailed, match="an answer of more than"):
        chat(engine)


def test_comments_and_other_fields_are_skipped(server: UpstreamServer, engine: Engine) -> None:
    noise = b": keep-alive\n\nevent: message\nid: 5\nretry: 10\n\ndata: null\n\ndata:\n\n"
    server.answers = [chunks(noise, text("a"), b": ping\r\n\r\n", finish(), usage())]
    assert chat(engine).text == "a"


def test_byte_order_mark_and_floats_are_read(server: UpstreamServer, engine: Engine) -> None:
    details = {"completion_tokens_details": {"reasoning_tokens": 1.0}}
    first = b"\xef\xbb\xbfdata: " + json.dumps(text("a", 0.0)).encode() + b"\n\n"  # type: ignore[arg-type]  # As some gateways write it.
    server.answers = [chunks(first, finish(), usage(7.0, 2.0, **details))]  # type: ignore[arg-type]  # As above.
    sink = chat(engine)
    assert (sink.text, sink.finishes) == ("a", ["stop"])
    told = sink.usage
    assert str((told.input_tokens, told.output_tokens, told.reasoning_tokens)) == "(7, 2, 1)"


def test_timings_of_older_builds_of_llama_cpp_are_read(
    server: UpstreamServer, engine: Engine
) -> None:
    """They lack ``cache_n``; so do those of llamafile."""
    timings = {"prompt_n": 7, "prompt_ms": 3.0, "predicted_n": 1, "predicted_ms": 4.0}
    server.answers = [chunks({**text("a"), "timings": timings}, finish(), usage(9, 2))]
    sink = chat(engine)
    assert (sink.text, sink.usage.input_tokens, sink.usage.prefill_ms) == ("a", 9, 3.0)


@pytest.mark.parametrize(
    "message",
    [
        {"content": "Hello", "reasoning_content": "Hm"},
        {"content": [THOUGHT, {"type": "text", "text": "Hello"}]},
    ],
)
def test_a_server_that_does_not_stream_is_read_too(
    server: UpstreamServer, engine: Engine, message: dict[str, Any]
) -> None:
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "length"}]}
    server.answers = [lambda talk: talk.say(200, {**whole, **usage(5, 3), **whole})]
    sink = chat(engine)
    assert (sink.pieces, sink.finishes) == (["Hm", "Hello"], ["length"])
    assert sink.usage.output_tokens == 3


def test_the_content_type_of_json_is_read_in_any_case(
    server: UpstreamServer, engine: Engine
) -> None:
    whole = {"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}
    kind = "Application/JSON; Charset=UTF-8"
    server.answers = [lambda talk: talk.say(200, whole, Content_Type=kind)]
    assert chat(engine).text == "Hello"


@pytest.mark.parametrize("kind", ["text/html", "application/json"])
@pytest.mark.parametrize("before", [b"", b": ping\n\n", b"event: completion\n", b"id: 1\n"])
def test_a_stream_may_have_another_content_type(
    server: UpstreamServer, engine: Engine, kind: str, before: bytes
) -> None:
    """They are defaults of frameworks; the official clients do not look at it."""
    chunk = json.dumps(text("<p>")).encode()
    body = before + b"data: " + chunk + b"\n\ndata: [DONE]\n\n"
    server.answers = [lambda talk: talk.say(200, body, Content_Type=kind)]
    assert chat(engine).text == "<p>"


@given(st.text(max_size=60).map(str.strip), st.lists(st.integers(1, 9), min_size=1))
def test_cuts_anywhere_leave_the_events_whole(content: str, sizes: list[int]) -> None:
    lines = json.dumps({"text": content}, ensure_ascii=False)
    whole = f"data: {lines}\r\n\r\n: ping\n\ndata:{lines}\n\ndata: [DONE]\n\n".encode()
    reader, read, at = EventLines(), list[bytes](), 0
    while at < len(whole):
        size = sizes[len(read) % len(sizes)]
        read += reader.feed(whole[at : at + size])
        at += size
    assert [*read] == [lines.encode(), lines.encode(), b"[DONE]"]


def test_characters_cut_by_the_network_come_whole(server: UpstreamServer, engine: Engine) -> None:
    whole = b"data: " + json.dumps(text("naïve 🦊 Łódź"), ensure_ascii=False).encode() + b"\n\n"
    server.answers = [chunks(*(whole[i : i + 1] for i in range(len(whole))), finish(), usage())]
    assert chat(engine).pieces == ["naïve 🦊 Łódź"]


ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
    {"token": "a", "logprob": -0.5, "bytes": None}, {"token": "b", "logprob": -1.5}]}  # fmt: skip


def test_log_probabilities_are_read(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [chunks(text("a", logprobs={"content": [ENTRY]}), finish(), usage())]
    [piece] = [d for d in chat(engine, top_logprobs=1).deltas if isinstance(d, TextDelta)]
    [entry] = piece.logprobs
    assert (entry.token, entry.logprob, entry.text_bytes) == ("a", -0.5, b"a")
    assert [(other.token, other.text_bytes) for other in entry.top] == [("a", b"a")]


def test_the_likeliest_come_first_also_of_vllm_that_begins_with_what_was_drawn(
    server: UpstreamServer, engine: Engine
) -> None:
    others = [{"token": t, "logprob": p} for t, p in (("a", -2.5), ("b", -0.5), ("c", -1.5))]
    entry = {**ENTRY, "top_logprobs": others}
    server.answers = [chunks(text("a", logprobs={"content": [entry]}), finish(), usage())]
    [piece] = [d for d in chat(engine, top_logprobs=3).deltas if isinstance(d, TextDelta)]
    assert [other.token for other in piece.logprobs[0].top] == ["b", "c", "a"]


@pytest.mark.parametrize("impossible", [None, -math.inf, math.nan])
def test_impossible_token_is_not_a_certain_one(
    server: UpstreamServer, engine: Engine, impossible: float | None
) -> None:
    """Minus infinity is null in the JSON of pydantic (SGLang), and ``-Infinity`` in Python's."""
    others = [{"token": "b", "logprob": impossible}, {"token": "a", "logprob": -0.5}]
    entry = {**ENTRY, "top_logprobs": others}
    server.answers = [chunks(text("a", logprobs={"content": [entry]}), finish(), usage())]
    [piece] = [d for d in chat(engine, top_logprobs=2).deltas if isinstance(d, TextDelta)]
    top = [(other.token, other.logprob) for other in piece.logprobs[0].top]
    assert top == [("a", -0.5), ("b", -9999.0)]


def test_log_probabilities_of_half_a_character_come_with_the_whole(
    server: UpstreamServer, engine: Engine
) -> None:
    server.answers = [
        chunks(
            text("", logprobs={"content": [ENTRY]}),
            text("é", logprobs={"content": [ENTRY]}),
            finish(),
        )
    ]
    [piece] = [d for d in chat(engine, top_logprobs=0).deltas if isinstance(d, TextDelta)]
    assert len(piece.logprobs) == 2


@pytest.mark.parametrize(
    ("half", "read"),
    [("a\ud83d b", "a? b"), ("\ude00", "?"), ("\\ud83d \ud83d\ude00", "\\ud83d 😀")],
)
def test_half_a_surrogate_pair_is_a_question_mark(
    server: UpstreamServer, engine: Engine, half: str, read: str
) -> None:
    chunk = f"data: {json.dumps(text(half))}\n\n".encode()
    server.answers = [chunks(chunk, finish(), usage())]
    assert chat(engine).text == read


def entries(*tokens: str) -> dict[str, Any]:
    """The log probabilities of these tokens."""
    return {"content": [{**ENTRY, "token": token, "bytes": [*token.encode()]} for token in tokens]}


@pytest.mark.parametrize(
    ("stop", "shown", "tokens"),
    [
        ("STOP", "Hé you ", ["H", "é", " you", " S"]),
        (" STOP", "Hé you", ["H", "é", " you"]),
        ("you STOP", "Hé ", ["H", "é", " you"]),
        ("é", "H", ["H"]),
        ("OPEN", "Hé you STOP", ["H", "é", " you", " S", "TOP"]),
    ],
)
def test_log_probabilities_end_with_the_text(
    server: UpstreamServer, engine: Engine, stop: str, shown: str, tokens: list[str]
) -> None:
    sent = [
        text("Hé", logprobs=entries("H", "é")),
        text(" you S", logprobs=entries(" you", " S")),
        text("TOP", logprobs=entries("TOP")),
    ]
    server.answers = [chunks(*sent, finish("length"), usage())]
    sink = chat(engine, top_logprobs=0, stop=(stop,))
    pieces = [d for d in sink.deltas if isinstance(d, TextDelta)]
    assert sink.text == shown
    assert [entry.token for piece in pieces for entry in piece.logprobs] == tokens


@pytest.mark.parametrize(
    ("stop", "thoughts", "shown", "reason"),
    [
        ("two", "one ", "", "stop"),
        (" two", "one", "", "stop"),
        ("two three", "one two", "Yes.", "length"),
        ("Yes", "one two", "", "stop"),
    ],
)
def test_a_stop_text_ends_the_reasoning_of_an_answer_with_log_probabilities(
    server: UpstreamServer,
    load: Load,
    stop: str,
    thoughts: str,
    shown: str,
    reason: FinishReason,
) -> None:
    """As it does without them, where llama.cpp finds it."""
    sent = [
        delta({"reasoning_content": "one t"}, logprobs=entries("one", " t")),
        delta({"reasoning_content": "wo"}, logprobs=entries("wo")),
        text("Yes.", logprobs=entries("Yes", ".")),
    ]
    server.answers = [chunks(*sent, finish("length"), usage())]
    sink = chat(load(flavor="llama_cpp"), top_logprobs=0, stop=(stop,))
    assert "stop" not in server.body
    assert "".join(d.text for d in sink.deltas if isinstance(d, ReasoningDelta)) == thoughts
    assert sink.text == shown
    assert Finish(reason, 0, stop if reason == "stop" else None) in sink.deltas
    kinds = [type(d) for d in sink.deltas]
    assert kinds.index(Finish) == len(kinds) - 2


@pytest.mark.parametrize("first", [0, 2])
def test_what_the_server_counts_of_a_choice_after_its_stop_text_is_not_counted(
    server: UpstreamServer, load: Load, first: int
) -> None:
    def piece(shown: str, index: int, count: int) -> dict[str, Any]:
        times = {"prompt_n": 7, "prompt_ms": 1, "predicted_n": count, "predicted_ms": 1}
        return text(shown, index, logprobs=entries(shown)) | {"timings": times}

    cut, last = first, 2 - first
    begin = [*(piece("a", n, 1) for n in range(3)), piece(" END", cut, 2), piece("b", 1, 2)]
    end_of_cut = [piece("c", cut, 3), finish("length", cut), usage(7, 40)]
    end_of_1 = [finish("length", 1), usage(7, 3)]
    end = [piece("b", last, 2), finish(index=last), usage(7, 3)]
    more = piece("d", cut, 50)
    for order in (
        [*begin, *end_of_cut, *end_of_1, *end],
        [*begin, *end_of_1, *end, more],
        [*begin, *end_of_1, *end_of_cut, *end],
        [*begin, *end_of_1, more, *end, more],
    ):
        server.answers = [chunks(*order)]
        sink = chat(load(flavor="llama_cpp"), choices=3, top_logprobs=0, stop=("END",))
        assert [d.stop for d in sink.deltas if isinstance(d, Finish)] == ["END", None, None]
        assert (sink.usage.input_tokens, sink.usage.output_tokens) == (7, 2 + 3 + 3)


def test_completions_have_log_probabilities_of_their_own_form(
    server: UpstreamServer, engine: Engine
) -> None:
    told = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"c": None, "b": -1.0}],
        "text_offset": [0, 1],
    }
    choice = {"index": 0, "text": "ab", "logprobs": told, "finish_reason": "stop"}
    server.answers = [chunks({"choices": [choice]}, usage())]
    sink = RecordingSink()
    asked = GenerationRequest("m", operation="complete", prompts=("x",), top_logprobs=1)
    engine.run(asked, sink)
    [piece] = [d for d in sink.deltas if isinstance(d, TextDelta)]
    assert [(e.token, e.logprob) for e in piece.logprobs] == [("a", -9999.0), ("b", -1.0)]
    assert [other.token for other in piece.logprobs[1].top] == ["b"]
    assert sink.deltas[1:2] == [Finish("stop")]


def test_prompt_that_the_server_repeats_has_no_first_probability(
    server: UpstreamServer, engine: Engine
) -> None:
    told = {"tokens": ["a", "b"], "token_logprobs": [None, -1.0], "top_logprobs": [None, {}]}
    choice = {"index": 0, "text": "ab", "logprobs": told, "finish_reason": "length"}
    server.answers = [chunks({"choices": [choice]}, usage())]
    sink = RecordingSink()
    asked = GenerationRequest(
        "m", operation="complete", prompts=("ab",), top_logprobs=1, max_output_tokens=0, echo=True
    )
    engine.run(asked, sink)
    assert (server.body["echo"], server.body["max_tokens"]) == (True, 0)
    [piece] = [d for d in sink.deltas if isinstance(d, TextDelta)]
    assert math.isnan(piece.logprobs[0].logprob)
    assert piece.logprobs[1].logprob == -1.0


def test_choices_are_told_apart(server: UpstreamServer, engine: Engine) -> None:
    sent = [text("a", 1), text("b", 0), finish(index=0), finish("length", 1), usage()]
    server.answers = [chunks(*sent)]
    sink = chat(engine, choices=2)
    assert sink.deltas[:4] == [
        TextDelta("a", 1), TextDelta("b", 0), Finish("stop", 0), Finish("length", 1)
    ]  # fmt: skip
    assert isinstance(sink.deltas[-1], Usage)


def test_choice_that_never_came_is_no_empty_answer(server: UpstreamServer, engine: Engine) -> None:
    """Some servers ignore ``n``."""
    server.answers = [chunks(text("a"), finish(), usage())]
    with pytest.raises(GenerationFailed, match="sent 1 of 3 answers"):
        chat(engine, choices=3)


def test_choices_may_lack_their_ends_and_their_text(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [chunks(text("a"), delta({"role": "assistant", "content": ""}, 1), usage())]
    assert chat(engine, choices=2).finishes == ["stop", "stop"]


def test_what_comes_after_the_end_of_a_choice_is_ignored(
    server: UpstreamServer, engine: Engine
) -> None:
    server.answers = [chunks(text("a"), finish(), text("b"), finish(), usage())]
    sink = chat(engine)
    assert (sink.text, sink.finishes) == ("a", ["stop"])
