"""The shapes in which tools and parts of contents come: chat's, which nests, and that of responses.

Clients send one where the other is meant. Each function takes what it knows to the shape of its
name, and leaves everything else as it is, for the wire models to refuse.
"""

from __future__ import annotations

from typing import Any

_TOOLS = ("function", "custom")
_FILE = ("file_data", "file_id", "filename")
_TEXTS = ("input_text", "output_text")


def flat_tool(tool: Any) -> Any:
    """Return ``{"type": "function", "function": {…}}`` as a tool of responses.

    So it does with ``tool_choice``, with ``allowed_tools`` and with the format of a custom tool.
    """
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    nested = tool.get(kind) if kind in (*_TOOLS, "allowed_tools", "grammar") else None
    if not isinstance(nested, dict):
        return tool
    return {**{key: value for key, value in tool.items() if key != kind}, **nested, "type": kind}


def nested_tool(tool: Any) -> Any:
    """Return ``{"type": "function", "name": …}`` as a tool of chats, like ``flat_tool``."""
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    known = {"allowed_tools": "mode", "grammar": "definition"}.get(str(kind), "name")
    if kind not in (*_TOOLS, "allowed_tools", "grammar") or kind in tool or known not in tool:
        return tool
    return {"type": kind, kind: {key: value for key, value in tool.items() if key != "type"}}


def response_part(part: Any) -> Any:
    """Return a part of a content as responses have it."""
    match part:
        case {"type": _}:
            pass
        case {"text": str()}:
            return {**part, "type": "input_text"}
    match part:
        case {"type": "image_url" | "input_image", "image_url": {"url": url, **rest}}:
            return {**rest, "type": "input_image", "image_url": url}
        case {"type": "image_url", "image_url": str()}:
            return {**part, "type": "input_image"}
        case {"type": "file", "file": {**file}}:
            return {**file, "type": "input_file"}
        case _:
            return part


def chat_part(part: Any) -> Any:
    """Return a part of a content as chats have it."""
    match part:
        case {"type": str(kind), "text": text} if kind in _TEXTS:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            detail = {"detail": part["detail"]} if part.get("detail") else {}
            return {"type": "image_url", "image_url": {"url": url, **detail}}
        case {"type": "image_url", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "input_file"}:
            return {"type": "file", "file": {key: part[key] for key in _FILE if key in part}}
        case {"type": _}:
            return part
        case {"text": str()}:
            return {**part, "type": "text"}
        case _:
            return part
