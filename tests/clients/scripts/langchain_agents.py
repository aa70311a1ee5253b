from __future__ import annotations

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from report import KEY, MODEL, PERSON, SMALL, SUNNY, URL, WEATHER, get_weather, holds, step

CHAT = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY)


def asked(model: object) -> str:
    """What an agent of LangGraph says in the end."""
    agent = create_agent(model, tools=[get_weather])
    result = agent.invoke({"messages": [{"role": "user", "content": WEATHER}]})
    return str(result["messages"][-1].content)


@step("stream")
def stream() -> None:
    small = ChatOpenAI(model=SMALL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=20)
    assert "".join(chunk.content for chunk in small.stream("Hello"))


@step("chat completions: tool loop")
def chat() -> None:
    holds(asked(CHAT), SUNNY)


@step("responses: tool loop")
def responses() -> None:
    model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, use_responses_api=True)
    holds(asked(model), SUNNY)


@step("messages: tool loop")
def messages() -> None:
    holds(asked(ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=100)), SUNNY)


@step("structured output")
def structured() -> None:
    schema = {
        "title": "person",
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    }
    told = CHAT.with_structured_output(schema, method="json_schema").invoke(PERSON)
    assert told == {"name": "Ann", "age": 7}
