"""What llama.cpp is told of a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.engines.llama_cpp import capabilities, marks
from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.messages import Message, ToolCall
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    Constraint,
    ConstraintKind,
    GenerationRequest,
    Sampling,
)
from tests.worker.engines.llama_payloads import chat_payload, payloads

SPEC = ModelSpec("demo", "llama_cpp", context_length=2048)
HELLO = (Message("user", "Hello"),)


def chat(spec: ModelSpec = SPEC, **fields: Any) -> dict[str, Any]:
    request = GenerationRequest("demo", **{"messages": HELLO, **fields})
    return chat_payload(request, spec)


def test_names_calls_and_their_ids_reach_the_template() -> None:
    calls = (ToolCall("call_1", "look", '{"at": "x"}'), ToolCall("call_2", "look", "no json"))
    messages = (
        Message("user", "Hello", name="ann"),
        Message("assistant", None, tool_calls=calls),
        Message("tool", "seen", name="look", tool_call_id="call_1"),
    )
    assert chat(messages=messages)["messages"] == [
        {"role": "user", "content": "Hello", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": "x"}'},
                },
                {
                    "id": "call_2",
                    "type": "function",
                    "function": {"name": "look", "arguments": '"no json"'},
                },
            ],
        },
        {"role": "tool", "content": "seen", "name": "look", "tool_call_id": "call_1"},
    ]


def test_prefix_is_a_message_to_be_continued() -> None:
    payload = chat(response_prefix="It is")
    assert payload["messages"][-1] == {"role": "assistant", "content": "It is"}
    assert payload["continue_final_message"]
    assert not payload["add_generation_prompt"]
    plain = chat(add_generation_prompt=False)
    assert len(plain["messages"]) == 1
    assert not plain["add_generation_prompt"]
    assert "continue_final_message" not in plain


@pytest.mark.parametrize(
    ("lora", "scales"),
    [((), [0.0, 0.0]), ((("two", 0.5),), [0.0, 0.5]), ((("two", 1.0), ("one", 2.0)), [2.0, 1.0])],
)
def test_every_adapter_is_named_whether_it_is_asked_for_or_not(
    lora: tuple[tuple[str, float], ...], scales: list[float]
) -> None:
    spec = replace(SPEC, lora_adapters={"one": Path("one.gguf"), "two": Path("two.gguf")})
    expected = [{"id": number, "scale": scale} for number, scale in enumerate(scales)]
    assert chat(spec, lora=lora)["lora"] == expected
    assert "lora" not in chat(SPEC)


def test_explicit_zero_is_told_and_what_is_left_out_is_not() -> None:
    payload = chat(sampling=Sampling(temperature=0.0, top_k=0, seed=0))
    assert (payload["temperature"], payload["top_k"], payload["seed"]) == (0, 0, 0)
    assert not {"top_p", "min_p", "repeat_penalty", "logit_bias"} & payload.keys()


def test_stop_tokens_need_log_probabilities() -> None:
    assert "logprobs" not in chat()
    payload = chat(stop_token_ids=(5,))
    assert (payload["logprobs"], payload["top_logprobs"]) == (True, 1)


def test_suffix_is_put_between_the_models_marks() -> None:
    spec = replace(SPEC, options={"fim_tokens": ["<a>", "<b>", "<c>"]})
    request = GenerationRequest("demo", operation="complete", prompts=("x", "y"), suffix="z")
    writer = payloads(spec)
    assert writer.complete(writer.with_whole_prompts(request))["prompt"] == [
        "<a>x<b>z<c>",
        "<a>y<b>z<c>",
    ]


def coder(path: Path, tokens: list[str], **ids: int) -> ModelSpec:
    """A model whose file has this vocabulary, and names these tokens of it by their ids."""
    writer = gguf.GGUFWriter(path / "coder.gguf", "qwen2")
    writer.add_token_list(tokens)
    for name, id_ in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return replace(SPEC, file=path / "coder.gguf", options={})


def filled(spec: ModelSpec) -> str:
    """The prompt for what is between x and z."""
    request = GenerationRequest("demo", operation="complete", prompts=("x",), suffix="z")
    [prompt] = payloads(spec).with_whole_prompts(request).prompts
    assert isinstance(prompt, str)
    return prompt


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
            "<|fim_prefix|>x<|fim_suffix|>z<|fim_middle|>",
        ),
        (
            ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
            "<｜fim▁begin｜>x<｜fim▁hole｜>z<｜fim▁end｜>",
        ),
        (["▁<PRE>", "▁<MID>", "▁<SUF>"], "▁<PRE>x▁<SUF>z▁<MID>"),
        (["<PRE>", "<MID>", "<SUF>"], "<PRE>x<SUF>z<MID>"),
        (["[PREFIX]", "[MIDDLE]", "[SUFFIX]"], "[SUFFIX]z[PREFIX]x"),
    ],
)
def test_marks_of_a_known_family_are_read_from_the_file(
    tmp_path: Path, own: list[str], expected: str
) -> None:
    spec = coder(tmp_path, ["a", *own])
    assert filled(spec) == expected
    assert "suffix" in capabilities(spec)
    assert filled(replace(spec, options={"fim_tokens": ["<", "|", ">"]})) == "<x|z>"
    assert marks(replace(spec, file=DEMO_FILE)) is None


@pytest.mark.parametrize("own", [["[PREFIX]"], ["▁<PRE>", "▁<SUF>"]])
def test_a_file_without_all_marks_of_a_family_has_none(tmp_path: Path, own: list[str]) -> None:
    spec = coder(tmp_path, ["a", *own])
    assert marks(spec) is None
    assert "suffix" not in capabilities(spec)


@pytest.mark.parametrize(
    "names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")]
)
def test_marks_that_a_file_names_by_their_ids_go_before_those_of_a_family(
    tmp_path: Path, names: tuple[str, str, str]
) -> None:
    tokens = ["a", "<P>", "<S>", "<M>", "▁<PRE>", "▁<SUF>", "▁<MID>"]
    assert (
        filled(coder(tmp_path, tokens, **dict(zip(names, (1, 2, 3), strict=True)))) == "<P>x<S>z<M>"
    )


@pytest.mark.parametrize(
    "ids", [{"fim_pre": 1, "fim_suf": 2}, {"prefix": 1, "suffix": 2, "middle": 9}]
)
def test_ids_of_marks_that_are_not_all_there_are_left(tmp_path: Path, ids: dict[str, int]) -> None:
    assert marks(coder(tmp_path, ["a", "<P>", "<S>"], **ids)) is None


@pytest.mark.parametrize(
    ("kind", "source", "field"),
    [
        ("json_schema", '{"type": "object"}', "response_format"),
        ("json_object", "", "response_format"),
        ("gbnf", 'root ::= "a"', "grammar"),
    ],
)
def test_a_build_without_llguidance_gets_grammars_of_its_own(
    kind: ConstraintKind, source: str, field: str
) -> None:
    writer = payloads(SPEC, has_llguidance=False)
    constraint = Constraint(kind, source, "grammar")
    payload = writer.chat(GenerationRequest("demo", HELLO, constraint=constraint))
    assert field in payload
    assert "llguidance" not in str(payload)


def test_a_build_without_llguidance_refuses_what_it_has_no_form_for() -> None:
    constraint = Constraint("lark", 'start: "a"', "grammar")
    request = GenerationRequest("demo", HELLO, constraint=constraint)
    with pytest.raises(InvalidRequest, match="knows no constraints of the type 'lark'") as refused:
        payloads(SPEC, has_llguidance=False).chat(request)
    assert refused.value.param == "grammar"
