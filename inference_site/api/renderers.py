"""Rendering of response bodies: always JSON, without regard to the Accept header.

The field ``stream`` of the body decides whether an answer streams: SDKs send
``Accept: application/json`` for streams too, and other clients ``text/event-stream``. So there is
no content negotiation and no status 406.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request


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
