"""JSON request and response bodies: DRF's parsers, renderer and content negotiation.

Responses are always JSON, whatever the Accept header says, and there is no status 406. The field
``stream`` of the request decides whether a response streams: SDKs send ``Accept: application/json``
for streams too, and other clients ``text/event-stream``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import IO, Any

import orjson
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from inference_site.core.errors.api_errors import InvalidRequestError

_MAX_DEPTH = 200
"""Levels of arrays and objects. orjson encodes 254, and values made from a body are deeper."""
_ORJSON_MAX_DEPTH = 254
_MAX_VALUES = 1_000_000
_MAX_CONTAINERS = 30_000
"""Bounds on memory and time, independent of the body's bytes: a value takes up to 80 bytes, an
array or object up to 250, and validation takes microseconds for each."""
_STRING = re.compile(rb'"[^"]*"')
_NOT_COUNTED = bytes(set(range(256)) - set(b'"[{'))


class JsonParser(BaseParser):
    """Parses JSON; another content type is a 415."""

    media_type = "application/json"

    def parse(self, stream: IO[bytes], media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the decoded body. Raise InvalidRequestError as ``decode_json`` does."""
        return decode_json(stream.read())


class AnyJsonParser(JsonParser):
    """Parses JSON under any content type, as ``curl -d`` sends it."""

    media_type = "*/*"


def decode_json(encoded: bytes) -> Any:
    """Return the decoded body.

    Raise InvalidRequestError if it is not JSON, is nested too deeply, or has too many values.
    Commas inside texts count as values too: no model could read so many of them.
    """
    containers = require_bounded(encoded)
    try:
        value = orjson.loads(encoded)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequestError(
            f"We could not parse the JSON body of your request. (The parser said: {exc}.)"
        ) from exc
    if containers > _MAX_DEPTH and is_too_deep(value):
        raise InvalidRequestError(
            f"The JSON body of your request is nested more than {_MAX_DEPTH} levels deep."
        )
    return value


def require_bounded(encoded: bytes) -> int:
    """Return the number of arrays and objects, at least. Raise InvalidRequestError for too many."""
    containers = _count_containers(encoded)
    if _count_byte(encoded, b",") > _MAX_VALUES or containers > _MAX_CONTAINERS:
        raise InvalidRequestError(
            f"The body of your request holds more than {_MAX_VALUES} values, or more than "
            f"{_MAX_CONTAINERS} arrays and objects."
        )
    return containers


def _count_byte(encoded: bytes, byte: bytes) -> int:
    """Return ``encoded.count(byte)``, faster for long bodies in which the byte is rare.

    ``bytes.count`` takes 6 ms for 10 MB, with the GIL held; ``find`` takes a tenth of it.
    """
    if len(encoded) < 65_536:
        return encoded.count(byte)
    at = -1
    for number in range(500):
        at = encoded.find(byte, at + 1)
        if at < 0:
            return number
    return 500 + encoded.count(byte, at + 1)


def _count_containers(encoded: bytes) -> int:
    """Return the number of arrays and objects; up to the limit, brackets in texts count too."""
    brackets = _count_byte(encoded, b"[") + _count_byte(encoded, b"{")
    if brackets <= _MAX_CONTAINERS:
        return brackets
    # All bytes but quotes and brackets are removed first, which makes the regular expression fast.
    marks = encoded.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_COUNTED)
    outside_texts = _STRING.sub(b"", marks.replace(b'""', b""))
    return outside_texts.count(b"[") + outside_texts.count(b"{")


def is_too_deep(value: Any) -> bool:
    """Return whether arrays and objects are nested more than ``_MAX_DEPTH`` levels deep."""
    wrapped = value
    for _ in range(_ORJSON_MAX_DEPTH - _MAX_DEPTH):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)  # Takes a tenth of the time of the loop below.
        return False
    except orjson.JSONEncodeError:  # It also fails for values that are not JSON.
        layer = [value]
        for _ in range(_MAX_DEPTH + 1):
            layer = [
                inner
                for outer in layer
                if isinstance(outer, dict | list)
                for inner in (outer.values() if isinstance(outer, dict) else outer)
            ]
        return bool(layer)


class JsonRenderer(BaseRenderer):
    """Encodes bodies with orjson."""

    media_type = "application/json"
    format = "json"
    charset = None

    def render(self, data: Any, accepted_media_type: Any = None, context: Any = None) -> bytes:
        return b"" if data is None else orjson.dumps(data)


class AlwaysJson(BaseContentNegotiation):
    """Selects the parser by content type, and always the JSON renderer."""

    def select_parser(self, request: Request, parsers: Iterable[Any]) -> Any:
        content_type = (request.content_type or "").partition(";")[0].strip().lower()
        return next((p for p in parsers if p.media_type in (content_type, "*/*")), None)

    def select_renderer(
        self, request: Request, renderers: Iterable[Any], format_suffix: str | None = None
    ) -> tuple[Any, str]:
        renderer = next(iter(renderers))
        return renderer, renderer.media_type
