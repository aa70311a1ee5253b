"""How calls are written, well and badly, in each format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_site.core.domain.deltas import ToolCallDelta
from inference_site.core.domain.request import Tool
from tests.worker.engines.chat.answers import SYNTAXES, TOOLS, Answer, parse
from worker.engines.chat.parser.formats import syntax_of, to_json
from worker.engines.chat.parser.parser import OutputParser

DEEPSEEK = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "b"}\n```'
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
QWEN = (
    "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n</function>\n</tool_call>"
)
TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "b"}, "id": "123456789"}, '
    '{"name": "g", "arguments": {}}]',
    "llama3_json": '{"name": "f", "parameters": {"a": "b"}}; {"name": "g", "parameters": {}}',
    "pythonic": "[f(a='b'), g()]",
    "qwen3_coder": QWEN,
    "deepseek": DEEPSEEK,
    "harmony": '<|channel|>commentary to=functions.f<|message|>{"a": "b"}<|call|>'
    "<|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|call|>",
}


@pytest.mark.parametrize("name", TWO_CALLS)
def test_two_calls(name: str) -> None:
    assert parse(name, TWO_CALLS[name]) == Answer(
        "", "", [("f", '{"a": "b"}'), ("g", "{}")], order="01"
    )


@pytest.mark.parametrize("name", TWO_CALLS)
def test_calls_after_reasoning(name: str) -> None:
    before = "<think>Hm.</think>\n\n"
    if name == "harmony":
        before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    answer = parse(name, before + TWO_CALLS[name])
    assert (answer.reasoning, answer.order) == ("Hm.", "r01")


@pytest.mark.parametrize("name", TWO_CALLS)
def test_call_that_is_cut_off_stands_as_far_as_it_came(name: str) -> None:
    text = TWO_CALLS[name]
    for length in range(len(text)):
        parser = OutputParser(SYNTAXES[name], TOOLS)
        deltas = [*parser.feed(text[:length]), *parser.finish()]
        calls = [d for d in deltas if isinstance(d, ToolCallDelta)]
        sent = "".join(d.arguments for d in calls if d.call == 0)
        # What is left of half a tag looks like what came before it.
        assert '{"a": "b"}'.startswith(sent.rstrip("<|cal"))
        if parser.calls == 2:
            assert sent == '{"a": "b"}'


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "deepseek", "harmony"])
def test_name_comes_first_and_arguments_as_they_are_written(name: str) -> None:
    parser = OutputParser(SYNTAXES[name], TOOLS)
    text = TWO_CALLS[name]
    cut = text.index('"b"') + 2
    head = parser.feed(text[:cut])
    assert isinstance(head[0], ToolCallDelta)
    assert (head[0].name, head[0].arguments) == ("f", "")
    assert "".join(d.arguments for d in head if isinstance(d, ToolCallDelta)) == '{"a": "b'
    assert parser.call_is_open


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('{"arguments": {"x": "}"}, "name": "g"}', [("g", '{"x": "}"}')], ""),
        ('{"name": "g"}', [("g", "{}")], ""),
        ('{"name": "g", "arguments": null}', [("g", "{}")], ""),
        ('{"name": "g", "arguments": "{\\"x\\": 1}"}', [("g", '{"x": 1}')], ""),
        ('{"name": "g", "arguments": "word"}', [("g", '"word"')], ""),
        ('{"name": "g", "arguments": {"x": 1}', [("g", '{"x": 1}')], ""),
        ('{"name": "g", "arguments": {}, "id": "1", "x": [{}]}', [("g", "{}")], ""),
        ('{"name": "g", "arguments": {}}\n{"name": "f"}', [("g", "{}"), ("f", "{}")], ""),
        ('{"name": "\\ud800"}', [("?", "{}")], ""),
        ("nothing of this kind", [], "nothing of this kind"),
        ('{"nom": "g"}', [], '{"nom": "g"}'),
        ('{"name": 5}', [], '{"name": 5}'),
        ('{"name": }', [], '{"name": }'),
        ('["name"]', [], '["name"]'),
        ("{", [], "{"),
    ],
)
def test_hermes_reads_what_models_write(text: str, calls: list[Any], content: str) -> None:
    answer = parse("hermes", f"<tool_call>{text}</tool_call>")
    assert (answer.calls, answer.text) == (calls, content)


def test_hermes_without_its_end_tag() -> None:
    assert parse("hermes", '<tool_call>{"name": "g"}').calls == [("g", "{}")]
    assert parse("hermes", '<tool_call>{"name": "g"} Done.').text == "Done."


def test_mistral_with_names_before_arguments() -> None:
    text = 'Hi.[TOOL_CALLS]f[ARGS]{"a": "b"}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}[TOOL_CALLS]g{"x": 1}'
    calls = [("f", '{"a": "b"}'), ("g", "{}"), ("g", '{"x": 1}')]
    assert parse("mistral", text) == Answer("Hi.", "", calls, "t012")


@pytest.mark.parametrize("text", ["some words", "[1, 2]", "[]", "f(x)", "[{]"])
def test_mistral_gives_back_what_is_no_call(text: str) -> None:
    assert parse("mistral", f"[TOOL_CALLS]{text}").text == text


@pytest.mark.parametrize(
    "text",
    ['{"title": "An answer in JSON"}', '{"name": "Bob", "parameters": {}}', "{x}", "{", '{"na'],
)
def test_llama_answers_in_json_that_are_no_calls(text: str) -> None:
    assert parse("llama3_json", text) == Answer(text, "", [], "t")
    assert parse("llama3_json", '{"name": "f", "parameters": {}}', tools=()).calls == []


def test_llama_answer_in_json_does_not_wait_for_its_end() -> None:
    assert OutputParser(SYNTAXES["llama3_json"], TOOLS).feed('{"title": "A')


def test_llama_call_after_its_tag_may_have_any_name() -> None:
    text = '<|python_tag|>{"type": "function", "name": "h", "parameters": {"a": 1}}<|eom_id|>'
    assert parse("llama3_json", text).calls == [("h", '{"a": 1}')]
    assert parse("llama3_json", "<|python_tag|>print(1)").text == "print(1)"


def test_calls_without_tags_only_begin_an_answer() -> None:
    assert parse("llama3_json", 'See {"name": "f", "parameters": {}}').calls == []
    assert parse("pythonic", "See [f(a=1)]").calls == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("a=1, b=-2.5, c=1., d=.5, e=1e3", {"a": 1, "b": -2.5, "c": 1.0, "d": 0.5, "e": 1000}),
        ("a=True, b=False, c=None", {"a": True, "b": False, "c": None}),
        ("a=true, b=false, c=null", {"a": True, "b": False, "c": None}),
        ("a=[1, (2, 3), {'k': [],},]", {"a": [1, [2, 3], {"k": []}]}),
        (r"a='it\'s', b=" + r'"\n\x41\u00e9\q"', {"a": "it's", "b": "\nAé\\q"}),
        ("a=')', b='('", {"a": ")", "b": "("}),
    ],
)  # fmt: skip
def test_python_values_become_json(arguments: str, expected: dict[str, Any]) -> None:
    found = to_json(arguments)
    assert found is not None
    assert json.loads(found) == expected


@pytest.mark.parametrize(
    "arguments", ["1", "a=b", "a=f(1)", "a=1 2", "a={1: 2}", "a==1", "a=1, 2", "a=1e999"]
)
def test_what_is_no_plain_value_is_no_call(arguments: str) -> None:
    assert to_json(arguments) is None
    assert parse("pythonic", f"[f({arguments})]") == Answer(f"[f({arguments})]", "", [], "t")


@pytest.mark.parametrize("text", ["[1, 2, 3]", "[see(1)]", "[f]", "[f(", "[a b(", "[", "[f(a=1"])
def test_lists_that_are_no_calls_are_text(text: str) -> None:
    assert parse("pythonic", text) == Answer(text, "", [], "t")


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        (
            "qwen3_coder",
            '<function=f><parameter=city>["\\ud83d"]</parameter></function>',
            '{"city": ["?"]}',
        ),
        (
            "hermes",
            r'<tool_call>{"arguments": "{\"a\": \"\ud83d\"}", "name": "f"}</tool_call>',
            '{"a": "?"}',
        ),
    ],
)
def test_half_a_surrogate_pair_is_no_character(name: str, text: str, arguments: str) -> None:
    assert parse(name, text).calls == [("f", arguments)]


def test_calls_in_python_between_tags() -> None:
    text = "Hm.<|tool_call_start|>[h(x=1)]<|tool_call_end|>Done."
    assert parse("pythonic", text) == Answer("Hm.Done.", "", [("h", '{"x": 1}')], "t0t")


@pytest.mark.parametrize(
    ("value", "key", "expected"),
    [
        ("12", "a", "12"),
        ("12", "n", 12),
        ("twelve", "n", "twelve"),
        ('{"x": [1]}', "o", {"x": [1]}),
        ("True", "o", True),
        ("\ntwo\n\nlines\n", "a", "two\n\nlines"),
        ("a < b && <c>", "a", "a < b && <c>"),
        ("NaN", "o", "NaN"),
        ("[" * 5000, "o", "[" * 5000),
    ],
)
def test_schema_says_what_a_parameter_is(value: str, key: str, expected: Any) -> None:
    text = f"<function=f><parameter={key}>{value}</parameter></function>"
    [(name, arguments)] = parse("qwen3_coder", text).calls
    assert name == "f"
    assert json.loads(arguments) == {key: expected}


OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("12", OR_NULL, "12"),
        ("12", {"type": ["string", "null"]}, "12"),
        ("null", OR_NULL, None),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("12", {"enum": ["11", "12"]}, "12"),
        ("12", {"const": "12"}, "12"),
        ("12", {"enum": ["11", 12]}, 12),
        ("12", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, 12),
        ("12", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 12),
        ("{'a': True, 'b': [1, None]}", {"type": "object"}, {"a": True, "b": [1, None]}),
        ("['a', \"b\"]", {"anyOf": [{"type": "array"}, {"type": "null"}]}, ["a", "b"]),
        ("{'a', b}", {"type": "object"}, "{'a', b}"),
        ("12", {"anyOf": 5}, 12),
        ("12", {"enum": "12"}, 12),
        ("12", {"type": [{}, "null"]}, 12),
    ],
)
def test_schema_with_alternatives_says_what_a_parameter_is(
    value: str, schema: dict[str, Any], expected: Any
) -> None:
    tools = [Tool("f", None, {"type": "object", "properties": {"a": schema}})]
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"
    [(_, arguments)] = parse("qwen3_coder", text, tools).calls
    assert json.loads(arguments) == {"a": expected}


@pytest.mark.parametrize("end", ["</function>", "</parameter>\n</function>"])
def test_parameter_without_its_end_tag_ends_where_the_next_begins(end: str) -> None:
    text = f"<function=f>\n<parameter=a>\nParis\n<parameter=n>\n3\n{end}"
    assert parse("qwen3_coder", text).calls == [("f", '{"a": "Paris", "n": 3}')]


def test_tag_of_a_parameter_within_a_line_is_a_part_of_the_value() -> None:
    text = "<function=f><parameter=a>See <parameter=n> there</parameter></function>"
    assert parse("qwen3_coder", text).calls == [("f", '{"a": "See <parameter=n> there"}')]


def test_parameters_go_out_one_by_one() -> None:
    parser = OutputParser(SYNTAXES["qwen3_coder"], TOOLS)
    deltas = parser.feed("<tool_call><function=f><parameter=a>b</parameter><parameter=n>4")
    assert [d.arguments for d in deltas if isinstance(d, ToolCallDelta)] == ["", '{"a": "b"']
    assert parser.feed("2</parameter>") == [ToolCallDelta(0, ', "n": 42')]


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("<tool_call>oops</tool_call>", [], "oops"),
        ("<function=>x", [], ">x"),
        ("<tool_call><function=f>oops</function>", [("f", "{}")], "oops"),
        ("<function=f><parameter=a>b</function>", [("f", '{"a": "b"}')], ""),
        ("<function=f><parameter=a>b</parameter>", [("f", '{"a": "b"')], ""),
        (f"<function=f><parameter=>{'b' * 256}", [("f", "{}")], f">{'b' * 256}"),
    ],
)
def test_qwen_calls_that_are_not_quite_right(text: str, calls: list[Any], content: str) -> None:
    answer = parse("qwen3_coder", text)
    assert (answer.calls, answer.text) == (calls, content)


@pytest.mark.parametrize("text", ["oops", "function f {}", "f\n{}"])
def test_deepseek_gives_back_what_is_no_call(text: str) -> None:
    call = (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{text}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    assert parse("deepseek", call).text == text


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ("<tool_call>", "hermes"),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|python_tag|>", "llama3_json"),
        ("<|tool_call_start|>", "pythonic"),
        ("nothing", None),
    ],
)
def test_template_gives_the_format_away(template: str, tool_format: str | None) -> None:
    found = syntax_of(template).tool_format
    assert (found and found.name) == tool_format


def test_template_gives_reasoning_and_channels_away() -> None:
    assert syntax_of("<think></think>").reasoning is not None
    assert syntax_of("{{ x }}").reasoning is None
    assert syntax_of("<|channel|>final<|message|>").channels == "harmony"
    assert syntax_of("<|channel>thought").channels == "named"
