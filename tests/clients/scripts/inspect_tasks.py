from __future__ import annotations

import asyncio
from collections.abc import Callable

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel
from report import KEY, MODEL, PERSON, SMALL, SUNNY, URL, WEATHER, step

APIS = {
    "chat completions": ("openai-api/site", {"base_url": f"{URL}/v1"}),
    "responses": ("openai", {"base_url": f"{URL}/v1", "responses_api": True}),
    "messages": ("anthropic", {"base_url": URL}),
}


class Person(BaseModel):
    name: str
    age: int


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: The name of the city.
        """
        return f"sunny in {city}"

    return execute


for api, (provider, more) in APIS.items():

    def connected(name: str, provider: str = provider, more: dict = more) -> Model:
        return get_model(f"{provider}/{name}", api_key=KEY, memoize=False, **more)

    @step(f"{api}: case with a tool")
    def case(connected: Callable[[str], Model] = connected) -> None:
        solver = [use_tools(get_weather()), generate()]
        task = Task([Sample(WEATHER, target=SUNNY)], solver=solver, scorer=includes())
        [log] = eval(task, model=connected(MODEL), display="none", log_dir="logs")
        assert log.status == "success", log.error
        assert log.results.scores[0].metrics["accuracy"].value == 1, log.samples[0].output

    @step(f"{api}: structured output")
    def structured(connected: Callable[[str], Model] = connected) -> None:
        schema = ResponseSchema(name="person", json_schema=json_schema(Person))
        config = GenerateConfig(response_schema=schema)
        answer = asyncio.run(connected(MODEL).generate(PERSON, config=config))
        assert Person.model_validate_json(answer.completion) == Person(name="Ann", age=7)

    @step(f"{api}: prompt that is too long")
    def too_long(connected: Callable[[str], Model] = connected) -> None:
        answer = asyncio.run(connected(SMALL).generate("word " * 20_000))
        assert answer.stop_reason == "model_length", answer.stop_reason
