from __future__ import annotations

import asyncio

from openai import AsyncOpenAI
from pydantic import BaseModel
from report import KEY, MODEL, PERSON, SUNNY, URL, WEATHER, get_weather, holds, step
from semantic_kernel.agents import Agent, ChatCompletionAgent, OpenAIResponsesAgent
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Person(BaseModel):
    name: str
    age: int


class Weather:
    get_weather = staticmethod(kernel_function(get_weather))


def connected() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)


def service() -> OpenAIChatCompletion:
    return OpenAIChatCompletion(ai_model_id=MODEL, async_client=connected())


def chats() -> Agent:
    return ChatCompletionAgent(service=service(), plugins=[Weather()])


def responds() -> Agent:
    # With stored responses it sends the prompt again behind each result: the played model would
    # begin again.
    return OpenAIResponsesAgent(
        ai_model_id=MODEL,
        client=connected(),
        name="a",
        plugins=[Weather()],
        store_enabled=False,
    )


for api, made in (("chat completions", chats), ("responses", responds)):

    @step(f"{api}: tool loop")
    def tools(made: type = made) -> None:
        async def ask() -> str:
            return str(await made().get_response(WEATHER))

        holds(asyncio.run(ask()), SUNNY)

    @step(f"{api}: stream")
    def stream(made: type = made) -> None:
        async def ask() -> str:
            return "".join([str(part.content) async for part in made().invoke_stream(WEATHER)])

        holds(asyncio.run(ask()), SUNNY)


@step("chat completions: structured output")
def structured() -> None:
    async def ask() -> str:
        history = ChatHistory()
        history.add_user_message(PERSON)
        settings = OpenAIChatPromptExecutionSettings(response_format=Person)
        return str(await service().get_chat_message_content(history, settings))

    assert Person.model_validate_json(asyncio.run(ask())) == Person(name="Ann", age=7)


@step("responses: structured output, conversation")
def conversation() -> None:
    async def ask() -> str:
        form = OpenAIResponsesAgent.configure_response_format(Person)
        agent = OpenAIResponsesAgent(ai_model_id=MODEL, client=connected(), name="a", text=form)
        first = await agent.get_response("SAY {}")
        return str(await agent.get_response(PERSON, thread=first.thread))

    assert Person.model_validate_json(asyncio.run(ask())) == Person(name="Ann", age=7)
