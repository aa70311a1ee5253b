from __future__ import annotations

import json

import openai
from pydantic import BaseModel
from report import (
    KEY,
    MODEL,
    PERSON,
    PICTURE,
    SEEN,
    SMALL,
    SUNNY,
    URL,
    WEATHER,
    get_weather,
    holds,
    step,
)

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}


class Person(BaseModel):
    name: str
    age: int


@step("chat")
def chat() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for model in (MODEL, SMALL):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=20)
        assert answer.choices[0].message.content
        assert answer.usage.total_tokens > 0


@step("stream")
def stream() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with client.chat.completions.stream(model=SMALL, messages=messages, max_tokens=20) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
    assert text


@step("tool loop")
def tools() -> None:
    messages = [{"role": "user", "content": WEATHER}]
    offered = [{"type": "function", "function": FUNCTION}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=offered)
    message = answer.choices[0].message
    [call] = message.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=offered)
    holds(answer.choices[0].message.content, SUNNY)


@step("structured output")
def structured() -> None:
    messages = [{"role": "user", "content": PERSON}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ann", age=7)


@step("image")
def image() -> None:
    parts = [
        {"type": "text", "text": "SEE images"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
    ]
    messages = [{"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=MODEL, messages=messages)
    holds(answer.choices[0].message.content, SEEN)


@step("responses: stream, tool loop, state")
def responses() -> None:
    offered = [{"type": "function", **FUNCTION}]
    with client.responses.stream(model=MODEL, input=WEATHER, tools=offered) as events:
        first = events.until_done().get_final_response()
    [call] = [item for item in first.output if item.type == "function_call"]
    result = get_weather(**json.loads(call.arguments))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
    second = client.responses.create(
        model=MODEL, input=[output], previous_response_id=first.id, tools=offered
    )
    holds(second.output_text, SUNNY)
    assert client.responses.retrieve(second.id).output_text == second.output_text


@step("responses: compaction")
def compaction() -> None:
    first = client.responses.create(model=MODEL, input="word " * 1500)
    second = client.responses.create(
        model=MODEL,
        input="SAY After it.",
        previous_response_id=first.id,
        context_management=[{"type": "compaction", "compact_threshold": 1000}],
    )
    assert [item.type for item in second.output] == ["compaction", "message"]
    holds(second.output_text, "After it.")


@step("models")
def models() -> None:
    assert {MODEL, SMALL} <= {model.id for model in client.models.list()}
