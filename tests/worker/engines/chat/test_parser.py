"""Reasoning, content, white space and channels; calls are in ``test_tool_formats.py``."""

from __future__ import annotations

import pytest

from inference_site.core.domain.deltas import TextDelta, TokenLogprob, ToolCallDelta
from tests.worker.engines.chat.answers import SYNTAXES, THINK, TOOLS, Answer, parse
from worker.engines.chat.parser.formats import ends_in_reasoning
from worker.engines.chat.parser.output import Reasoning, Syntax
from worker.engines.chat.parser.parser import OutputParser

CALL = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'


def test_reasoning_comes_apart_from_the_answer() -> None:
    assert parse(THINK, "<think>\nHm.\n</think>\n\nYes. ") == Answer("Yes. ", "Hm.\n", [], "rt")


def test_plain_text_stays_as_it_is() -> None:
    text = "  A < b, [c] and {d}\n\n<thin line> "
    assert parse(THINK, text).text == text


def test_text_goes_out_as_it_comes() -> None:
    parser = OutputParser(SYNTAXES["hermes"], TOOLS)
    sent = [parser.feed(piece) for piece in ("Hel", "lo", " the", "re <", "b")]
    assert sent[:3] == [[TextDelta("Hel")], [TextDelta("lo")], [TextDelta(" the")]]
    assert sent[3:] == [[TextDelta("re")], [TextDelta(" <b")]]


def test_a_call_of_a_tool_that_is_not_allowed_is_dropped() -> None:
    said = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    parser = OutputParser(SYNTAXES["hermes"], TOOLS[:1], only_tools=True)
    deltas = [*parser.feed(said % "other"), *parser.feed(said % TOOLS[0].name), *parser.finish()]
    names = [d.name for d in deltas if isinstance(d, ToolCallDelta) and d.name]
    assert names == [TOOLS[0].name]
    assert not any(isinstance(delta, TextDelta) for delta in deltas)


def test_other_tags_can_be_set() -> None:
    syntax = Syntax(Reasoning("[THINK]", "[/THINK]"))
    assert parse(syntax, "[THINK]a</think>[/THINK]b") == Answer("b", "a</think>", [], "rt")


def test_answer_begins_in_the_reasoning_that_the_prompt_began() -> None:
    assert parse(THINK, "Hm.</think> Yes.", in_reasoning=True) == Answer("Yes.", "Hm.", [], "rt")


def test_reasoning_that_never_ends_is_reasoning() -> None:
    assert parse(THINK, "<think>Hm. </thi") == Answer("", "Hm. </thi", [], "r")


@pytest.mark.parametrize("text", ["<think></think>", "<think> \n</think>\n\n", "</think>\n"])
def test_empty_reasoning_leaves_nothing(text: str) -> None:
    assert parse(THINK, text) == Answer()
    assert parse(THINK, f"{text}Yes").text == "Yes"


def test_tags_of_reasoning_are_text_once_there_is_content() -> None:
    text = "The tag <think> begins it, </think> ends it."
    assert parse(THINK, text) == Answer(text, "", [], "t")


def test_model_that_may_reason_again_does() -> None:
    syntax = Syntax(Reasoning(reenters=True))
    answer = parse(syntax, "<think>a</think>b <think>c</think> d")
    assert answer == Answer("b d", "ac", [], "rtrt")


@pytest.mark.parametrize("start", ["<think>Thoughts:\n", "<think>\n Thoughts:"])
def test_header_of_the_reasoning_is_left_out(start: str) -> None:
    syntax = Syntax(Reasoning(header="Thoughts:"))
    assert parse(syntax, f"{start}Hm.</think>Yes").reasoning == "Hm."
    assert parse(syntax, "<think>Thoughtful</think>").reasoning == "Thoughtful"
    assert parse(syntax, "Thoughts: x</think>", in_reasoning=True).reasoning == "x"


def test_white_space_before_a_call_is_dropped() -> None:
    assert parse("hermes", f"One moment.\n\n{CALL}\n").text == "One moment."
    assert parse("hermes", f"\n\n{CALL}\n{CALL}\n") == Answer("", "", [("g", "{}")] * 2, "01")


def test_calls_in_the_reasoning_are_thoughts_unless_they_may_be_calls() -> None:
    text = f"<think>I could {CALL} or</think>not"
    assert parse("hermes", text) == Answer("not", f"I could {CALL} or", [], "rt")
    syntax = Syntax(Reasoning(has_calls=True), SYNTAXES["hermes"].tool_format)
    assert parse(syntax, text) == Answer("not", "I could  or", [("g", "{}")], "r0rt")


@pytest.mark.parametrize("text", [CALL, f"a {CALL} b", CALL[:-3], f"{CALL}{CALL}"])
def test_without_tools_calls_are_dropped_and_leave_no_markup(text: str) -> None:
    answer = parse("hermes", text, tools=())
    assert answer.calls == []
    assert "tool_call" not in answer.text.replace("</tool_c", "")
    assert "name" not in answer.text


