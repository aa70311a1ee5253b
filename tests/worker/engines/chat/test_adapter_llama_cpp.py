"""The adapter over llama.cpp's completions chats as llama.cpp itself does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import gguf
import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.engines.llama_cpp import capabilities
from inference_site.catalogue.engines.options import ChatOptions
from inference_site.core.domain.deltas import Finish, PromptDelta, Usage
from inference_site.core.domain.errors import ContextLengthExceeded
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Message, Sampling, Tool, ToolCall
from tests.sinks import RecordingSink
from tests.worker.engines.chat.answers import Answer, add_up
from worker.engines.base import Engine, load_engine
from worker.engines.chat.adapter import ChatAdapter
from worker.engines.chat.configuration import Vocabulary, configure_chat

SPEC = ModelSpec("m", "llama_cpp", DEMO_FILE, slots=2, context_length=1024)
WEATHER = Tool(
    "get_weather",
    "Weather of a city",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = load_engine(SPEC)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def adapter(engine: Engine) -> ChatAdapter:
    fields = gguf.GGUFReader(DEMO_FILE).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    bos, eos = (tokens[fields[f"tokenizer.ggml.{n}_token_id"].contents()] for n in ("bos", "eos"))
    vocabulary = Vocabulary(fields["tokenizer.chat_template"].contents(), bos, eos)
    return ChatAdapter(
        engine, configure_chat(SPEC, ChatOptions.of(SPEC), vocabulary), capabilities(SPEC)
    )


def ask(
    *messages: Message, thinks: bool = False, tools: tuple[Tool, ...] = ()
) -> GenerationRequest:
    return GenerationRequest(
        "m",
        messages,
        Sampling(temperature=0, seed=1),
        max_output_tokens=150,
        tools=tools,
        template_vars={"enable_thinking": thinks},
    )


USER = Message("user", "What is the weather in Paris?")
HISTORY = (
    Message("system", "Be nice."),
    USER,
    Message(
        "assistant",
        None,
        tool_calls=(
            ToolCall("c1", "get_weather", '{"city": "Köln", "n": [1, 2.50]}'),
            ToolCall("c2", "get_weather", '{"city":"Paris"}'),
        ),
    ),
    Message("tool", '{"t":1}', tool_call_id="c1"),
    Message("tool", "<b>", tool_call_id="c2"),
)
REASONED = (
    Message("user", "a"),
    Message("assistant", "b", reasoning="hm"),
    Message("user", "What is 2 plus 3?"),
    Message("assistant", " d \n", reasoning="hm2\n"),
    Message("user", "And 4 plus 5?", name="Ann"),
)
REQUESTS = {
    "plain": ask(Message("user", "Hello")),
    "reasoning": ask(Message("user", "What is 2 plus 3?"), thinks=True),
    "tools": ask(USER, tools=(WEATHER,)),
    "reasoning and tools": ask(USER, tools=(WEATHER,), thinks=True),
    "results of tools": ask(*HISTORY, tools=(WEATHER,), thinks=True),
    "earlier reasoning": ask(*REASONED, thinks=True),
    "no beginning": replace(ask(Message("user", "Hello")), add_generation_prompt=False),
}


def render(engine: Engine, request: GenerationRequest) -> PromptDelta:
    sink = RecordingSink()
    engine.run(replace(request, operation="render"), sink)
    [prompt] = [delta for delta in sink.deltas if isinstance(delta, PromptDelta)]
    return prompt


def chat(engine: Engine, request: GenerationRequest) -> tuple[Answer, list[str], Usage]:
    sink = RecordingSink()
    engine.run(request, sink)
    answer = add_up(delta for delta in sink.deltas if not isinstance(delta, Finish | Usage))
    return answer, sink.finishes, sink.usage


@pytest.mark.parametrize("name", REQUESTS)
def test_prompt_is_the_same(engine: Engine, adapter: ChatAdapter, name: str) -> None:
    assert render(adapter, REQUESTS[name]) == render(engine, REQUESTS[name])


@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "no beginning"])
def test_answer_is_the_same(engine: Engine, adapter: ChatAdapter, name: str) -> None:
    own, own_finish, own_usage = chat(engine, REQUESTS[name])
    answer, finish, usage = chat(adapter, REQUESTS[name])
    assert (answer, finish) == (own, own_finish)
    assert usage.input_tokens == own_usage.input_tokens
    assert usage.output_tokens == own_usage.output_tokens
    # The start tag counts there, the end tag here.
    assert usage.reasoning_tokens == own_usage.reasoning_tokens
    assert bool(usage.reasoning_tokens) == bool(answer.reasoning)


def test_forced_call_is_one(adapter: ChatAdapter) -> None:
    request = replace(ask(USER, tools=(WEATHER,), thinks=True), must_call=True)
    answer, finishes, _ = chat(adapter, request)
    assert answer.calls == [("get_weather", '{"city": "Paris"}')]
    assert finishes == ["tool_calls"]


def test_reasoning_budget_is_kept(adapter: ChatAdapter) -> None:
    request = replace(REQUESTS["reasoning"], reasoning_budget=4)
    answer, finishes, usage = chat(adapter, request)
    assert answer.reasoning
    assert answer.text
    assert usage.reasoning_tokens == 4
    assert finishes == ["stop"]


def test_choices_run_at_once(adapter: ChatAdapter) -> None:
    sink = RecordingSink()
    adapter.run(replace(REQUESTS["reasoning"], choices=2), sink)
    answers = [
        add_up(d for d in sink.deltas if not isinstance(d, Finish | Usage) and d.index == index)  # type: ignore[union-attr]  # No others come.
        for index in (0, 1)
    ]
    assert answers[0] == answers[1]
    assert answers[0].order == "rt"


def test_conversation_that_is_too_long_is_told_as_messages(adapter: ChatAdapter) -> None:
    with pytest.raises(ContextLengthExceeded, match="length of the messages"):
        adapter.run(ask(Message("user", "word " * 2000)), RecordingSink())
