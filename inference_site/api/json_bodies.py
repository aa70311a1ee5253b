"""Request bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import IO, Any

import orjson
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from inference_site.errors.api_errors import InvalidRequestError

_DEEPEST = 200
"""Levels of arrays and objects: orjson encodes 254, and what is made of a body is a bit deeper."""
_ORJSON_LEVELS = 254
_MOST_VALUES = 1_000_000
_MOST_CONTAINERS = 30_000
"""Bounds on what a body becomes: a value takes up to 80 bytes of memory and an array or object up
to 250, however few bytes it has in the body, and a microsecond and several to be checked."""
_LONG, _FEW = 65_536, 500
"""Bytes of a long body, and marks in it that are searched for one by one."""
_STRING = re.compile(rb'"[^"]*"')
_NOT_COUNTED = bytes(set(range(256)) - set(b'"[{'))


class JsonParser(BaseParser):
    """JSON, and nothing else: another content type is a 415."""

    media_type = "application/json"

    def parse(self, stream: IO[bytes], media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the decoded body. Raise InvalidRequestError: see ``decoded_json``."""
        return decoded_json(stream.read())


class AnyJsonParser(JsonParser):
    """JSON under any content type, as ``curl -d`` sends it."""

    media_type = "*/*"


def decoded_json(encoded: bytes) -> Any:
    """Return the decoded body.

    Raise InvalidRequestError when it is no JSON, is too deep, or has too many values. Commas and
    brackets in its texts count as values, which no model could read that many of; they do not
    count as arrays and objects.
    """
    containers = _containers(encoded)
    if _count(encoded, b",") > _MOST_VALUES or containers > _MOST_CONTAINERS:
        raise InvalidRequestError(
            f"The JSON body of your request holds more than {_MOST_VALUES} values, or more than "
            f"{_MOST_CONTAINERS} arrays and objects."
        )
    try:
        value = orjson.loads(encoded)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequestError(
            f"We could not parse the JSON body of your request. (The parser said: {exc}.)"
        ) from exc
    if containers > _DEEPEST and is_too_deep(value):
        raise InvalidRequestError(
            f"The JSON body of your request is nested more than {_DEEPEST} levels deep."
        )
    return value


def _count(encoded: bytes, mark: bytes) -> int:
    """Return how often there is this mark, like ``bytes.count``.

    That looks at each byte, 6 ms for 10 MB, while Python runs nothing else; a search for the few
    marks of a long text takes a tenth.
    """
    if len(encoded) < _LONG:
        return encoded.count(mark)
    at = -1
    for found in range(_FEW):
        at = encoded.find(mark, at + 1)
        if at < 0:
            return found
    return _FEW + encoded.count(mark, at + 1)


def _containers(encoded: bytes) -> int:
    """Return how many arrays and objects there are; more, if they are few."""
    most = _count(encoded, b"[") + _count(encoded, b"{")
    if most <= _MOST_CONTAINERS:
        return most
    # Only quotes and brackets are left, and most texts are two quotes then: a tenth of the time.
    marks = encoded.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_COUNTED)
    bare = _STRING.sub(b"", marks.replace(b'""', b""))
    return bare.count(b"[") + bare.count(b"{")


def is_too_deep(value: Any) -> bool:
    """Return whether arrays and objects are nested deeper than a body may be."""
    wrapped = value
    for _ in range(_ORJSON_LEVELS - _DEEPEST):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)  # A tenth of the time of a walk, which decides when this fails.
    except orjson.JSONEncodeError:
        return _is_deeper_than(value, _DEEPEST)
    return False


def _is_deeper_than(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels + 1):
        layer = [inner for outer in layer for inner in _inside(outer)]
    return bool(layer)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class JsonRenderer(BaseRenderer):
    """Encodes with orjson."""

    media_type = "application/json"
    format = "json"
    charset = None

    def render(self, data: Any, accepted_media_type: Any = None, context: Any = None) -> bytes:
        return b"" if data is None else orjson.dumps(data)


class AlwaysJson(BaseContentNegotiation):
    """Selects the first parser for the content type, and the only renderer."""

    def select_parser(self, request: Request, parsers: Iterable[Any]) -> Any:
        content_type = (request.content_type or "").partition(";")[0].strip().lower()
        return next((p for p in parsers if p.media_type in (content_type, "*/*")), None)

    def select_renderer(
        self, request: Request, renderers: Iterable[Any], format_suffix: str | None = None
    ) -> tuple[Any, str]:
        renderer = next(iter(renderers))
        return renderer, renderer.media_type
