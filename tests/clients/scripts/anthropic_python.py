from __future__ import annotations

import anthropic
from report import (
    KEY,
    MODEL,
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

client = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None)
HELLO = [{"role": "user", "content": "Hello"}]


@step("chat")
def chat() -> None:
    for model in (MODEL, SMALL):
        answer = client.messages.create(model=model, messages=HELLO, max_tokens=20)
        assert answer.content[0].text


@step("stream")
def stream() -> None:
    with client.messages.stream(model=SMALL, messages=HELLO, max_tokens=20) as events:
        assert "".join(events.text_stream)


@step("tool loop")
def tools() -> None:
    messages = [{"role": "user", "content": WEATHER}]
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=messages, tools=[anthropic.beta_tool(get_weather)]
    )
    holds(runner.until_done().content[0].text, SUNNY)


@step("image")
def image() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "SEE images"}]
    messages = [{"role": "user", "content": parts}]
    answer = client.messages.create(model=MODEL, messages=messages, max_tokens=20)
    holds(answer.content[0].text, SEEN)


@step("count tokens")
def count() -> None:
    assert client.messages.count_tokens(model=SMALL, messages=HELLO).input_tokens > 1


@step("models")
def models() -> None:
    assert {MODEL, SMALL} <= {model.id for model in client.models.list()}
