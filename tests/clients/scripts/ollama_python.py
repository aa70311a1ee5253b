from __future__ import annotations

import ollama
from report import KEY, MODEL, SMALL, SUNNY, URL, WEATHER, get_weather, holds, step

client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})


@step("chat")
def chat() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    told = client.chat(SMALL, messages, options={"num_predict": 20})
    assert told.message.content


@step("stream")
def stream() -> None:
    pieces = client.generate(SMALL, "Hello", stream=True, options={"num_predict": 20})
    assert "".join(piece.response for piece in pieces)


@step("tool loop")
def tools() -> None:
    messages = [{"role": "user", "content": WEATHER}]
    message = client.chat(MODEL, messages, tools=[get_weather]).message
    [call] = message.tool_calls
    result = get_weather(**call.function.arguments)
    messages += [message, {"role": "tool", "tool_name": "get_weather", "content": result}]
    holds(client.chat(MODEL, messages, tools=[get_weather]).message.content, SUNNY)


@step("models")
def models() -> None:
    assert any(model.model.startswith(SMALL) for model in client.list().models)
    assert client.show(SMALL).details.family
