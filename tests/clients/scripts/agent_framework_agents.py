from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from report import KEY, MODEL, SUNNY, URL, WEATHER, get_weather, holds, step

CLIENTS = {"chat completions": OpenAIChatCompletionClient, "responses": OpenAIChatClient}

for name, client in CLIENTS.items():

    def agent(client: type = client) -> Agent:
        """A new agent: its client belongs to the event loop that used it first."""
        played = client(model=MODEL, base_url=f"{URL}/v1", api_key=KEY)
        return Agent(client=played, instructions="Be brief.", tools=[get_weather])

    @step(f"{name}: tool loop, session")
    def tools(agent: Callable[[], Agent] = agent) -> None:
        async def run() -> list[str]:
            one = agent()
            session = one.create_session()
            asked = (WEATHER, "SAY And more.")
            return [(await one.run(text, session=session)).text for text in asked]

        first, second = asyncio.run(run())
        holds(first, SUNNY)
        holds(second, "And more.")

    @step(f"{name}: stream")
    def stream(agent: Callable[[], Agent] = agent) -> None:
        async def run() -> str:
            return "".join([part.text async for part in agent().run(WEATHER, stream=True)])

        holds(asyncio.run(run()), SUNNY)
