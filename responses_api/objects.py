"""The response object, with every field in every state. Source: API reference, "Responses"."""

from __future__ import annotations

from typing import Any

from inference_site.domain.deltas import Usage
from responses_api.models import StoredResponse
from responses_api.tools import shown_tool
from responses_api.wire.request import JsonSchemaFormat, ResponseRequest

Object = dict[str, Any]


def shell(
    body: ResponseRequest,
    *,
    response_id: str,
    created_at: int,
    model: str,
    previous_response_id: str | None,
    conversation_id: str | None,
    metadata: dict[str, str],
) -> Object:
    """Return the object as it is before anything ran: in progress, without output."""
    text_format = _text_format(body)
    verbosity = body.text.verbosity if body.text else None
    reasoning = body.reasoning
    conversation = {} if conversation_id is None else {"conversation": {"id": conversation_id}}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "flex" if body.service_tier == "flex" else "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {
            "format": text_format,
            **({} if verbosity is None else {"verbosity": verbosity}),
        },
        "tool_choice": _tool_choice(body),
        "tools": [shown_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "metadata": metadata,
        **conversation,
        **({} if body.user is None else {"user": body.user}),
    }


def wire_usage(usage: Usage) -> Object:
    """Return the counts as responses tell them: cached ⊂ input, reasoning ⊂ output."""
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def stored_object(
    stored: StoredResponse, output: list[Object], status: str | None = None
) -> Object:
    """Return the object of a stored response.

    ``status`` is given for one that has not ended, whose generation knows it better.
    """
    found = shell(
        ResponseRequest.model_validate(stored.request),
        response_id=stored.public_id,
        created_at=int(stored.created_at.timestamp()),
        model=stored.model,
        previous_response_id=stored.previous.public_id if stored.previous else None,
        conversation_id=stored.conversation.public_id if stored.conversation else None,
        metadata=stored.metadata,
    )
    found["status"] = status or stored.status
    found["output"] = output
    found["usage"] = stored.usage
    if error := stored.error:
        found["error"] = {"code": error["code"] or error["type"], "message": error["message"]}
    if stored.completed_at:
        found["completed_at"] = int(stored.completed_at.timestamp())
    if stored.incomplete_reason:
        found["incomplete_details"] = {"reason": stored.incomplete_reason}
    return found


def _text_format(body: ResponseRequest) -> Object:
    given = body.text.format if body.text else None
    if given is None:
        return {"type": "text"}
    if isinstance(given, JsonSchemaFormat):
        return {
            "type": "json_schema",
            "name": given.name,
            "description": given.description,
            "schema": given.json_schema,
            "strict": bool(given.strict),
        }
    return {"type": given.type}


def _tool_choice(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump(mode="json")
