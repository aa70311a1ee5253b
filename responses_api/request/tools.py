"""From ``tools`` and ``tool_choice`` to the tools an engine is given, and those that are shown."""

from __future__ import annotations

from inference_site.domain import request as domain
from inference_site.domain.request import custom_tool
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.mapping import ToolPlan, only, to_grammar
from inference_site.request_fields.wire.tools import GrammarInput
from responses_api.wire.request import (
    AllowedTools,
    ContextFields,
    CustomTool,
    FunctionTool,
    HostedChoice,
    HostedTool,
    NamedTool,
    Tool,
)


def to_tool_plan(body: ContextFields) -> ToolPlan:
    """Return the plan. Raise InvalidRequestError for a choice of a tool that is not there.

    Tools of OpenAI's servers do not run here: the model does not see them, and cannot be forced to
    call one.
    """
    tools = tuple(_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedTool))
    match body.tool_choice:
        case "none":
            return ToolPlan()
        case "required":
            return ToolPlan(_some(tools), must_call=True)
        case NamedTool(name=name):
            return ToolPlan(only(tools, [name]), must_call=True)
        case AllowedTools(mode=mode, tools=allowed):
            names = [tool.name for tool in allowed if isinstance(tool, NamedTool)]
            chosen = only(tools, names)
            must_call = mode == "required"
            return ToolPlan(_some(chosen) if must_call else chosen, must_call)
        case HostedChoice(type=kind):
            raise InvalidRequestError(
                f"Invalid value for 'tool_choice': tools of the type '{kind}' do not run here.",
                param="tool_choice",
                code="unsupported_value",
            )
        case _:
            return ToolPlan(tools)


def hosted_tools(body: ContextFields) -> list[str]:
    """Return names for the tools that are left out, for a header of the answer."""
    return [f"tools.{tool.type}" for tool in body.tools or () if isinstance(tool, HostedTool)]


def _some(tools: tuple[domain.Tool, ...]) -> tuple[domain.Tool, ...]:
    if not tools:
        raise InvalidRequestError(
            "Invalid value for 'tool_choice': there is no tool that could be called.",
            param="tool_choice",
        )
    return tools


def _tool(tool: Tool) -> domain.Tool:
    match tool:
        case CustomTool():
            given = tool.format if isinstance(tool.format, GrammarInput) else None
            return custom_tool(tool.name, tool.description, to_grammar(given))
        case FunctionTool():
            is_strict, parameters = bool(tool.strict), tool.parameters or {}
            return domain.Tool(tool.name, tool.description, parameters, is_strict=is_strict)
        case HostedTool():
            raise TypeError("A hosted tool is not for a model.")
