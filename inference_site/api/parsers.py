"""Request bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import orjson
from rest_framework.parsers import BaseParser

from inference_site.errors.api_errors import InvalidRequestError

_DEEPEST = 200
"""Levels of arrays and objects: orjson encodes 254, and what is made of a body is a bit deeper."""


class JsonParser(BaseParser):
    """JSON, and nothing else: another content type is a 415."""

    media_type = "application/json"

    def parse(self, stream: IO[bytes], media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the decoded body. Raise InvalidRequestError when it is no JSON, or too deep."""
        encoded = stream.read()
        try:
            body = orjson.loads(encoded)
        except orjson.JSONDecodeError as exc:
            raise InvalidRequestError(
                f"We could not parse the JSON body of your request. (The parser said: {exc}.)"
            ) from exc
        if encoded.count(b"[") + encoded.count(b"{") > _DEEPEST and is_too_deep(body):
            raise InvalidRequestError(
                f"The JSON body of your request is nested more than {_DEEPEST} levels deep."
            )
        return body


def is_too_deep(value: Any) -> bool:
    """Return whether arrays and objects are nested deeper than a body may be."""
    levels, layer = 0, [value]
    while layer := [inner for outer in layer for inner in _inside(outer)]:
        levels += 1
        if levels > _DEEPEST:
            return True
    return False


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
