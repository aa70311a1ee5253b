from __future__ import annotations

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from report import KEY, MODEL, PERSON, SUNNY, URL, WEATHER, get_weather, holds, step

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
CHAT = OpenAIChatModel(MODEL, provider=provider)


class Person(BaseModel):
    name: str
    age: int


@step("chat completions: tool loop")
def chat() -> None:
    holds(Agent(CHAT, tools=[get_weather]).run_sync(WEATHER).output, SUNNY)


@step("responses: tool loop")
def responses() -> None:
    model = OpenAIResponsesModel(MODEL, provider=provider)
    holds(Agent(model, tools=[get_weather]).run_sync(WEATHER).output, SUNNY)


@step("messages: tool loop")
def messages() -> None:
    client = AsyncAnthropic(base_url=URL, api_key=KEY)
    model = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
    holds(Agent(model, tools=[get_weather]).run_sync(WEATHER).output, SUNNY)


@step("structured output")
def structured() -> None:
    agent = Agent(CHAT, output_type=NativeOutput(Person))
    assert agent.run_sync(PERSON).output == Person(name="Ann", age=7)
