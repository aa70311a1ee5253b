"""Constrained output on the wire: ``response_format`` and the extension ``grammar``.

Source: API reference, "Structured outputs"; ``grammar`` as mistral.rs and llama.cpp have it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from inference_site.api.payload import WireRequest


class TextFormat(WireRequest):
    """``{"type": "text"}``: no constraint."""

    type: Literal["text"]


class JsonObjectFormat(WireRequest):
    """``{"type": "json_object"}``: any JSON object; llama-server takes a ``schema`` here too."""

    type: Literal["json_object"]
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class JsonSchema(WireRequest):
    """``response_format.json_schema``. The schema is always enforced, ``strict`` or not."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    strict: bool | None = None


class JsonSchemaFormat(WireRequest):
    """``{"type": "json_schema", "json_schema": {…}}``."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class Grammar(WireRequest):
    """``grammar``: ``value`` is text, or an object for ``json_schema`` and ``llguidance``."""

    type: Literal["regex", "lark", "gbnf", "json_schema", "llguidance"]
    value: str | dict[str, Any]


def _grammar_kind(value: object) -> str:
    return "text" if isinstance(value, str) else "object"


GrammarField = Annotated[
    Annotated[str, Tag("text")] | Annotated[Grammar, Tag("object")], Discriminator(_grammar_kind)
]


Choices = Annotated[list[str], Field(min_length=1, max_length=1_000)]


class StructuredOutputs(WireRequest):
    """``structured_outputs`` as vLLM has it; one of its fields is given."""

    json_schema: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class ConstraintFields(WireRequest):
    """Extensions that bind the answer's text; at most one is given, and no format beside it."""

    grammar: GrammarField | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
