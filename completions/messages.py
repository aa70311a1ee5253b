"""From the messages of a request to the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from completions.wire.messages import (
    AssistantMessage,
    Content,
    FunctionMessage,
    InstructionMessage,
    RequestMessage,
    TextPart,
    ToolMessage,
    UserMessage,
)
from inference_site.http.errors import InvalidRequestError
from worker.generation import Message, ToolCall


def to_messages(messages: Sequence[RequestMessage]) -> tuple[Message, ...]:
    """Return the turns, with the results of tools in the order of their calls.

    Raise InvalidRequestError for a result without its call and for a call without its result.
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
        turns.append(_turn(message, position))
        position += 1
        if isinstance(message, AssistantMessage) and message.tool_calls:
            results = _results(messages[position:])
            turns += _in_order_of_calls(message, results, position - 1)
            position += len(results)
    return tuple(turns)


def _turn(message: RequestMessage, position: int) -> Message:
    match message:
        case InstructionMessage():
            return Message("system", _text(message.content), name=message.name)
        case UserMessage():
            return Message("user", _text(message.content), name=message.name)
        case AssistantMessage():
            return _assistant(message, position)
        case FunctionMessage():
            return Message("tool", _text(message.content or ""), name=message.name)
        case ToolMessage():
            return Message("tool", _text(message.content), tool_call_id=message.tool_call_id)


def _assistant(message: AssistantMessage, position: int) -> Message:
    calls = tuple(
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    )
    if message.content is None and message.refusal is None and not calls:
        raise InvalidRequestError(
            "No content was provided, expected tool calls to be provided.",
            param=f"messages[{position}].content",
        )
    text = message.refusal if message.content is None else _text(message.content)
    return Message("assistant", text, name=message.name, tool_calls=calls)


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


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
    calls = message.tool_calls or []
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
    return [
        Message("tool", _text(given[call.id].content), call.function.name, (), call.id)
        for call in calls
    ]
