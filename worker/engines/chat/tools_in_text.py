"""Tools for a model whose chat template has no place for them: they stand in the system text.

So do the calls and results of earlier turns, in the texts of their messages. How a call is to be
written is what ``worker.runtime.tool_calls`` reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from inference_site.domain.messages import Message, TextPart, ToolCall
from inference_site.domain.request import GenerationRequest, Tool

_INTRODUCTION = """\
You can call these functions, each described by a JSON object:

{tools}

To call a function, answer with nothing but a JSON object:
{{"name": "...", "arguments": {{...}}}}
{several} If no function is needed, answer as usual."""
_SEVERAL = "To call several, write one object on each line."
_ONE = "Call one function at most."


def with_tools_in_text(request: GenerationRequest) -> GenerationRequest:
    """Return the request with its tools, and all calls and results, in the texts of its messages.

    A call that is forced stays so, by what binds the answer.
    """
    messages = tuple(_plain_turns(request.messages))
    if not request.tools:
        return replace(request, messages=messages)
    several = _SEVERAL if request.parallel_tool_calls else _ONE
    text = _INTRODUCTION.format(tools="\n".join(map(_described, request.tools)), several=several)
    return replace(
        request,
        messages=_with_system_text(messages, text),
        tools=request.tools if request.must_call else (),
    )


def _described(tool: Tool) -> str:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return json.dumps({k: v for k, v in described.items() if v is not None}, ensure_ascii=False)


def _with_system_text(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Return the messages with this text at the end of the system's first one."""
    if not messages or messages[0].role != "system":
        return (Message("system", text), *messages)
    first = messages[0]
    if first.parts:
        return (replace(first, parts=(*first.parts, TextPart(f"\n\n{text}"))), *messages[1:])
    return (replace(first, text=f"{first.text or ''}\n\n{text}".lstrip()), *messages[1:])


def _plain_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages; the results of a turn's calls become one message of the user."""
    names: dict[str, str] = {}
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            name = names.get(message.tool_call_id or "", message.name or "a function")
            results.append(f"The result of {name}:\n{message.all_text}")
            continue
        if results:
            yield Message("user", "\n\n".join(results))
            results = []
        names |= {call.id: call.name for call in message.tool_calls}
        yield _without_calls(message) if message.tool_calls else message
    if results:
        yield Message("user", "\n\n".join(results))


def _without_calls(message: Message) -> Message:
    written = [text for text in (message.all_text, *map(_written, message.tool_calls)) if text]
    return replace(message, text="\n".join(written), parts=(), tool_calls=())


def _written(call: ToolCall) -> str:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
