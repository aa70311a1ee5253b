"""Messages and tools as OpenAI's chat endpoint takes them."""

from __future__ import annotations

from typing import Any

import orjson

from worker.engines.base import InvalidRequest
from worker.generation import AudioPart, ImagePart, Message, Part, TextPart, Tool


def wire_message(message: Message, reasoning_field: str | None) -> dict[str, Any]:
    """Return a message; its reasoning only for a server that has a field for it."""
    wire: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.name is not None:
        wire["name"] = message.name
    if message.reasoning is not None and reasoning_field is not None:
        wire[reasoning_field] = message.reasoning
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return wire


def wire_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool."""
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _content(message: Message) -> str | list[dict[str, Any]] | None:
    return [_part(part) for part in message.parts] if message.parts else message.text


def _part(part: Part) -> dict[str, Any]:
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case ImagePart(url, param):
            if not url.startswith("data:"):
                # The server would fetch it itself, also from an internal host.
                raise InvalidRequest("The image was not fetched.", param)
            return {"type": "image_url", "image_url": {"url": url}}
        case AudioPart(audio, format_):
            return {"type": "input_audio", "input_audio": {"data": audio, "format": format_}}


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
