"""The response object, with every field in every state. Source: API reference, "Responses"."""

from __future__ import annotations

from typing import Any

from inference_site.domain.deltas import Usage
from responses_api.wire.request import (
    CustomTool,
    FunctionTool,
    HostedTool,
    JsonSchemaFormat,
    ResponseRequest,
    Tool,
)
from responses_api.wire.response import (
    ConversationId,
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningEcho,
    ResponseObject,
    ResponseUsage,
    TextEcho,
)


def new_response(
    body: ResponseRequest,
    *,
    response_id: str,
    created_at: int,
    model: str,
    previous_response_id: str | None,
    conversation_id: str | None,
    metadata: dict[str, str],
) -> ResponseObject:
    """Return the object as it is before anything ran: in progress, without output."""
    reasoning = body.reasoning
    return ResponseObject(
        id=response_id,
        created_at=created_at,
        completed_at=None,
        status="in_progress",
        background=bool(body.background),
        error=None,
        incomplete_details=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningEcho(
            effort=reasoning.effort if reasoning else None,
            summary=reasoning.summary if reasoning else None,
        ),
        safety_identifier=body.safety_identifier,
        service_tier="flex" if body.service_tier == "flex" else "default",
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=TextEcho(
            format=_text_format(body), verbosity=body.text.verbosity if body.text else None
        ),
        tool_choice=_tool_choice(body),
        tools=[shown_tool(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        truncation=body.truncation or "disabled",
        usage=None,
        metadata=metadata,
        conversation=None if conversation_id is None else ConversationId(id=conversation_id),
        user=body.user,
    )


def response_usage(usage: Usage) -> ResponseUsage:
    """Return the counts as responses have them: cached ⊂ input, reasoning ⊂ output."""
    return ResponseUsage(
        input_tokens=usage.input_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.cached_tokens, cache_write_tokens=0
        ),
        output_tokens=usage.output_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.input_tokens + usage.output_tokens,
    )


def _text_format(body: ResponseRequest) -> dict[str, Any]:
    given = body.text.format if body.text else None
    if given is None:
        return {"type": "text"}
    if isinstance(given, JsonSchemaFormat):
        return {
            "type": "json_schema",
            "name": given.name,
            # Open Responses demands the field, and OpenAI's document allows no null.
            "description": given.description or "",
            "schema": given.json_schema,
            "strict": bool(given.strict),
        }
    return {"type": given.type}


def _tool_choice(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump(mode="json")


def shown_tool(tool: Tool) -> dict[str, Any]:
    """Return the tool as the response shows it: all fields of a function, null when unset."""
    match tool:
        case FunctionTool():
            return {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict is not False,
            }
        case CustomTool():
            described = {} if tool.description is None else {"description": tool.description}
            form = {"type": "text"} if tool.format is None else tool.format.model_dump(mode="json")
            return {"type": "custom", "name": tool.name, **described, "format": form}
        case HostedTool():
            return tool.model_dump(mode="json")
