"""The chat adapter on an engine whose completions are given."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from inference_site.catalogue.engines.options import ChatOptions, chat_capabilities
from inference_site.core.domain.deltas import Delta, Finish, PromptDelta, TextDelta, Usage
from inference_site.core.domain.errors import ContextLengthExceeded, InvalidRequest
from inference_site.core.domain.messages import ImagePart, Message
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import Constraint, GenerationRequest, Sampling
from tests.sinks import RecordingSink
from tests.worker.engines.chat.answers import TOOLS, Answer, add_up
from tests.worker.engines.chat.completing import CompletingEngine
from worker.engines.base import Engine
from worker.engines.chat.adapter import ChatAdapter
from worker.engines.chat.configuration import Vocabulary, configure_chat

TEMPLATE = (
    "<s>{% if tools %}{{ tools | length }} tools. <tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}"
    "{% endif %}{# </think> #}"
)
ASK = GenerationRequest("m", (Message("user", "Hi"),))
CALL = '<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>'
THINKING = {"enable_thinking": True}


def adapt(
    engine: Engine, own: frozenset[str] = frozenset({"completions", "grammar"}), **options: Any
) -> ChatAdapter:
    spec = ModelSpec("m", "fake", options=options)
    vocabulary = Vocabulary(TEMPLATE, bos="<s>")
    return ChatAdapter(engine, configure_chat(spec, ChatOptions.of(spec), vocabulary), own)


def chat(engine: Engine, request: GenerationRequest = ASK, **options: Any) -> RecordingSink:
    sink = RecordingSink()
    adapt(engine, **options).chat(request, sink)
    return sink


def answer(sink: RecordingSink, index: int = 0) -> Answer:
    return add_up(
        d for d in sink.deltas if not isinstance(d, Finish | Usage) and d.index == index  # type: ignore[union-attr]  # No others come.
    )  # fmt: skip


def test_messages_become_a_prompt_and_the_answer_is_parsed() -> None:
    engine = CompletingEngine("<think>Hm.</think>\nYes.")
    sink = chat(engine)
    assert answer(sink) == Answer("Yes.", "Hm.", [], "rt")
    assert sink.finishes == ["stop"]
    [asked] = engine.requests
    assert asked.operation == "complete"
    assert asked.prompts == ("<|user|>Hi<|assistant|>",)
    assert asked.messages == ()


def test_everything_about_sampling_reaches_the_engine() -> None:
    engine = CompletingEngine("Yes")
    bound = Constraint("regex", "Yes", "grammar")
    request = replace(
        ASK,
        sampling=Sampling(temperature=0.5, seed=1),
        max_output_tokens=5,
        stop=("x",),
        stop_token_ids=(3,),
        constraint=bound,
        top_logprobs=2,
        cache_prompt=False,
    )
    chat(engine, request)
    [asked] = engine.requests
    assert replace(asked, operation="chat", prompts=(), messages=ASK.messages) == request


def test_calls_end_with_tool_calls() -> None:
    sink = chat(CompletingEngine(f"Wait. {CALL}"), replace(ASK, tools=TOOLS))
    assert answer(sink) == Answer("Wait.", "", [("g", '{"x": 1}')], "t0")
    assert sink.finishes == ["tool_calls"]


def test_length_wins_over_calls() -> None:
    request = replace(ASK, tools=TOOLS, max_output_tokens=len(CALL) // 3 + 4)
    sink = chat(CompletingEngine(CALL * 2), request)
    assert answer(sink).calls == [("g", '{"x": 1}')]
    assert sink.finishes == ["length"]


def test_call_that_the_model_leaves_unfinished_was_not_made() -> None:
    sink = chat(CompletingEngine(CALL[:-15]), replace(ASK, tools=TOOLS))
    assert sink.finishes == ["length"]


def test_each_choice_has_a_parser_of_its_own() -> None:
    engine = CompletingEngine("<think>a</think>b", f"c{CALL}")
    sink = chat(engine, replace(ASK, choices=2, tools=TOOLS))
    assert answer(sink, 0) == Answer("b", "a", [], "rt")
    assert answer(sink, 1) == Answer("c", "", [("g", '{"x": 1}')], "t0")
    assert sink.finishes == ["stop", "tool_calls"]


def test_tokens_of_the_reasoning_are_counted() -> None:
    sink = chat(CompletingEngine("123456</think>ab", piece=2), replace(ASK, template_vars=THINKING))
    assert answer(sink).reasoning == "123456"
    assert sink.usage == Usage(7, 1, 8, 7, 1.0, 2.0)


def test_forced_call_is_bound_to_be_one() -> None:
    engine = CompletingEngine('{"name": "g", "arguments": {"x": 1}}')
    sink = chat(engine, replace(ASK, tools=TOOLS, must_call=True, template_vars=THINKING))
    assert answer(sink).calls == [("g", '{"x": 1}')]
    assert sink.finishes == ["tool_calls"]
    [asked] = engine.requests
    assert asked.constraint is not None
    assert asked.constraint.kind == "json_schema"
    calls = json.loads(asked.constraint.source)["anyOf"]
    assert [call["properties"]["name"]["const"] for call in calls] == ["f", "g"]
    assert asked.prompts[0] == "2 tools. <tool_call><|user|>Hi<|assistant|><think>\n</think>\n\n"


def test_forced_call_that_is_cut_short_ends_with_length() -> None:
    engine = CompletingEngine('{"name": "g", "arguments": {"x": ')
    assert chat(engine, replace(ASK, tools=TOOLS, must_call=True)).finishes == ["length"]


def test_call_cannot_be_forced_without_grammars() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(CompletingEngine(), replace(ASK, tools=TOOLS, must_call=True), own=frozenset())
    assert caught.value.param == "tool_choice"


def test_tools_stand_in_the_system_text_of_a_template_that_does_not_show_them() -> None:
    source = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    chat_ = configure_chat(ModelSpec("m", "fake"), ChatOptions(), Vocabulary(source))
    engine = CompletingEngine("Yes.")
    ChatAdapter(engine, chat_, frozenset()).chat(replace(ASK, tools=TOOLS), RecordingSink())
    [prompt] = engine.requests[0].prompts
    assert isinstance(prompt, str)
    assert prompt.startswith("[system] You can call these functions")
    assert f'{{"name": "{TOOLS[0].name}"' in prompt


def test_reasoning_ends_at_its_budget_and_the_answer_goes_on() -> None:
    engine = CompletingEngine("<think>12345678", "Yes.", piece=1)
    sink = chat(engine, replace(ASK, reasoning_budget=4, max_output_tokens=50))
    assert answer(sink) == Answer("Yes.", "1234", [], "rt")
    assert sink.finishes == ["stop"]
    first, second = engine.requests
    assert second.prompts == (f"{first.prompts[0]}<think>1234</think>\n\n",)
    assert second.max_output_tokens == 50 - 11
    assert sink.usage == Usage(7, 1, 15, 4, 2.0, 4.0)


def test_reasoning_within_its_budget_is_not_touched() -> None:
    engine = CompletingEngine("<think>123</think>Yes.", piece=1)
    assert answer(chat(engine, replace(ASK, reasoning_budget=40))).reasoning == "123"
    assert len(engine.requests) == 1


def test_budget_of_nothing_ends_a_reasoning_that_the_prompt_began() -> None:
    engine = CompletingEngine("Yes.")
    sink = chat(engine, replace(ASK, reasoning_budget=0, template_vars=THINKING))
    assert answer(sink) == Answer("Yes.", "", [], "t")
    assert engine.requests[0].prompts[0] == "<|user|>Hi<|assistant|><think>\n</think>\n\n"


def test_budget_holds_for_each_choice() -> None:
    engine = CompletingEngine("<think>12345", "a", "<think>1</think>b", piece=1)
    request = replace(ASK, reasoning_budget=2, choices=2, sampling=Sampling(seed=5))
    sink = chat(engine, request)
    assert [answer(sink, index).order for index in (0, 1)] == ["rt", "rt"]
    assert [answer(sink, index).text for index in (0, 1)] == ["a", "b"]
    assert [asked.sampling.seed for asked in engine.requests] == [5, 5, 6]
    assert sink.usage.input_tokens == 7
    assert sink.usage.reasoning_tokens == 2 + 9  # The whole end tag is read before it is known.


def test_tokens_that_the_reasoning_took_are_missing_in_the_end() -> None:
    engine = CompletingEngine("<think>12345", piece=1)
    sink = chat(engine, replace(ASK, reasoning_budget=2, max_output_tokens=9))
    assert sink.finishes == ["length"]
    assert len(engine.requests) == 1


def test_cancelled_chat_has_no_finish() -> None:
    sink = RecordingSink(cancel_after=2)
    adapt(CompletingEngine("A long answer.")).chat(ASK, sink)
    assert sink.finishes == []
    assert sink.usage.output_tokens == 2


def test_stop_texts_of_the_template_end_answers_and_are_not_told() -> None:
    class Stopping(CompletingEngine):
        def complete(self, request: GenerationRequest, sink: Any) -> None:
            self.requests.append(request)
            sink.feed(TextDelta("Yes"))
            sink.feed(Finish("stop", 0, request.stop[-1]))
            sink.feed(Usage(1, 0, 1))

    engine = Stopping()
    sink = chat(engine, replace(ASK, stop=("mine", "<|im_end|>")), chat_template="chatml")
    assert engine.requests[0].stop == ("mine", "<|im_end|>", "<|im_start|>")
    finish = next(d for d in sink.deltas if isinstance(d, Finish))
    assert finish.stop is None
    told = chat(Stopping(), replace(ASK, stop=("<|im_start|>",)), chat_template="phi3")
    assert Finish("stop", 0, "<|user|>") not in told.deltas


def test_errors_of_the_prompt_are_errors_of_the_messages() -> None:
    class Refusing(CompletingEngine):
        def complete(self, request: GenerationRequest, sink: Any) -> None:
            if request.cache_prompt:
                raise ContextLengthExceeded(10, 20, "prompt")
            raise InvalidRequest("no", "prompt")

    with pytest.raises(ContextLengthExceeded, match="length of the messages") as caught:
        chat(Refusing())
    assert (caught.value.context_length, caught.value.input_tokens) == (10, 20)
    with pytest.raises(InvalidRequest) as refused:
        chat(Refusing(), replace(ASK, cache_prompt=False))
    assert refused.value.param == "messages"


def test_media_are_refused() -> None:
    message = Message("user", None, parts=(ImagePart("data:", "messages[0]"),))
    with pytest.raises(InvalidRequest, match="neither images nor sounds"):
        chat(CompletingEngine(), replace(ASK, messages=(message,)))


def test_prompt_can_be_shown() -> None:
    sink = RecordingSink()
    adapt(CompletingEngine()).render(replace(ASK, response_prefix="Well"), sink)
    prompt = "<|user|>Hi<|assistant|>Well"
    expected: list[Delta] = [PromptDelta(prompt, tuple(map(ord, prompt))), Finish("stop")]
    assert sink.deltas == expected


def test_thinking_can_be_forced() -> None:
    engine = CompletingEngine("Hm</think>Yes")
    request = replace(ASK, template_vars={"enable_thinking": False})
    assert answer(chat(engine, request, force_enable_thinking=True)).reasoning == "Hm"


def test_the_rest_is_the_engines_own() -> None:
    engine, sink = CompletingEngine("Yes"), RecordingSink()
    adapter = adapt(engine)
    adapter.complete(GenerationRequest("m", prompts=("<think>",)), sink)
    adapter.tokenize(GenerationRequest("m", prompts=("a",)), sink)
    adapter.close()
    assert sink.text == "Yes"
    assert engine.is_closed


def test_capabilities_are_those_of_a_chat() -> None:
    own = frozenset({"completions", "tokens", "grammar"})
    chats = {"chat", "chat_template", "prompt_template", "response_prefix", "tools"}
    assert chat_capabilities(own) == own | chats | {"render"}
    assert chat_capabilities(frozenset()) == chats
