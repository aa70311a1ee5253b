from __future__ import annotations

from agno.agent import Agent
from agno.models.base import Model
from agno.models.openai import OpenAILike, OpenAIResponses
from pydantic import BaseModel
from report import KEY, MODEL, PERSON, SUNNY, URL, WEATHER, get_weather, holds, step


class Person(BaseModel):
    name: str
    age: int


for name, model in (("chat completions", OpenAILike), ("responses", OpenAIResponses)):
    played = model(id=MODEL, base_url=f"{URL}/v1", api_key=KEY)

    @step(f"{name}: tool loop")
    def tools(played: Model = played) -> None:
        holds(Agent(model=played, tools=[get_weather]).run(WEATHER).content, SUNNY)

    @step(f"{name}: stream")
    def stream(played: Model = played) -> None:
        events = Agent(model=played, tools=[get_weather]).run(WEATHER, stream=True)
        holds("".join(str(event.content or "") for event in events), SUNNY)

    @step(f"{name}: structured output")
    def structured(played: Model = played) -> None:
        answer = Agent(model=played, output_schema=Person).run(PERSON).content
        assert answer == Person(name="Ann", age=7), answer
