from __future__ import annotations

import asyncio

from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from report import KEY, MODEL, SUNNY, URL, WEATHER, get_weather, holds, step


async def ask(route: str, streaming: StreamingMode) -> str:
    """Return the last text of a run."""
    played = LiteLlm(model=f"{route}/{MODEL}", api_base=f"{URL}/v1", api_key=KEY)
    runner = InMemoryRunner(agent=Agent(name="a", model=played, tools=[get_weather]))
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="u")
    asked = types.Content(role="user", parts=[types.Part(text=WEATHER)])
    config = RunConfig(streaming_mode=streaming)
    said = ""
    async for event in runner.run_async(
        user_id="u", session_id=session.id, new_message=asked, run_config=config
    ):
        parts = (event.content and event.content.parts) or []
        said = "".join(part.text or "" for part in parts) or said
    return said


for name, route in (("chat completions", "openai"), ("responses", "openai/responses")):

    @step(f"{name}: tool loop")
    def tools(route: str = route) -> None:
        holds(asyncio.run(ask(route, StreamingMode.NONE)), SUNNY)

    @step(f"{name}: stream")
    def stream(route: str = route) -> None:
        holds(asyncio.run(ask(route, StreamingMode.SSE)), SUNNY)
