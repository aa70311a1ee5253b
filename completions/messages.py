"""From the messages of a request to the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from completions.wire.messages import (
    AssistantMessage,
    FunctionMessage,
    InstructionMessage,
    RequestMessage,
    ToolMessage,
    UserMessage,
)
from completions.wire.tools import RequestCustomToolCall, RequestToolCall
from inference_site.domain.messages import Message, Part, Role, ToolCall
from inference_site.domain.request import custom_arguments
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.content import to_content
from inference_site.request_fields.wire.content import Content


def to_messages(messages: Sequence[RequestMessage]) -> tuple[Message, ...]:
    """Return the turns, with the results of tools in the order of their calls.

    Raise InvalidRequestError for a result without its call, and for a call without its result.
    """
    turns: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        if isinstance(message, ToolMessage):
            raise InvalidRequestError(
                "Invalid parameter: messages with role 'tool' must be a response to a preceding "
                "message with 'tool_calls'.",
                param=f"messages[{position}].role",
            )
        turns.append(_turn(message, position, turns))
        position += 1
        if isinstance(message, AssistantMessage) and message.tool_calls:
            results = _results(messages[position:])
            turns += _in_order_of_calls(message, results, position - 1)
            position += len(results)
    return tuple(turns)


def _turn(message: RequestMessage, position: int, before: Sequence[Message]) -> Message:
    where = f"messages[{position}].content"
    match message:
        case InstructionMessage():
            return _with("system", message.content, where, name=message.name)
        case UserMessage():
            return _with("user", message.content, where, name=message.name)
        case AssistantMessage():
            return _assistant(message, position)
        case FunctionMessage():
            call_id = _legacy_call_id(before)
            content = message.content or ""
            return _with("tool", content, where, name=message.name, tool_call_id=call_id)
        case ToolMessage():
            return _with("tool", message.content, where, tool_call_id=message.tool_call_id)


def _with(role: Role, content: Content, where: str, **rest: Any) -> Message:
    """Return the turn with this content: plain text, or parts when it has more."""
    text, parts = to_content(content, where)
    return Message(role, text, parts=parts, **rest)


def _legacy_call_id(before: Sequence[Message]) -> str | None:
    """Return the id of the call that the result of a function answers."""
    calls = before[-1].tool_calls if before else ()
    return calls[-1].id if calls else None


def _assistant(message: AssistantMessage, position: int) -> Message:
    calls = tuple(_call(call) for call in message.tool_calls or ())
    if message.function_call is not None:
        made = message.function_call
        calls = (*calls, ToolCall(f"call_{position}", made.name, made.arguments))
    if message.content is None and message.refusal is None and not calls:
        raise InvalidRequestError(
            "No content was provided, expected tool calls to be provided.",
            param=f"messages[{position}].content",
        )
    parts: tuple[Part, ...] = ()
    text = message.refusal
    if message.content is not None:
        text, parts = to_content(message.content, f"messages[{position}].content")
    return Message("assistant", text, name=message.name, tool_calls=calls, parts=parts)


def _call(call: RequestToolCall) -> ToolCall:
    if isinstance(call, RequestCustomToolCall):
        return ToolCall(call.id, call.custom.name, custom_arguments(call.custom.input))
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _results(messages: Sequence[RequestMessage]) -> list[ToolMessage]:
    """Return the tool messages at the beginning."""
    results = []
    for message in messages:
        if not isinstance(message, ToolMessage):
            break
        results.append(message)
    return results


def _in_order_of_calls(
    message: AssistantMessage, results: list[ToolMessage], position: int
) -> list[Message]:
    calls = [_call(call) for call in message.tool_calls or ()]
    given = {result.tool_call_id: result for result in results}
    unknown = given.keys() - {call.id for call in calls}
    if unknown:
        raise InvalidRequestError(
            f"No tool call found for the tool message with tool_call_id '{min(unknown)}'.",
            param="messages",
        )
    missing = [call.id for call in calls if call.id not in given]
    if missing:
        raise InvalidRequestError(
            "An assistant message with 'tool_calls' must be followed by tool messages responding "
            "to each 'tool_call_id'. The following tool_call_ids did not have response messages: "
            f"{', '.join(missing)}",
            param=f"messages[{position}].tool_calls",
        )
    places = {result.tool_call_id: position + 1 + i for i, result in enumerate(results)}
    return [
        _with(
            "tool",
            given[call.id].content,
            f"messages[{places[call.id]}].content",
            name=call.name,
            tool_call_id=call.id,
        )
        for call in calls
    ]
