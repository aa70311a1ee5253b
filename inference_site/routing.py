"""Routes of WebSockets."""

from __future__ import annotations

from typing import Any

from channels.generic.websocket import AsyncWebsocketConsumer
from channels.routing import URLRouter
from django.urls import path, re_path

from responses_api.views.socket import ResponsesConsumer


class UnroutedConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # Channels has no types.
    """Refuses the handshake of a WebSocket to any other path."""

    channel_layer_alias = "none"  # See ``ResponsesConsumer``.

    async def connect(self) -> None:
        """Close before accepting, which is a 403."""
        await self.close()


websockets: Any = URLRouter(
    [
        path("v1/responses", ResponsesConsumer.as_asgi()),
        re_path("", UnroutedConsumer.as_asgi()),
    ]
)
