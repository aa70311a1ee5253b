"""From ``response_format`` and ``grammar`` of a chat to the one constraint an engine is given."""

from __future__ import annotations

import json

from completions.wire.chat import ChatCompletionRequest
from inference_site.domain.request import Constraint
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.constraint import from_grammar
from inference_site.request_fields.wire.constraint import (
    JsonObjectFormat,
    JsonSchemaFormat,
)


def to_constraint(body: ChatCompletionRequest) -> Constraint | None:
    """Return what the text must match, or None. Raise InvalidRequestError for two constraints."""
    formatted = _from_format(body)
    if body.grammar is None:
        return formatted
    if formatted is not None:
        raise InvalidRequestError(
            "Request `grammar` and `response_format` were both provided but are mutually "
            "exclusive.",
            param="grammar",
        )
    return from_grammar(body.grammar)


def _from_format(body: ChatCompletionRequest) -> Constraint | None:
    match body.response_format:
        case JsonObjectFormat():
            return Constraint("json_object", "", "response_format")
        case JsonSchemaFormat(json_schema=wanted):
            schema = json.dumps(wanted.json_schema)
            return Constraint("json_schema", schema, "response_format")
        case _:
            return None
