from __future__ import annotations

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from report import KEY, MODEL, SUNNY, URL, WEATHER, get_weather, holds, step


@step("tool loop")
def tools() -> None:
    model = LLM(model=f"openai/{MODEL}", base_url=f"{URL}/v1", api_key=KEY)
    agent = Agent(
        role="observer",
        goal="look",
        backstory="none",
        llm=model,
        tools=[tool("get_weather")(get_weather)],
    )
    task = Task(description=WEATHER, expected_output="the weather", agent=agent)
    holds(str(Crew(agents=[agent], tasks=[task]).kickoff()), SUNNY)
