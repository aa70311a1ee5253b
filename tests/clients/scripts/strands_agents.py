from __future__ import annotations

import asyncio
from collections.abc import Callable

from report import KEY, MODEL, SUNNY, URL, WEATHER, get_weather, holds, step
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

SITE = {"base_url": f"{URL}/v1", "api_key": KEY}


for name, model in (("chat completions", OpenAIModel), ("responses", OpenAIResponsesModel)):

    def agent(model: type = model) -> Agent:
        """A new agent: one keeps its conversation."""
        played = model(client_args=SITE, model_id=MODEL)
        return Agent(model=played, tools=[tool(get_weather)], callback_handler=None)

    @step(f"{name}: tool loop")
    def tools(agent: Callable[[], Agent] = agent) -> None:
        holds(str(agent()(WEATHER)), SUNNY)

    @step(f"{name}: stream")
    def stream(agent: Callable[[], Agent] = agent) -> None:
        async def run() -> str:
            return "".join([e.get("data", "") async for e in agent().stream_async(WEATHER)])

        holds(asyncio.run(run()), SUNNY)
