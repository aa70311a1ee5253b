"""Chat templates: Hugging Face's conventions, the built-in families, and the sandbox."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.request import GenerationRequest, Message, TextPart, Tool, ToolCall
from worker.engines.chat.template import FAMILIES, ChatTemplate, stop_texts_of, without_bos
from worker.engines.chat.tools import with_tools_in_text

DOUBLING = "{{% set ns = namespace(x='x') %}}{{% for i in range(64) %}}{}{{% endfor %}}"
ASK = GenerationRequest("m", (Message("user", "Hi"),))
WEATHER = Tool("weather", "Wetter für <b>", {"type": "object"})
CALLING = GenerationRequest(
    "m",
    (
        Message("system", "Be nice."),
        Message("user", "Weather?"),
        Message(
            "assistant", None, tool_calls=(ToolCall("c12345678", "weather", '{"in": "Köln"}'),)
        ),
        Message("tool", "Sun", tool_call_id="c12345678"),
    ),
    tools=(WEATHER,),
)


def render(source: str, request: GenerationRequest = ASK, **variables: object) -> str:
    return ChatTemplate(source, variables).render(request)


def test_blocks_leave_no_lines() -> None:
    assert render("{% if true %}\n  {% set a = 1 %}\n{{ a }}\n{% endif %}\n") == "1\n"


def test_loops_can_be_left() -> None:
    skipping, leaving = "{% if x == 1 %}{% continue %}", "{% if x == 3 %}{% break %}"
    source = f"{skipping}{{% endif %}}{{{{ x }}}}{leaving}{{% endif %}}"
    assert render(f"{{% for x in range(9) %}}{source}{{% endfor %}}") == "023"


def test_loops_know_where_they_are() -> None:
    source = "{{ loop.index }}{{ loop.length }}{{ loop.previtem }}{{ loop.last }} "
    assert render(f"{{% for x in 'abc' %}}{source}{{% else %}}no{{% endfor %}}") == (
        "13False 23aFalse 33bTrue "
    )


def test_loops_can_recurse() -> None:
    source = (
        "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    )
    assert render(source) == "123"


def test_json_is_written_as_characters() -> None:
    request = replace(ASK, tools=(WEATHER,))
    function = (
        '"name": "weather", "description": "Wetter für <b>", "parameters": {"type": "object"}'
    )
    assert render("{{ tools[0] | tojson }}", request) == (
        f'{{"type": "function", "function": {{{function}}}}}'
    )
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_names_of_the_conventions_are_there() -> None:
    assert render("{{ bos_token }}{{ messages[0].role }}", bos_token="<s>") == "<s>user"
    assert render("{{ tools is none }}{{ add_generation_prompt }}") == "TrueTrue"
    assert render("{% generation %}a{% endgeneration %}") == "a"
    assert render("{{ strftime_now('%Y') }}") in (
        str(datetime.now(tz=UTC).year), str(datetime.now().astimezone().year)
    )  # fmt: skip


def test_variables_of_the_request_win() -> None:
    request = replace(ASK, template_vars={"enable_thinking": True, "messages": "mine"})
    assert (
        render("{{ enable_thinking }}{{ messages | length }}", request, enable_thinking=False)
        == "True1"
    )


def test_template_can_refuse() -> None:
    with pytest.raises(InvalidRequest, match=r"^TemplateError: no systems here$") as caught:
        render("{{ raise_exception('no systems here') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ x.y.z }}", "{{ 1 / 0 }}", "{{ none + 'a' }}", "{{ [] | first | abs }}"]
)
def test_errors_of_a_template_are_refusals(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^TemplateError: "):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% for %}", "{% include 'x' %}{% nope %}"])
def test_text_that_is_no_template_is_told(source: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        ChatTemplate(source)


def test_history_is_shown_whole() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.name }}:"
        "{{ m.reasoning_content }}:{{ m.tool_call_id }}:"
        "{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
    )
    parts = (TextPart("a"), TextPart("b"))
    calls = (ToolCall("c", "f", '{"x": [1]}'), ToolCall("d", "g", "{oops"), ToolCall("e", "h", "5"))
    messages = (
        Message("user", None, name="Ann", parts=parts),
        Message("assistant", None, tool_calls=calls, reasoning="hm"),
        Message("tool", "1", tool_call_id="c"),
    )
    lines = render(source, replace(ASK, messages=messages)).splitlines()
    assert lines[0] == "user:ab:Ann:::"
    assert lines[1].startswith("assistant:::hm::")
    assert '"arguments": {"x": [1]}' in lines[1]
    assert '"arguments": "{oops"' in lines[1]
    assert '"arguments": "5"' in lines[1]
    assert lines[2] == "tool:1:::c:"


def test_answer_begins_as_it_is_told() -> None:
    assert render("{{ messages[0].content }}:", replace(ASK, response_prefix="Well")) == "Hi:Well"


def test_bos_is_there_once() -> None:
    assert without_bos("<s>Hi<s>", "<s>") == "Hi<s>"
    assert without_bos("<s>Hi", "") == "<s>Hi"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('{% set stop_strings = ["<end>", "User:"] %}hi', ("<end>", "User:")),
        ('{%- set stop_strings = ["a" ~ "b", 5, ""] -%}', ("ab",)),
        ("{% set stop_strings = [eos_token] %}", ()),
        ('{% set stop_strings = "<end>" %}', ()),
        ("{% set stop_strings = 5 %}", ()),
        ('{% if tools %}{% set stop_strings = ["<end>"] %}{% endif %}', ()),
        ('{% set stops = ["<end>"] %}', ()),
        ("{% set stop_strings = [1 %}", ()),
    ],
)
def test_template_says_which_texts_end_a_turn(source: str, found: tuple[str, ...]) -> None:
    assert stop_texts_of(source) == found


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['re'] }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_there_is_no_way_out_of_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^TemplateError: "):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(1000000000) | list }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) + f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}",
        DOUBLING.format("{% set ns.x = ns.x + ns.x %}"),
        DOUBLING.format("{% set ns.x = ns.x ~ ns.x %}"),
        DOUBLING.format("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * [0] }}",
        "{% set n = 9999999999 %}{{ 9 ** n }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 1 | tojson(indent=1000000000) }}{{ [1] | tojson(indent=1000000000) }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ '{:>2000000000}'.format('x') }}",
        "{{ '{:>{}}'.format('x', '2000000000') }}",
        "{{ '%2000000000s' | format('x') }}",
        DOUBLING.format("{% set ns.x = ns.x.replace('x', 'x' * 999) %}"),
        DOUBLING.format("{% set ns.x = ns.x | replace('x', 'x' * 999) %}"),
        DOUBLING.format("{% set ns.x = [ns.x, ns.x] | join %}"),
        DOUBLING.format("{% set ns.x = ns.x.translate({120: 'x' * 999}) %}"),
        "{% set x = ('x' * 9999999).split('x') %}{{ x | join('x' * 9999) }}",
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_endless_and_huge_templates_are_stopped(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^TemplateError: "):
        render(source)


def test_long_conversation_is_within_the_bounds() -> None:
    messages = tuple(Message("user", "word " * 50) for _ in range(10_000))
    prompt = ChatTemplate(FAMILIES["chatml"].template).render(replace(ASK, messages=messages))
    assert len(prompt) > 2_500_000


HELLO = replace(
    ASK,
    messages=(
        Message("system", "Be nice."),
        *ASK.messages,
        Message("assistant", "Hey."),
        Message("user", "Bye"),
    ),
)


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHey.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe nice.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHey.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", "<s>[INST] Hi[/INST] Hey.</s>[INST] Be nice.\n\nBye[/INST]"),
        (
            "gemma",
            "<s><start_of_turn>user\nBe nice.\n\nHi<end_of_turn>\n<start_of_turn>model\nHey."
            "<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "phi3",
            "<|system|>\nBe nice.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHey.<|end|>\n"
            "<|user|>\nBye<|end|>\n<|assistant|>\n",
        ),
        (
            "zephyr",
            "<|system|>\nBe nice.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHey.</s>\n"
            "<|user|>\nBye</s>\n<|assistant|>\n",
        ),
    ],
)
def test_families_write_conversations_in_their_formats(family: str, prompt: str) -> None:
    template = ChatTemplate(FAMILIES[family].template, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(HELLO) == prompt


@pytest.mark.parametrize(
    ("family", "call", "result"),
    [
        (
            "chatml",
            '<tool_call>\n{"name": "weather", "arguments": {"in": "Köln"}}\n</tool_call>',
            "<tool_response>\nSun\n</tool_response>",
        ),
        (
            "llama3",
            '{"name": "weather", "parameters": {"in": "Köln"}}<|eot_id|>',
            "ipython<|end_header_id|>\n\nSun",
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"in": "Köln"}, "id": "c12345678"}]',
            '[TOOL_RESULTS] {"content": "Sun", "call_id": "c12345678"}[/TOOL_RESULTS]',
        ),
    ],
)
def test_families_with_tools_write_calls_and_results(family: str, call: str, result: str) -> None:
    template = ChatTemplate(FAMILIES[family].template, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.takes_tools
    prompt = template.render(CALLING)
    assert prompt.count("Wetter für <b>") == 1
    assert call in prompt
    assert result in prompt


@pytest.mark.parametrize("family", ["gemma", "phi3", "zephyr"])
def test_families_without_tools_say_so(family: str) -> None:
    assert not ChatTemplate(FAMILIES[family].template).takes_tools


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_ends_of_turns(family: str) -> None:
    assert FAMILIES[family].stop
    assert all(
        stop in FAMILIES[family].template or stop.startswith("<|") for stop in FAMILIES[family].stop
    )


def test_half_a_surrogate_pair_in_the_history_is_no_character() -> None:
    call = ToolCall("call_1", "f", r'{"city": "\ud83d"}')
    request = GenerationRequest("m", (Message("assistant", None, tool_calls=(call,)),))
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(source, request) == '{"city": "?"}'
    [message] = with_tools_in_text(request).messages
    assert message.text == '{"name": "f", "arguments": {"city": "?"}}'
