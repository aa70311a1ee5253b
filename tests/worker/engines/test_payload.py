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
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    Constraint,
    ConstraintKind,
    GenerationRequest,
    Message,
)
from tests.worker.engines.llama_payloads import payloads

SPEC = ModelSpec("demo", "llama_cpp", context_length=2048)
HELLO = (Message("user", "Hello"),)


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


def filled(spec: ModelSpec, **fields: Any) -> str:
    """The prompt for what is between x and z."""
    request = GenerationRequest("demo", operation="complete", prompts=("x",), suffix="z", **fields)
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


@pytest.mark.parametrize(
    ("more", "ids", "expected"),
    [
        ([], {}, "\n\n--- snippet ---\n\na = 1\n\n--- snippet ---\n\nb = 2"),
        (
            ["<|file_sep|>"],
            {},
            "<|file_sep|>a.py\na = 1<|file_sep|>tmp\nb = 2<|file_sep|>filename\n",
        ),
        (
            ["<R>", "<|file_sep|>"],
            {"fim_rep": 4, "fim_sep": 9},
            "<R>myproject\n<|file_sep|>a.py\na = 1<|file_sep|>tmp\nb = 2<|file_sep|>filename\n",
        ),
    ],
)
def test_other_files_come_before_the_text_as_llama_server_puts_them(
    tmp_path: Path, more: list[str], ids: dict[str, int], expected: str
) -> None:
    tokens = ["a", "<PRE>", "<MID>", "<SUF>", *more]
    others = (("a.py", "a = 1"), ("", "b = 2"))
    spec = coder(tmp_path, tokens, **ids)
    assert filled(spec, other_files=others) == f"{expected}<PRE>x<SUF>z<MID>"
    assert filled(spec) == "<PRE>x<SUF>z<MID>"


@pytest.mark.parametrize("own", [["[PREFIX]"], ["▁<PRE>", "▁<SUF>"]])
def test_a_file_without_all_marks_of_a_family_has_none(tmp_path: Path, own: list[str]) -> None:
    spec = coder(tmp_path, ["a", *own])
    assert marks(spec) is None
    assert "suffix" not in capabilities(spec)
    assert filled(coder(tmp_path, ["[PREFIX]", "[SUFFIX]"])) == "[SUFFIX]z[PREFIX]x", "replaced"


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
