"""From ``tools`` and ``tool_choice`` to the tools an engine is given."""

from __future__ import annotations

from dataclasses import dataclass

from completions.wire.chat import ChatCompletionRequest
from completions.wire.tools import AllowedToolsChoice, NamedTool
from inference_site.http.errors import InvalidRequestError
from worker.generation import Tool


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """Which tools the model sees, and whether it must call one of them."""

    tools: tuple[Tool, ...] = ()
    must_call: bool = False


def to_tool_plan(body: ChatCompletionRequest) -> ToolPlan:
    """Return the plan. Raise InvalidRequestError for a choice of a tool that is not there."""
    tools = tuple(
        Tool(tool.function.name, tool.function.description, tool.function.parameters or {})
        for tool in body.tools or ()
    )
    choice = body.tool_choice
    if choice is not None and choice != "none" and not tools:
        raise InvalidRequestError(
            "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are "
            "specified.",
            param="tool_choice",
        )
    match choice:
        case "none":
            return ToolPlan()
        case "required":
            return ToolPlan(tools, must_call=True)
        case NamedTool(function=function):
            return ToolPlan(_only(tools, [function.name]), must_call=True)
        case AllowedToolsChoice(allowed_tools=allowed):
            names = [tool.function.name for tool in allowed.tools]
            return ToolPlan(_only(tools, names), must_call=allowed.mode == "required")
        case _:
            return ToolPlan(tools)


def _only(tools: tuple[Tool, ...], names: list[str]) -> tuple[Tool, ...]:
    """Return the named tools; a model that does not see the others cannot call them."""
    known = {tool.name for tool in tools}
    if missing := [name for name in names if name not in known]:
        raise InvalidRequestError(
            f"Invalid value for 'tool_choice': there is no tool named '{missing[0]}' in 'tools'.",
            param="tool_choice",
        )
    return tuple(tool for tool in tools if tool.name in names)
