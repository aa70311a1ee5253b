"""What the scripted model is told, and how its streams are read as they are on the wire."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import openai

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CUSTOM: Any = {"type": "custom", "name": "run"}


def script(*steps: dict[str, Any]) -> str:
    """The input that makes the scripted model play these steps."""
    return json.dumps(steps)


def call(name: str, *pieces: str) -> dict[str, Any]:
    """The step of a call."""
    return {"tool_call": {"name": name, "arguments": list(pieces)}}


def slow(words: int, delay_ms: int = 20) -> str:
    """The input that makes it say so many words, one at a time."""
    return script({"repeat": words, "steps": [{"text": "x "}, {"sleep_ms": delay_ms}]})


ENDLESS = slow(4000)


def dicts(items: Iterable[openai.BaseModel]) -> list[Any]:
    """Items as they are on the wire."""
    return [item.to_dict() for item in items]


def respond(client: openai.OpenAI, *steps: dict[str, Any], **fields: Any) -> Any:
    """Create a response of the scripted model that plays these steps."""
    return client.responses.create(model="scripted", input=script(*steps), **fields)


def frames(response: httpx.Response) -> list[str]:
    """The frames of a stream, without the comments."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.read()
    text = "".join(response.iter_text())
    return [frame for frame in text.split("\n\n")[:-1] if not frame.startswith(":")]


def events(raw: list[str]) -> list[dict[str, Any]]:
    """The events of frames."""
    found = [frame.partition("data: ")[2] for frame in raw]
    return [json.loads(data) for data in found if data != "[DONE]"]


def types(raw: list[str]) -> list[str]:
    """The types of the events of frames, without their common beginning."""
    return [event["type"].removeprefix("response.") for event in events(raw)]


def stream_raw(http: httpx.Client, **body: Any) -> list[str]:
    """The frames of a response that is created and streamed."""
    body = {"model": "scripted", "stream": True, **body}
    with http.stream("POST", "/v1/responses", json=body) as response:
        return frames(response)


def replay_raw(http: httpx.Client, response_id: str, after: int | None = None) -> list[str]:
    """The frames of a stored response's stream, from the one after this number on."""
    params = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    with http.stream("GET", f"/v1/responses/{response_id}", params=params) as response:
        assert response.status_code == 200, response.read()
        return frames(response)
