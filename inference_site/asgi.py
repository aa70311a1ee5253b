"""The ASGI application: the relay for /v1 and streams of the console, WebSockets, and pages."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")

from channels.generic.websocket import AsyncWebsocketConsumer
from channels.routing import URLRouter
from django.core.asgi import get_asgi_application
from django.urls import path, re_path

_django: Any = get_asgi_application()

from inference_site.gateway.access import with_access_log  # noqa: E402  # Needs Django set up.
from inference_site.gateway.bodies import bounded_forms  # noqa: E402  # As above.
from inference_site.gateway.cors import with_cors  # noqa: E402  # As above.
from inference_site.gateway.delivery import Receive, Send  # noqa: E402  # As above.
from inference_site.gateway.head import read_head  # noqa: E402  # As above.
from inference_site.gateway.relay import Relay  # noqa: E402  # As above.
from responses_api.views.socket import ResponsesConsumer  # noqa: E402  # As above.

_RELAYED = (
    *("/v1/", "/api/", "/lora-adapters", "/infill", "/tokenize", "/detokenize"),
    *("/tokenizer_info", "/v2/rerank"),
    *("/health", "/version", "/metrics", "/console/"),
)
_relay, _pages = Relay(read_head), bounded_forms(_django)


class UnroutedConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # Channels has no types.
    """Refuses the handshake of a WebSocket to any other path."""

    channel_layer_alias = "none"  # See ``ResponsesConsumer``.

    async def connect(self) -> None:
        """Close before accepting, which is a 403."""
        await self.close()


_websockets: Any = URLRouter(
    [
        path("v1/responses", ResponsesConsumer.as_asgi()),
        re_path("", UnroutedConsumer.as_asgi()),
    ]
)


async def _route(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Route by protocol and path."""
    if scope["type"] == "websocket":
        await _websockets(scope, receive, send)
        return
    if scope["type"] != "http":
        raise ValueError(f"Unsupported protocol: {scope['type']}")
    is_api = scope["path"] == "/v1" or scope["path"].startswith(_RELAYED)
    await (_relay if is_api else _pages)(scope, receive, send)


application = with_access_log(with_cors(_route))
"""The application that the server runs."""
