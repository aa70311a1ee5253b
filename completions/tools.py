"""From ``tools`` and ``tool_choice``, or what they were before, to the tools an engine is given."""

from __future__ import annotations

from completions.wire.chat import ChatCompletionRequest
from completions.wire.tools import (
    AllowedToolsChoice,
    CustomTool,
    FunctionDefinition,
    NamedCustomTool,
    NamedFunctionTool,
    RequestTool,
)
from inference_site.domain.custom_tools import custom_tool
from inference_site.domain.request import Tool
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.tools import ToolPlan, only


def to_tool_plan(body: ChatCompletionRequest) -> ToolPlan:
    """Return the plan. Raise InvalidRequestError for a choice of a tool that is not there."""
    if body.functions is not None or body.function_call is not None:
        return _legacy_plan(body)
    tools = tuple(to_tool(tool) for tool in body.tools or ())
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
        case NamedFunctionTool() | NamedCustomTool():
            return ToolPlan(only(tools, [choice.name]), must_call=True)
        case AllowedToolsChoice(allowed_tools=allowed):
            names = [tool.name for tool in allowed.tools]
            return ToolPlan(only(tools, names), must_call=allowed.mode == "required")
        case _:
            return ToolPlan(tools)


def to_tool(tool: RequestTool) -> Tool:
    """Return the tool as the model sees it."""
    if isinstance(tool, CustomTool):
        return custom_tool(tool.custom.name, tool.custom.description)
    return _function(tool.function)


def _function(function: FunctionDefinition) -> Tool:
    return Tool(function.name, function.description, function.parameters or {})


def _legacy_plan(body: ChatCompletionRequest) -> ToolPlan:
    if body.tools is not None or body.tool_choice is not None:
        raise InvalidRequestError(
            "Invalid 'functions': it cannot be used together with 'tools'.", param="functions"
        )
    if body.functions is None:
        raise InvalidRequestError(
            "Invalid 'function_call': it is only allowed when 'functions' are specified.",
            param="function_call",
        )
    tools = tuple(_function(function) for function in body.functions)
    match body.function_call:
        case "none":
            return ToolPlan(is_legacy=True)
        case "auto" | None:
            return ToolPlan(tools, is_legacy=True)
        case named:
            tools = only(tools, [named.name], "function_call", "functions")
            return ToolPlan(tools, must_call=True, is_legacy=True)
