"""Webhooks of a project, as the official client verifies them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from inference_site.outbox.models import new_secret
from tests.e2e.keys import MadeKey, make_key
from tests.e2e.scripts import ENDLESS, script
from tests.e2e.test_batches import begin, chat, ended, says
from tests.notice_receivers import Hook, receiver
from tests.served_stack import ServedStack
from tests.waiting import wait_until


@pytest.fixture
def hook() -> Iterator[Hook]:
    with receiver() as running:
        yield running


@pytest.fixture
def key(stack: ServedStack) -> MadeKey:
    return make_key(stack)


@pytest.fixture
def owner(stack: ServedStack, key: MadeKey) -> Iterator[openai.OpenAI]:
    with stack.client(key.secret) as client:
        yield client


@pytest.fixture
def secret(stack: ServedStack, key: MadeKey, hook: Hook) -> Iterator[str]:
    """The secret of an endpoint of the key's project."""
    made = new_secret()
    stack.sql(
        "INSERT INTO outbox_endpoint (project_id, way, address, event_types, secret, old_secret,"
        " is_enabled, failures) VALUES (%s, 'webhook', %s, '{}', %s, '', true, 0)",
        key.project_id,
        hook.url,
        made,
    )
    yield made
    stack.sql("DELETE FROM outbox_message")
    stack.sql("DELETE FROM outbox_endpoint")


def events(owner: openai.OpenAI, secret: str, hook: Hook, count: int) -> list[Any]:
    """What was posted, unwrapped by the client."""
    wait_until(lambda: len(hook.posted) >= count)
    return [
        owner.webhooks.unwrap(body.decode(), headers, secret=secret)
        for headers, body in hook.posted
    ]


def test_background_responses_tell_of_their_ends(
    owner: openai.OpenAI, secret: str, hook: Hook
) -> None:
    def respond(text: str, **fields: Any) -> Any:
        return owner.responses.create(model="scripted", input=text, **fields).id

    respond(says("nobody is told of those that a client waits for"))
    done = respond(says("yes"), background=True)
    failed = respond(script({"fail": "it breaks"}), background=True)
    cut = respond(script({"text": "half"}, {"finish": "length"}), background=True)
    running = respond(ENDLESS, background=True)
    owner.responses.cancel(running)
    told = {event.data.id: event.type for event in events(owner, secret, hook, 4)}
    assert told == {
        done: "response.completed",
        failed: "response.failed",
        cut: "response.incomplete",
        running: "response.cancelled",
    }


def test_batches_tell_of_their_ends(owner: openai.OpenAI, secret: str, hook: Hook) -> None:
    good = begin(owner, [chat("one", says("x"))]).id
    bad = begin(owner, ["{"]).id
    assert ended(owner, good).status == "completed"
    assert ended(owner, bad).status == "failed"
    told = {event.data.id: event.type for event in events(owner, secret, hook, 2)}
    assert told == {good: "batch.completed", bad: "batch.failed"}


def test_a_wrong_secret_verifies_nothing(owner: openai.OpenAI, secret: str, hook: Hook) -> None:
    owner.responses.create(model="scripted", input=says("yes"), background=True)
    wait_until(lambda: hook.posted)
    headers, body = hook.posted[0]
    with pytest.raises(openai.InvalidWebhookSignatureError):
        owner.webhooks.unwrap(body.decode(), headers, secret=new_secret())


def test_another_projects_events_are_not_told(
    client: openai.OpenAI, owner: openai.OpenAI, secret: str, hook: Hook
) -> None:
    client.responses.create(model="scripted", input=says("theirs"), background=True)
    own = owner.responses.create(model="scripted", input=says("own"), background=True).id
    assert [event.data.id for event in events(owner, secret, hook, 1)] == [own]
