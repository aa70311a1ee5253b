from __future__ import annotations

import asyncio

from ag2 import Agent
from ag2.config import OpenAIConfig, OpenAIResponsesConfig
from report import KEY, MODEL, SUNNY, URL, WEATHER, get_weather, holds, step

CONFIGS = {"chat completions": OpenAIConfig, "responses": OpenAIResponsesConfig}


async def ask(config: type, *, streaming: bool) -> str | None:
    """What an agent says in the end."""
    played = config(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, streaming=streaming)
    return (await Agent("a", config=played, tools=[get_weather]).ask(WEATHER)).body


for name, config in CONFIGS.items():

    @step(f"{name}: tool loop")
    def tools(config: type = config) -> None:
        holds(asyncio.run(ask(config, streaming=False)), SUNNY)

    @step(f"{name}: stream")
    def stream(config: type = config) -> None:
        holds(asyncio.run(ask(config, streaming=True)), SUNNY)
