from __future__ import annotations

import litellm
from report import KEY, MODEL, SMALL, URL, step

OPENAI = {"api_base": f"{URL}/v1", "api_key": KEY}
HELLO = [{"role": "user", "content": "Hello"}]


@step("chat")
def chat() -> None:
    for model in (MODEL, SMALL):
        told = litellm.completion(f"openai/{model}", HELLO, max_tokens=20, **OPENAI)
        assert told.choices[0].message.content


@step("stream")
def stream() -> None:
    pieces = litellm.completion(f"openai/{SMALL}", HELLO, max_tokens=20, stream=True, **OPENAI)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)


@step("responses")
def responses() -> None:
    assert litellm.responses(model=f"openai/{MODEL}", input="Hello", **OPENAI).output_text


@step("messages")
def messages() -> None:
    told = litellm.completion(f"anthropic/{MODEL}", HELLO, max_tokens=20, api_base=URL, api_key=KEY)
    assert told.choices[0].message.content


@step("text completion")
def text() -> None:
    told = litellm.text_completion(
        model=f"text-completion-openai/{SMALL}", prompt="Once", max_tokens=5, **OPENAI
    )
    assert told.choices[0].text
