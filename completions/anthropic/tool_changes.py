"""The client's tools of a request, which blocks of its messages find, add and remove.

Source: the types of Anthropic's client, "BetaRequestToolAdditionBlockParam"; its API guide, "Tool
search tool". The model is shown the tools that are in force at the end of the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from completions.anthropic import wire
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import shown_name

PlacedTool = tuple[str, wire.RequestTool]
"""A tool of the client's, after its path in the request."""


def client_tools(body: wire.Prompt) -> list[PlacedTool]:
    """Return the client's tools that the model may call after all changes, with their paths.

    Raise InvalidRequestError for a change of a tool that is none of the client's.
    """
    defined = defined_tools(body)
    given = [
        (f"tools.{position}", tool)
        for position, tool in enumerate(body.tools or ())
        if isinstance(tool, wire.RequestTool)
    ]
    removed = _not_found(body, [tool for _, tool in given])
    known = {tool.name for _, tool in given} | defined.keys()
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
    first = (one for one in given if one[1].name not in defined)
    return [one for one in (*first, *defined.values()) if one[1].name not in removed]


def _not_found(body: wire.Prompt, tools: Sequence[wire.RequestTool]) -> set[str]:
    """Return the names of those tools with ``defer_loading`` that no result of a search names.

    Without another tool the model could not search, and a search of Anthropic's does not run here:
    then all tools are shown.
    """
    deferred = {tool.name for tool in tools if tool.defer_loading}
    does_search = any((tool.type or "").startswith("tool_search_tool_") for tool in tools)
    if does_search or not 0 < len(deferred) < len(tools):
        return set()
    found = {
        reference.tool_name
        for message in body.messages
        for block in _blocks(message)
        if isinstance(block, wire.ToolResultBlock) and isinstance(block.content, list)
        for reference in block.content
        if isinstance(reference, wire.ToolReferenceBlock)
    }
    return deferred - found - {body.tool_choice and body.tool_choice.name}


def defined_tools(body: wire.Prompt) -> dict[str, PlacedTool]:
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
        for number, block in enumerate(_blocks(message)):
            if isinstance(block, wire.ToolAdditionBlock | wire.ToolRemovalBlock):
                yield f"messages.{position}.content.{number}", block


def _blocks(message: wire.RequestMessage) -> Sequence[wire.RequestBlock]:
    return () if isinstance(message.content, str) else message.content
