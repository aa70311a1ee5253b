"""Which turns a conversation loses when it is too long."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_site.core.domain.deltas import Finish, Usage
from inference_site.core.domain.errors import (
    AnswerTooLong,
    ContextLengthExceeded,
    InvalidRequest,
)
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    GenerationRequest,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
)
from tests.sinks import RecordingSink
from worker.engines.base import Engine, Sink
from worker.engines.scripted import ScriptedEngine
from worker.runtime.compaction import start_truncating


class CountingEngine(ScriptedEngine):
    """Refuses what has too many characters, each of them a token; remembers what it took."""

    def __init__(self, context_length: int) -> None:
        super().__init__(ModelSpec("m", "scripted", context_length=context_length))
        self.asked: list[tuple[Message, ...]] = []

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        self.asked.append(request.messages)
        tokens = sum(map(length, request.messages))
        if tokens >= self._context_length:
            raise ContextLengthExceeded(self._context_length, tokens)
        sink.feed(Finish("stop"))
        sink.feed(Usage(tokens))

    @property
    def taken(self) -> tuple[Message, ...]:
        return self.asked[-1]


def length(message: Message) -> int:
    return 5 + len(message.text or "") + sum(len(call.arguments) for call in message.tool_calls)


def run(messages: list[Message], context_length: int, *, truncate: bool = True) -> CountingEngine:
    engine = CountingEngine(context_length)
    request = GenerationRequest("m", tuple(messages), truncate=truncate)
    assert not start_truncating(engine, request, RecordingSink(), lambda _: None)
    return engine


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def exchange(n: int, size: int = 50) -> list[Message]:
    return [user(f"{n}?".ljust(size, ".")), assistant(f"{n}!".ljust(size, "."))]


texts = st.text("ab ", max_size=200)
calls = st.integers(1, 3).flatmap(
    lambda count: texts.map(
        lambda text: [
            Message("assistant", None, tool_calls=(ToolCall("c", "f", text),) * count),
            *[Message("tool", text, tool_call_id="c")] * count,
        ]
    )
)
turns = st.one_of(
    texts.map(lambda text: [user(text)]),
    texts.map(lambda text: [assistant(text)]),
    texts.map(lambda text: [Message("system", text)]),
    calls,
)
conversations = st.lists(turns, max_size=12).map(lambda parts: [m for part in parts for m in part])


@given(conversations, st.integers(20, 2000))
def test_what_is_left_is_a_conversation_with_its_instructions_and_its_last_turn(
    before: list[Message], context_length: int
) -> None:
    messages = [*before, user("last?"), assistant("prefix")]
    least = [*(m for m in before if m.role == "system"), *messages[-2:]]
    if sum(map(length, least)) >= context_length:
        with pytest.raises(ContextLengthExceeded):
            run(messages, context_length)
        return
    engine = run(messages, context_length)
    taken = engine.taken
    assert taken[-2:] == tuple(messages[-2:])
    assert [m for m in taken if m.role == "system"] == [m for m in messages if m.role == "system"]
    is_kept = [any(message is one for one in taken) for message in messages]
    rest = [kept for kept, m in zip(is_kept, messages, strict=True) if m.role != "system"]
    assert [kept for kept, _ in groupby(rest)] in ([True], [False, True])  # The oldest are gone.
    if len(taken) < len(messages):
        assert next(m for m in taken if m.role != "system").role == "user"
    assert len(engine.asked) <= len(messages)


def test_as_few_turns_as_possible_are_dropped_but_room_for_an_answer_is_made() -> None:
    messages = [*exchange(1), *exchange(2), *exchange(3), user("last?")]
    assert run(messages, 320).taken == tuple(messages[2:])
    assert run(messages, 300).taken == tuple(messages[4:])  # A quarter is for the answer.


def test_results_of_a_call_go_with_it() -> None:
    call = Message("assistant", None, tool_calls=(ToolCall("c", "f", "x" * 50),))
    result = Message("tool", "y" * 10, tool_call_id="c")
    messages = [user("1?"), call, result, assistant("1!"), *exchange(2), user("last?")]
    assert run(messages, 160).taken == tuple(messages[4:])


def test_conversation_that_fits_is_asked_once_and_as_it_is() -> None:
    messages = [*exchange(1), user("last?")]
    assert run(messages, 1000).asked == [tuple(messages)]


def test_what_does_not_allow_it_is_refused_at_once() -> None:
    with pytest.raises(ContextLengthExceeded):
        run([*exchange(1), user("last?")], 50, truncate=False)


def test_conversation_without_a_user_loses_nothing() -> None:
    with pytest.raises(ContextLengthExceeded):
        run([Message("system", "x" * 100), assistant("y" * 100)], 50)


def test_a_text_around_a_gap_is_shortened_until_no_shorter_one_helps() -> None:
    """A server that counts the answer too refused the same request without end."""
    asked: list[int] = []

    class Refusing(CountingEngine):
        def complete(self, request: GenerationRequest, sink: Sink) -> None:
            assert len(asked) < 9
            asked.append(len(request.prompts[0]))
            raise ContextLengthExceeded(100, asked[-1])

    request = GenerationRequest(
        "m", operation="complete", prompts=("x" * 200,), suffix="", truncate=True
    )
    for files in ((), (("name" * 50, ""),)):
        with pytest.raises(ContextLengthExceeded):
            start_truncating(
                Refusing(100), replace(request, other_files=files), RecordingSink(), lambda _: None
            )
    assert asked == [200, 67, 200, 135, 67]


def test_images_count_for_more_than_their_text() -> None:
    image = ImagePart("data:,", "p")
    seen = Message("user", None, parts=(TextPart("1?"), image))
    messages = [seen, assistant("1!"), *exchange(2), *exchange(3), user("last?")]

    class Blind(CountingEngine):
        def chat(self, request: GenerationRequest, sink: Sink) -> None:
            self.asked.append(request.messages)
            if len(self.asked) == 1:
                raise ContextLengthExceeded(1000, 2000)

    engine = Blind(1000)
    request = GenerationRequest("m", tuple(messages), truncate=True)
    assert not start_truncating(engine, request, RecordingSink(), lambda _: None)
    assert engine.taken == tuple(messages[2:])


def test_other_refusals_pass_through() -> None:
    class Refusing(CountingEngine):
        def chat(self, request: GenerationRequest, sink: Sink) -> None:
            raise InvalidRequest("no")

    engine: Engine = Refusing(10)
    request = GenerationRequest("m", (user("x"),), truncate=True)
    with pytest.raises(InvalidRequest, match="no"):
        start_truncating(engine, request, RecordingSink(), lambda _: None)


@pytest.mark.parametrize("left", [7, None])
def test_limit_of_an_answer_is_lowered_once_where_it_may_be(left: int | None) -> None:
    limits: list[int | None] = []

    class Refusing(CountingEngine):
        def chat(self, request: GenerationRequest, sink: Sink) -> None:
            limits.append(request.max_output_tokens)
            raise AnswerTooLong("too long", left)

    request = GenerationRequest("m", (user("x"),), max_output_tokens=99)
    for asked in (request, replace(request, lowers_max_output=True)):
        with pytest.raises(AnswerTooLong):
            start_truncating(Refusing(10), asked, RecordingSink(), lambda _: None)
    assert limits == [99, 99, left]
