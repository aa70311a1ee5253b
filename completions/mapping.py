"""From a chat completion on the wire to the domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from completions.messages import to_messages
from completions.wire.chat import ChatCompletionRequest
from completions.wire.tools import (
    AllowedToolsChoice,
    CustomTool,
    FunctionDefinition,
    NamedCustomTool,
    NamedFunctionTool,
    RequestTool,
)
from inference_site.domain.messages import Message
from inference_site.domain.request import GenerationRequest, Tool, custom_tool
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.capabilities import (
    require_fields,
    require_grammars,
    require_media,
)
from inference_site.request_fields.constraint import (
    of_response_format,
    text_constraint,
    to_constraint,
)
from inference_site.request_fields.mapping import (
    ToolPlan,
    only,
    require_stream_for_options,
    to_choices,
    to_grammar,
    to_reasoning_budget,
    to_sampled_request,
    to_stop,
    to_template_vars,
    with_token_report,
)
from inference_site.request_fields.wire.tools import NestedGrammarInput
from inference_site.submission.model_access import ResolvedModel


def to_generation_request(body: ChatCompletionRequest, model: ResolvedModel) -> GenerationRequest:
    """Return what the engine is asked. Raise InvalidRequestError for fields that contradict."""
    require_stream_for_options(body.stream_options, body.stream)
    _refuse_sound(body)
    plan = to_tool_plan(body)
    constraint = to_constraint(body, of_response_format(body.response_format))
    require_fields(model, "chat", body, () if plan.tools else ("tools", "functions"))
    require_grammars(model, plan.tools)
    messages = to_messages(body.messages)
    require_media(model, messages)
    prefix = _response_prefix(body, plan)
    template_vars = _template_vars(body)
    if not prefix and _continues(body, messages, model):
        if plan.must_call or constraint is not None:
            raise InvalidRequestError(
                "Invalid 'messages': the last message is of the assistant and would be continued, "
                "but an answer that must be a call or must match a format cannot be. With "
                "'add_generation_prompt': true it is a new turn.",
                param="messages",
            )
        messages, last = messages[:-1], messages[-1]
        prefix = last.all_text
        # The thoughts are over where the text has begun.
        template_vars["enable_thinking"] = False
    asked = replace(
        to_sampled_request(body, model.spec),
        messages=messages,
        max_output_tokens=_max_output_tokens(body),
        stop=to_stop(body.stop),
        choices=to_choices(body.n, model.spec),
        top_logprobs=_top_logprobs(body),
        constraint=text_constraint(constraint, plan),
        template_vars=template_vars,
        prompt_template=body.prompt_template or "",
        reasoning_budget=to_reasoning_budget(body.reasoning_budget, body.thinking_token_budget),
        tools=plan.tools,
        must_call=plan.must_call,
        parallel_tool_calls=body.parallel_tool_calls is not False and not plan.is_legacy,
        response_prefix=prefix,
        add_generation_prompt=bool(prefix) or body.add_generation_prompt is not False,
        truncate=bool(body.truncate_sequence),
        return_progress=bool(body.stream and body.return_progress),
        running_usage=bool(body.stream_options and body.stream_options.continuous_usage),
    )
    return with_token_report(asked, body, stream=bool(body.stream))


def _refuse_sound(body: ChatCompletionRequest) -> None:
    """Refuse an answer that is spoken: one that is only written would not be what was asked for."""
    param = "modalities" if "audio" in (body.modalities or ()) else "audio"
    if param == "modalities" or body.audio is not None:
        raise InvalidRequestError(
            f"Unsupported parameter: '{param}': answers are text, no model here speaks.",
            param=param,
            code="unsupported_parameter",
        )


def _template_vars(body: ChatCompletionRequest) -> dict[str, Any]:
    switches = {
        "enable_thinking": body.enable_thinking,
        "reasoning_effort": body.reasoning_effort,
        "verbosity": body.verbosity,
    }
    return to_template_vars(switches, body.chat_template_kwargs, body.template_vars)


def _response_prefix(body: ChatCompletionRequest, plan: ToolPlan) -> str:
    if not body.response_prefix:
        return ""
    if plan.must_call:
        raise InvalidRequestError(
            "Invalid 'response_prefix': an answer that must be a call has none.",
            param="response_prefix",
        )
    if body.add_generation_prompt is False:
        raise InvalidRequestError(
            "Invalid 'response_prefix': it needs 'add_generation_prompt'.", param="response_prefix"
        )
    return body.response_prefix


def _continues(
    body: ChatCompletionRequest, messages: Sequence[Message], model: ResolvedModel
) -> bool:
    """Whether the answer goes on with the last message, as llama-server and vLLM have it.

    Where the server of a model cannot be told, it does as it does.
    """
    wanted = body.continue_final_message
    if wanted is False or (wanted is None and body.add_generation_prompt):
        return False
    *before, last = messages
    can = bool(before) and last.role == "assistant" and not last.tool_calls and bool(last.all_text)
    if wanted and (body.add_generation_prompt or not can):
        why = (
            "it needs a text of the assistant as the last message"
            if not can
            else "it cannot be used together with 'add_generation_prompt'"
        )
        raise InvalidRequestError(
            f"Invalid 'continue_final_message': {why}.", param="continue_final_message"
        )
    return can and "response_prefix" in model.capabilities


def _top_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError(
            "Invalid 'top_logprobs': it is only allowed when 'logprobs' is true.",
            param="top_logprobs",
        )
    return body.top_logprobs or 0 if body.logprobs else None


def _max_output_tokens(body: ChatCompletionRequest) -> int | None:
    """The newer field wins when both are given."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


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
        given = tool.custom.format
        grammar = given.grammar if isinstance(given, NestedGrammarInput) else None
        return custom_tool(tool.custom.name, tool.custom.description, to_grammar(grammar))
    return _function(tool.function)


def _function(function: FunctionDefinition) -> Tool:
    is_strict = bool(function.strict)
    parameters = function.parameters or {}
    return Tool(function.name, function.description, parameters, is_strict=is_strict)


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
