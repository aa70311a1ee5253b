"""Messages and tools in the form of OpenAI's chat endpoint, which templates and servers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inference_site.domain.errors import InvalidRequest
from inference_site.domain.messages import AudioPart, ImagePart, Message, Part, TextPart
from inference_site.domain.request import Tool


def wire_message(
    message: Message,
    content: Any,
    arguments: Callable[[str], Any],
    reasoning_field: str | None = "reasoning_content",
) -> dict[str, Any]:
    """Return a message with this content.

    ``arguments`` turns the text of a call's arguments into what the reader takes. Reasoning is left
    out for one that has no field for it.
    """
    wire: dict[str, Any] = {"role": message.role, "content": content}
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
                "function": {"name": call.name, "arguments": arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return wire


def wire_part(part: Part) -> dict[str, Any]:
    """Return a part of a content. Raise InvalidRequest for an image that was not fetched."""
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case ImagePart(url, param):
            if not url.startswith("data:"):
                # Who reads it would fetch it itself, also from an internal host.
                raise InvalidRequest("The image was not fetched.", param)
            return {"type": "image_url", "image_url": {"url": url}}
        case AudioPart(audio, format_):
            return {"type": "input_audio", "input_audio": {"data": audio, "format": format_}}


def wire_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool, its keys in the order in which llama.cpp shows them to templates."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters
    return {"type": "function", "function": function}
