"""The client's tools of a request, which blocks of its messages add and remove.

Source: the types of Anthropic's client, "BetaRequestToolAdditionBlockParam". The model is shown the
tools that are in force at the end of the messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from completions.anthropic import wire
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import shown_name


def client_tools(body: wire.Prompt) -> list[tuple[str, wire.RequestTool]]:
    """Return the client's tools that the model may call after all changes, with their paths.

    Raise InvalidRequestError for a change of a tool that is none of the client's.
    """
    defined = defined_tools(body)
    given = [
        (f"tools.{position}", tool)
        for position, tool in enumerate(body.tools or ())
        if isinstance(tool, wire.RequestTool) and tool.name not in defined
    ]
    known, removed = {tool.name for _, tool in given} | defined.keys(), set[str]()
    for place, block in _tool_changes(body):
        if isinstance(block.tool, wire.ToolDefinition):
            removed.discard(block.tool.definition.name)
            continue
        name = block.tool.name
        if name not in known:
            raise InvalidRequestError(
                f"{place}.tool.name: the client has no tool named '{shown_name(name)}'.",
                param=f"{place}.tool.name",
            )
        (removed.add if isinstance(block, wire.ToolRemovalBlock) else removed.discard)(name)
    return [(path, tool) for path, tool in (*given, *defined.values()) if tool.name not in removed]


def defined_tools(body: wire.Prompt) -> dict[str, tuple[str, wire.RequestTool]]:
    """Return the client's tools that messages define, by their names, with their paths."""
    return {
        block.tool.definition.name: (f"{place}.tool.definition", block.tool.definition)
        for place, block in _tool_changes(body)
        if isinstance(block.tool, wire.ToolDefinition)
    }


def _tool_changes(
    body: wire.Prompt,
) -> Iterator[tuple[str, wire.ToolAdditionBlock | wire.ToolRemovalBlock]]:
    for position, message in enumerate(body.messages):
        if message.role != "system":
            continue
        for number, block in enumerate(message.content):
            if isinstance(block, wire.ToolAdditionBlock | wire.ToolRemovalBlock):
                yield f"messages.{position}.content.{number}", block
