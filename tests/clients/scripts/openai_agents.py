from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolSearchTool,
    function_tool,
    set_tracing_disabled,
)
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI
from report import KEY, MODEL, SUNNY, URL, WEATHER, get_weather, holds, step

set_tracing_disabled(True)


def site() -> AsyncOpenAI:
    """A new client: one belongs to the event loop that used it first."""
    return AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)


def model() -> OpenAIResponsesModel:
    return OpenAIResponsesModel(MODEL, site())


@step("responses: tool loop")
def responses() -> None:
    agent = Agent(name="a", model=model(), tools=[function_tool(get_weather)])
    holds(Runner.run_sync(agent, WEATHER).final_output, SUNNY)


@step("responses: stream")
def stream() -> None:
    async def run() -> str:
        agent = Agent(name="a", model=model(), tools=[function_tool(get_weather)])
        result = Runner.run_streamed(agent, WEATHER)
        async for _ in result.stream_events():
            pass
        return result.final_output

    holds(asyncio.run(run()), SUNNY)


@step("responses: tool search")
def tool_search() -> None:
    search = 'Please look.\nCALL tool_search {"paths": ["get_weather"]}\nSAY Found.'
    hidden = function_tool(get_weather, defer_loading=True)
    agent = Agent(name="a", model=model(), tools=[ToolSearchTool(), hidden])
    first = Runner.run_sync(agent, search)
    holds(first.final_output, "Found.")
    # The client sends the items of the search back; the function is loaded then.
    again = [*first.to_input_list(), {"role": "user", "content": WEATHER}]
    holds(Runner.run_sync(agent, again).final_output, SUNNY)


@step("chat completions: tool loop")
def chat() -> None:
    completions = OpenAIChatCompletionsModel(MODEL, site())
    agent = Agent(name="a", model=completions, tools=[function_tool(get_weather)])
    holds(Runner.run_sync(agent, WEATHER).final_output, SUNNY)


@step("MCP tool")
def mcp() -> None:
    async def run() -> str:
        server = str(Path(__file__).with_name("weather_server.py"))
        started = {"command": sys.executable, "args": [server], "env": dict(os.environ)}
        async with MCPServerStdio(params=started) as weather:
            agent = Agent(name="a", model=model(), mcp_servers=[weather])
            return (await Runner.run(agent, WEATHER)).final_output

    holds(asyncio.run(run()), SUNNY)