def test_one_call_is_the_last_where_calls_are_not_parallel() -> None:
    assert parse("hermes", f"{CALL}{CALL} end", parallel=False).calls == [("g", "{}")]


def test_log_probabilities_go_with_the_content_alone() -> None:
    parser = OutputParser(SYNTAXES["hermes"], TOOLS)
    pieces = ["<think>", "Hm", "</th", "ink>", "\n", "Yes", "", "ß", " so", " ", "<tool_call>", "x"]
    deltas = [d for p in pieces for d in parser.feed(p, (TokenLogprob(p, -1.0, p.encode()),))]
    texts = [d for d in [*deltas, *parser.finish()] if isinstance(d, TextDelta)]
    assert [t.token for text in texts for t in text.logprobs] == ["Yes", "", "ß", " so", " ", "x"]
    assert "".join(text.text for text in texts) == "Yesß so x"


def test_named_channels_say_what_is_reasoning() -> None:
    text = f"Hi<|channel>Thought\nhm <b><|channel>final\nYes<|channel>thought no<channel|>{CALL}"
    assert parse("named", text) == Answer("HiYes", "hm <b>no", [("g", "{}")], "trtr0")


def test_channel_without_a_name_is_text() -> None:
    assert parse("named", "a <|channel> b <|channel>") == Answer(
        "a <|channel> b <|channel>", order="t"
    )


def test_name_of_a_channel_may_end_the_text() -> None:
    assert parse("named", "a<|channel>thought") == Answer("a", order="t")


def test_harmony_channels_are_reasoning_calls_and_content() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|> Yes < no <|return|>"
    )
    calls = [("f", '{"a": 1}'), ("g", "{}")]
    assert parse("harmony", text) == Answer("I look. Yes < no ", "Hm.", calls, "rt01t")
    without = parse("harmony", text, tools=())
    assert without == Answer("I look. Yes < no ", "Hm.", [], "rt")


def test_harmony_answer_may_begin_with_a_recipient() -> None:
    text = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert parse("harmony", text).calls == [("f", '{"a": 1}')]
    assert parse("harmony", " to=or not to").text == "to=or not to"


def test_harmony_call_without_arguments_has_an_empty_object() -> None:
    text = "<|channel|>commentary to=functions.g <|constrain|>json<|message|><|call|>"
    assert parse("harmony", text).calls == [("g", "{}")]
    assert parse("harmony", f"{text}<|start|>assistant{text}").calls == [("g", "{}")] * 2


@pytest.mark.parametrize("half", ["<|channel|>", "<|channel|>analysis", "<|channel|>final<|mess"])
def test_half_a_harmony_header_is_no_content(half: str) -> None:
    assert parse("harmony", f"<|channel|>final<|message|>Yes<|end|>{half}").text == "Yes"


def test_white_space_after_half_a_harmony_header_takes_no_long() -> None:
    assert parse("harmony", f"<|channel|>{' ' * 400}!").text == f"{' ' * 400}!"
    assert parse("harmony", f"<|channel|>analysis{' ' * 400}").text == ""


def test_harmony_text_without_messages_is_content() -> None:
    assert parse("harmony", "Hello there.").text == "Hello there."
    assert parse("harmony", "<|channel|>hello, there").text == "hello, there"


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|user|>Hi<|assistant|><think>", True),
        ("<|assistant|>\n<think>\n", True),
        ("<think>a</think>b<|user|>c<|assistant|><think>\nLet me", True),
        ("<|assistant|>\n", False),
        ("<think>\n\n</think>\n\n", False),
        ("What does <think> do?<|im_end|>\n<|im_start|>assistant\n", False),
        ("What does <think> do?\n[INST]", False),
        ("<think>" + "x" * 256, True),
        ("<think>" + "x" * 257, False),
    ],
)
def test_prompt_begins_a_reasoning_with_the_last_tag_near_its_end(prompt: str, begun: bool) -> None:
    assert ends_in_reasoning(prompt, THINK) is begun


def test_prompt_begins_a_reasoning_with_a_channel() -> None:
    harmony, named = SYNTAXES["harmony"], SYNTAXES["named"]
    assert ends_in_reasoning("<|start|>assistant<|channel|>analysis<|message|>Hm", harmony)
    assert not ends_in_reasoning("<|start|>assistant<|channel|>final<|message|>", harmony)
    assert not ends_in_reasoning("<|start|>assistant", harmony)
    assert ends_in_reasoning("<|channel>thought\n", named)
    assert not ends_in_reasoning("<|channel>thought\nhm<channel|>", named)
    assert not ends_in_reasoning("<think>", Syntax())
