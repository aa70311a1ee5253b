"""Routes of WebSockets."""

from __future__ import annotations

from typing import Any

from channels.routing import URLRouter
from django.urls import path, re_path

from inference_site.gateway.unrouted import UnroutedConsumer
from responses_api.views.socket import ResponsesConsumer

websockets: Any = URLRouter(
    [
        path("v1/responses", ResponsesConsumer.as_asgi()),
        re_path("", UnroutedConsumer.as_asgi()),
    ]
)
