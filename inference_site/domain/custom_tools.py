"""Custom tools: tools that take one text instead of JSON.

A model knows functions only, so it is shown a function whose one argument is the text. What it
calls that function with is JSON again, which comes in pieces cut anywhere, and is turned back into
the pieces of the text.
"""

from __future__ import annotations

import json

from inference_site.domain.request import Constraint, Tool

_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_tool(name: str, description: str | None, grammar: Constraint | None = None) -> Tool:
    """Return the function that stands for a custom tool; the model is shown its grammar."""
    if grammar is not None:
        told = f"Its input is a text of this {grammar.kind} grammar:\n{grammar.source}"
        description = f"{description}\n\n{told}" if description else told
    return Tool(name, description, _SCHEMA, is_custom=True, grammar=grammar)


def custom_arguments(text: str) -> str:
    """Return the arguments that this text was in the call of such a function."""
    return json.dumps({"input": text}, ensure_ascii=False)
