"""Messages as OpenAI-compatible servers take them."""

from __future__ import annotations

from typing import Any

import orjson

from inference_site.domain.messages import Message
from worker.engines.chat.wire import wire_message, wire_part


def server_message(message: Message, reasoning_field: str | None) -> dict[str, Any]:
    """Return a message; its reasoning only for a server that has a field for it."""
    content = [wire_part(part) for part in message.parts] if message.parts else message.text
    return wire_message(message, content, _arguments, reasoning_field)


def _arguments(text: str) -> str:
    """Return arguments that any server can read: what is no JSON object becomes one.

    Servers parse the calls of the history; one malformed call must not end a conversation.
    """
    try:
        if isinstance(orjson.loads(text), dict):
            return text
    except orjson.JSONDecodeError:
        pass
    return orjson.dumps({"input": text} if text else {}).decode()
