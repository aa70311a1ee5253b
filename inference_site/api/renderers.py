"""Response bodies: always JSON, whatever the Accept header says.

The SDKs send ``Accept: application/json`` for streams as well, and other clients send
``text/event-stream``; the body's ``stream`` decides, so nothing is negotiated and nothing is a 406.
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
    """Takes the first parser that reads the content type, and the only renderer."""

    def select_parser(self, request: Request, parsers: Iterable[Any]) -> Any:
        content_type = (request.content_type or "").partition(";")[0].strip().lower()
        return next((p for p in parsers if p.media_type == content_type), None)

    def select_renderer(
        self, request: Request, renderers: Iterable[Any], format_suffix: str | None = None
    ) -> tuple[Any, str]:
        renderer = next(iter(renderers))
        return renderer, renderer.media_type
