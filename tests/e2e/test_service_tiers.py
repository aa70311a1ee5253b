"""Service tiers: a key has a number of priority requests a minute; more are served as usual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.keys import make_budget, make_key
from tests.served_stack import ServedStack

PRIORITY, FOREGROUND, BACKGROUND = -5, 0, 10
HELLO: Any = [{"role": "user", "content": "hello"}]


def chat(client: openai.OpenAI, **fields: Any) -> tuple[str, str]:
    """The id of a completion and its tier."""
    made = client.chat.completions.create(model="scripted", messages=HELLO, **fields)
    return made.id, str(made.service_tier)


def stored_chat(client: openai.OpenAI, **fields: Any) -> tuple[str, str]:
    id_, _ = chat(client, store=True, **fields)
    return id_, str(client.chat.completions.retrieve(id_).service_tier)


def response(client: openai.OpenAI, **fields: Any) -> tuple[str, str]:
    made = client.responses.create(model="scripted", input="hello", **fields)
    kept = client.responses.retrieve(made.id)
    assert kept.service_tier == made.service_tier
    return made.id, str(made.service_tier)


@pytest.mark.parametrize("ask", [chat, stored_chat, response])
def test_priority_lasts_as_far_as_the_key_has_it(
    stack: ServedStack, ask: Callable[..., tuple[str, str]]
) -> None:
    key = make_key(stack, priority_requests_per_minute=2)
    client = stack.client(key.secret)
    tiers = [None, "auto", "priority", "fast", "priority", "flex", "default"]
    found = [ask(client, service_tier=tier) for tier in tiers]
    assert [tier for _, tier in found] == [
        *("default", "default", "priority", "priority", "default", "flex", "default")
    ]
    classes = [stack.row(id_)["service_class"] for id_, _ in found]
    assert classes == [0, 0, PRIORITY, PRIORITY, FOREGROUND, BACKGROUND, 0]


def test_response_in_the_background_has_no_priority(stack: ServedStack) -> None:
    key = make_key(stack, priority_requests_per_minute=1)
    client = stack.client(key.secret)
    made = client.responses.create(
        model="scripted", input="x", background=True, service_tier="priority"
    )
    assert made.service_tier == "default"
    assert stack.row(made.id)["service_class"] == BACKGROUND
    assert response(client, service_tier="priority")[1] == "priority"


def test_message_has_priority_unless_it_asks_for_none(stack: ServedStack) -> None:
    key = make_key(stack, priority_requests_per_minute=2)
    asked: Any = {"model": "scripted", "max_tokens": 50, "messages": HELLO}
    choices: list[Any] = [{"service_tier": "standard_only"}, {}, {"service_tier": "auto"}, {}]
    tiers = []
    with anthropic.Anthropic(base_url=stack.url, api_key=key.secret) as client:
        for more in choices:
            made = client.messages.create(**asked, **more)
            tiers.append(made.usage.service_tier)
            service_class = stack.row(made.id)["service_class"]
            assert service_class == (PRIORITY if tiers[-1] == "priority" else FOREGROUND)
    assert tiers == ["standard", "priority", "priority", "standard"]


def test_a_refused_request_takes_no_priority(stack: ServedStack) -> None:
    key = make_key(stack, priority_requests_per_minute=1)
    client = stack.client(key.secret).with_options(max_retries=0)
    make_budget(stack, key, 0, each="user")
    for _ in range(2):
        with pytest.raises(openai.RateLimitError, match="for each end user"):
            chat(client, service_tier="priority", user="ann")
    assert chat(client, service_tier="priority")[1] == "priority"


@pytest.mark.parametrize(
    "wrong",
    [
        {"tool_choice": {"type": "function", "name": "unknown"}},
        {"tools": [{"type": "file_search", "vector_store_ids": ["vs_unknown"]}]},
    ],
)
def test_a_request_with_a_wrong_field_takes_no_priority(
    stack: ServedStack, wrong: dict[str, Any]
) -> None:
    key = make_key(stack, priority_requests_per_minute=1)
    client = stack.client(key.secret)
    for _ in range(2):
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            response(client, service_tier="priority", **wrong)
    assert response(client, service_tier="priority")[1] == "priority"
