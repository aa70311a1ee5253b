"""The model of the runs of real clients: a server that reads its script from the prompt.

The newest user message with such lines is the script, one line for each turn of the model:

    CALL get_weather {"city": "Oslo"}     a call of the shortest offered name that ends so
    SAY The answer, or {"a": "JSON"}      a text; one in quotes is JSON
    SEE images                            the sizes of all images of the request

After the last line the model repeats the result of its last call, or says ``GREETING``. A prompt
that is longer than its context is refused in the words of vLLM.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from typing import Any

from PIL import Image

from tests.upstream_server import Talk

GREETING = "Hello from the model."
CONTEXT_LENGTH, _TOKEN_CHARACTERS = 65_536, 4
_LINE = re.compile(r"^\s*(CALL|SAY|SEE) (.+?)\s*$", re.MULTILINE)

Body = dict[str, Any]


def play(talk: Talk) -> None:
    """Answer a chat completion."""
    tokens = len(json.dumps(talk.body["messages"])) // _TOKEN_CHARACTERS
    if tokens > CONTEXT_LENGTH:
        said = f"This model's maximum context length is {CONTEXT_LENGTH} tokens. However, your "
        said += (
            f"request has {tokens} input tokens. Please reduce the length of the input messages."
        )
        talk.say(400, {"error": {"message": said, "type": "BadRequestError", "param": None}})
        return
    message = _turn(talk.body)
    finish = "tool_calls" if "tool_calls" in message else "stop"
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    common = {"id": "chatcmpl-1", "created": 1, "model": "played"}
    if not talk.body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish}
        talk.say(200, {**common, "object": "chat.completion", "choices": [choice], "usage": usage})
        return
    talk.begin()
    common["object"] = "chat.completion.chunk"
    for delta in _deltas(message):
        talk.event({**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    talk.event({**common, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    talk.event({**common, "choices": [], "usage": usage})
    talk.send(b"data: [DONE]\n\n")
    talk.end()


def _turn(body: Body) -> Body:
    messages = body["messages"]
    begun, script = _script(messages)
    turns = sum(message["role"] == "assistant" for message in messages[begun:])
    if turns >= len(script):
        results = [_text(m) for m in messages[begun:] if m["role"] == "tool"]
        return _said(f"The tool said: {results[-1]}" if results else GREETING)
    what, rest = script[turns]
    if what == "SAY":
        return _said(json.loads(rest) if rest.startswith('"') else rest)
    if what == "SEE":
        return _said(f"I see {' and '.join(_images(messages)) or 'no image'}.")
    name, _, arguments = rest.partition(" ")
    offered = [tool["function"]["name"] for tool in body.get("tools") or ()]
    named = next((tool for tool in sorted(offered, key=len) if tool.endswith(name)), None)
    if named is None:
        return _said(f"There is no tool {name}; offered are: {', '.join(offered)}.")
    if arguments:  # An agent may put words of its own behind the prompt.
        arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
    call = {"name": named, "arguments": arguments or "{}"}
    id_ = f"call_{len(messages)}"
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id_, "type": "function", "function": call}],
    }


def _script(messages: list[Body]) -> tuple[int, list[tuple[str, str]]]:
    """Return the place after the message with the script, and its lines."""
    for place in reversed(range(len(messages))):
        if messages[place]["role"] == "user" and (found := _LINE.findall(_text(messages[place]))):
            return place + 1, found
    return 0, []


def _text(message: Body) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content)


def _images(messages: list[Body]) -> Iterator[str]:
    """Yield the sizes of the images."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] == "image_url":
                data = part["image_url"]["url"].partition(",")[2]
                width, height = Image.open(io.BytesIO(base64.b64decode(data))).size
                yield f"{width} x {height}"


def _said(text: str) -> Body:
    return {"role": "assistant", "content": text}


def _deltas(message: Body) -> Iterator[Body]:
    yield {"role": "assistant", "content": ""}
    for piece in re.findall(r"\s*\S+|\s+$", message["content"] or ""):
        yield {"content": piece}
    for call in message.get("tool_calls", ()):
        yield {"tool_calls": [{"index": 0, **call}]}
