from __future__ import annotations

import asyncio

from browser_use.llm import ChatAnthropic, ChatOpenAI
from browser_use.llm.base import BaseChatModel
from browser_use.llm.messages import (
    ContentPartImageParam,
    ContentPartTextParam,
    ImageURL,
    UserMessage,
)
from pydantic import BaseModel
from report import KEY, MODEL, PICTURE, SEEN, SMALL, URL, holds, step


class Person(BaseModel):
    name: str
    age: int


def openai(model: str) -> BaseChatModel:
    return ChatOpenAI(model=model, base_url=f"{URL}/v1", api_key=KEY)


def anthropic(model: str) -> BaseChatModel:
    return ChatAnthropic(model=model, base_url=URL, api_key=KEY)


for api, connected in (("chat completions", openai), ("messages", anthropic)):

    @step(f"{api}: structured output of a small model")
    def structured(connected: type = connected) -> None:
        asked = [UserMessage(content="Ann is 7 years old.")]
        answer = asyncio.run(connected(SMALL).ainvoke(asked, output_format=Person))
        assert isinstance(answer.completion, Person), answer
        assert answer.usage.total_tokens > 0

    @step(f"{api}: screenshot")
    def image(connected: type = connected) -> None:
        url = ImageURL(url=f"data:image/png;base64,{PICTURE}", media_type="image/png")
        parts = [ContentPartTextParam(text="SEE images"), ContentPartImageParam(image_url=url)]
        holds(asyncio.run(connected(MODEL).ainvoke([UserMessage(content=parts)])).completion, SEEN)
