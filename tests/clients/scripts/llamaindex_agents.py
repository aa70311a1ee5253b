from __future__ import annotations

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from report import KEY, MODEL, SMALL, SUNNY, URL, WEATHER, get_weather, holds, step

SITE = {"api_base": f"{URL}/v1", "api_key": KEY, "is_chat_model": True}


@step("chat")
def chat() -> None:
    small = OpenAILike(model=SMALL, max_tokens=20, **SITE)
    assert small.chat([ChatMessage(role="user", content="Hello")]).message.content


@step("stream")
def stream() -> None:
    small = OpenAILike(model=SMALL, max_tokens=20, **SITE)
    assert "".join(piece.delta for piece in small.stream_complete("Hello"))


@step("tool loop")
def tools() -> None:
    async def run() -> str:
        played = OpenAILike(model=MODEL, is_function_calling_model=True, **SITE)
        return str(await FunctionAgent(tools=[get_weather], llm=played).run(WEATHER))

    holds(asyncio.run(run()), SUNNY)
