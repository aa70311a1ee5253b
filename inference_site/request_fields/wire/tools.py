"""Fields of tools that chat completions and responses share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from inference_site.api.payload import WireRequest
from inference_site.request_fields.wire.shapes import flat_tool, nested_tool

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class TextInput(WireRequest):
    """``format`` of a custom tool that takes any text."""

    type: Literal["text"]


class GrammarDefinition(WireRequest):
    """A grammar of what a custom tool takes: llguidance's Lark, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str


class GrammarInput(GrammarDefinition):
    """``format`` of a custom tool of responses that takes texts of a grammar."""

    type: Literal["grammar"]


class NestedGrammarInput(WireRequest):
    """The same of chats."""

    type: Literal["grammar"]
    grammar: GrammarDefinition


CustomFormat = Annotated[
    TextInput | GrammarInput, Field(discriminator="type"), BeforeValidator(flat_tool)
]
NestedCustomFormat = Annotated[
    TextInput | NestedGrammarInput, Field(discriminator="type"), BeforeValidator(nested_tool)
]
