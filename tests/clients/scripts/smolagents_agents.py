from __future__ import annotations

from report import KEY, MODEL, SUNNY, URL, WEATHER, get_weather, holds, step
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

FINAL = f'{WEATHER}\nCALL final_answer {{"answer": "{SUNNY}"}}'


@step("tool loop")
def tools() -> None:
    model = OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(get_weather)], model=model, verbosity_level=0)
    holds(str(agent.run(FINAL, max_steps=4)), SUNNY)
