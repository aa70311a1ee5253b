"""From Ollama's requests to those of chat completions, completions and embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from completions.ollama import wire

_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_OF_LOAD = ("num_ctx",)
_IMAGE_TYPES = {"/9j/": "jpeg", "iVBOR": "png", "R0lGOD": "gif", "UklGR": "webp"}
"""How base64 of the sorts of images begins."""

Body = dict[str, Any]


def to_chat(body: wire.ChatRequest) -> Body:
    """Return the body of a chat completion."""
    messages = list(_messages(body.messages))
    tools = {"tools": body.tools} if body.tools else {}
    return {**_run(body), **_thinking(body), **_logprobs(body), "messages": messages, **tools}


def to_single_chat(body: wire.GenerateRequest) -> Body:
    """Return the body of a chat completion for a prompt that gets the template."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    prompt = {"role": "user", "content": _content(body.prompt, body.images)}
    asked = {**_run(body), **_thinking(body), **_logprobs(body)}
    return {**asked, "messages": [*system, prompt]}


def to_completion(body: wire.GenerateRequest) -> Body:
    """Return the body of a completion for a prompt that is continued as it is."""
    suffix: Body = {"suffix": body.suffix} if body.suffix else {}
    if body.logprobs:
        suffix["logprobs"] = body.top_logprobs or 0
    return {"max_tokens": 2**31 - 1, **_run(body), "prompt": body.prompt, **suffix}


def to_embedding(body: wire.EmbedRequest) -> Body:
    """Return the body of embeddings."""
    given = body.prompt if body.input is None else body.input
    dimensions = {} if body.dimensions is None else {"dimensions": body.dimensions}
    return {"model": body.model, "input": "" if given is None else given, **dimensions}


def _run(body: wire.ChatRequest | wire.GenerateRequest) -> Body:
    fields: Body = {"model": body.model}
    for name, value in (body.options or wire.Options()).model_dump(exclude_none=True).items():
        if name in wire.Options.model_fields and name not in _OF_LOAD:
            fields[_OPTIONS.get(name, name)] = value
    if fields.get("max_tokens", 1) < 1:  # Ollama's -1 and -2: as much as there is room for.
        del fields["max_tokens"]
    return {**fields, **_format(body.format)}


def _format(given: str | dict[str, Any]) -> Body:
    if not given:
        return {}
    if given == "json":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "answer", "schema": given}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _logprobs(body: wire.ChatRequest | wire.GenerateRequest) -> Body:
    return {"logprobs": True, "top_logprobs": body.top_logprobs} if body.logprobs else {}


def _thinking(body: wire.ChatRequest | wire.GenerateRequest) -> Body:
    match body.think:
        case None:
            return {}
        case bool(switch):
            return {"enable_thinking": switch}
        case effort:
            return {"reasoning_effort": effort}


def _messages(given: Sequence[wire.Message]) -> Iterator[Body]:
    """Yield the messages; calls get ids, and results those of the calls that they answer."""
    open_calls: list[tuple[str, str]] = []
    for position, message in enumerate(given):
        entry: Body = {
            "role": message.role,
            "content": _content(message.content, message.images),
        }
        if message.tool_calls:
            calls = [
                (f"call_{position}_{number}", call.function)
                for number, call in enumerate(message.tool_calls)
            ]
            open_calls = [(call_id, function.name) for call_id, function in calls]
            entry["tool_calls"] = [_call(call_id, function) for call_id, function in calls]
        elif message.role == "tool":
            entry["tool_call_id"] = message.tool_call_id or _answered(message, open_calls)
        yield entry


def _answered(message: wire.Message, open_calls: list[tuple[str, str]]) -> str:
    """Return the id of the first call of this tool that has no result, and note that it has."""
    names = [name for _, name in open_calls]
    if not names:
        return ""  # Refused as a result without its call.
    place = names.index(message.tool_name) if message.tool_name in names else 0
    return open_calls.pop(place)[0]


def _call(call_id: str, function: wire.CalledFunction) -> Body:
    called = {"name": function.name, "arguments": json.dumps(function.arguments)}
    return {"id": call_id, "type": "function", "function": called}


def _content(text: str, images: Sequence[str] | None) -> Any:
    if not images:
        return text
    parts: list[Body] = [{"type": "text", "text": text}] if text else []
    return parts + [
        {"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images
    ]


def _data_url(image: str) -> str:
    kind = next((kind for mark, kind in _IMAGE_TYPES.items() if image.startswith(mark)), "png")
    return f"data:image/{kind};base64,{image}"
