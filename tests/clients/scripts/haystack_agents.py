from __future__ import annotations

from haystack.components.agents import Agent
from haystack.components.generators.chat import (
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from report import KEY, MODEL, SUNNY, URL, WEATHER, get_weather, holds, step

ASKED = [ChatMessage.from_user(WEATHER)]
GENERATORS = {
    "chat completions": OpenAIChatGenerator,
    "responses": OpenAIResponsesChatGenerator,
}

for name, generator in GENERATORS.items():
    played = generator(model=MODEL, api_base_url=f"{URL}/v1", api_key=Secret.from_token(KEY))
    agent = Agent(chat_generator=played, tools=[create_tool_from_function(get_weather)])

    @step(f"{name}: tool loop")
    def tools(agent: Agent = agent) -> None:
        holds(agent.run(messages=ASKED)["messages"][-1].text, SUNNY)

    @step(f"{name}: stream")
    def stream(agent: Agent = agent) -> None:
        pieces = []
        agent.run(messages=ASKED, streaming_callback=lambda piece: pieces.append(piece.content))
        holds("".join(pieces), SUNNY)
