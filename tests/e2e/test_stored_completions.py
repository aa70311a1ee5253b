"""``store: true``: kept with the answer, listed, read, changed and deleted by its project alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.keys import make_key
from tests.served_stack import ServedStack


def script(*steps: dict[str, Any]) -> list[Any]:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "x"}]
    return [
        {"role": "system", "content": parts},
        {"role": "user", "content": json.dumps(steps), "name": "ann"},
    ]


def keep(client: openai.OpenAI, stream: bool = False, **fields: Any) -> str:
    """Make a stored completion; return its id."""
    answer: Any = client.chat.completions.create(
        model="scripted", messages=script({"text": "kept"}), store=True, stream=stream, **fields
    )
    ids = {chunk.id for chunk in answer} if stream else {answer.id}
    [completion_id] = ids
    return str(completion_id)


@pytest.mark.parametrize("stream", [False, True])
def test_completion_is_there_as_soon_as_its_client_has_it(
    client: openai.OpenAI, stream: bool
) -> None:
    kept = client.chat.completions.retrieve(keep(client, stream, metadata={"topic": "a"}))
    assert kept.choices[0].message.content == "kept"
    assert kept.choices[0].finish_reason == "stop"
    assert kept.usage is not None
    assert kept.usage.completion_tokens == 1
    assert kept.model_dump()["metadata"] == {"topic": "a"}


def test_character_that_the_database_cannot_hold_is_kept_as_another(
    client: openai.OpenAI,
) -> None:
    answer = client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "a\0b \\u0000"}],
        store=True,
        metadata={"k": "\0"},
    )
    assert answer.choices[0].message.content == "a\0b \\u0000"
    kept = client.chat.completions.retrieve(answer.id)
    assert kept.choices[0].message.content == "a\ufffdb \\u0000"
    assert kept.model_dump()["metadata"] == {"k": "\ufffd"}
    [message] = client.chat.completions.messages.list(answer.id)
    assert message.content == "a\ufffdb \\u0000"


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model="scripted", messages=script({"text": "x"}))
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(completion.id)


def test_failed_completion_is_not_stored(client: openai.OpenAI) -> None:
    before = {stored.id for stored in client.chat.completions.list(limit=100)}
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(
            model="scripted", messages=script({"text": "x"}, {"fail": "boom"}), store=True
        )
    assert {stored.id for stored in client.chat.completions.list(limit=100)} == before


def test_list_is_paged_ordered_and_filtered(client: openai.OpenAI) -> None:
    ids = [keep(client, metadata={"run": "list", "n": str(n)}) for n in range(5)]
    listed = client.chat.completions.list(metadata={"run": "list"}, limit=2)
    assert [stored.id for stored in listed.data] == ids[:2]
    assert listed.has_more
    assert [stored.id for stored in listed] == ids  # The SDK turns the pages.
    newest = client.chat.completions.list(metadata={"run": "list"}, order="desc")
    assert [stored.id for stored in newest] == ids[::-1]
    assert [s.id for s in client.chat.completions.list(metadata={"n": "3", "run": "list"})] == [
        ids[3]
    ]
    assert list(client.chat.completions.list(model="demo", metadata={"run": "list"})) == []


def test_messages_are_those_that_were_sent(client: openai.OpenAI) -> None:
    completion_id = keep(client)
    messages = list(client.chat.completions.messages.list(completion_id))
    assert [message.id for message in messages] == [f"{completion_id}-0", f"{completion_id}-1"]
    assert [str(message.role) for message in messages] == ["system", "user"]
    assert messages[0].content == "Be x"
    assert messages[0].model_dump()["content_parts"][1]["text"] == "x"
    assert messages[1].model_dump()["name"] == "ann"
    page = client.chat.completions.messages.list(completion_id, order="desc", limit=1)
    assert [message.id for message in page.data] == [f"{completion_id}-1"]
    assert page.has_more


def test_metadata_is_replaced(client: openai.OpenAI) -> None:
    completion_id = keep(client, metadata={"old": "1"})
    client.chat.completions.update(completion_id, metadata={"new": "2"})
    kept = client.chat.completions.retrieve(completion_id)
    assert kept.model_dump()["metadata"] == {"new": "2"}
    removed = client.chat.completions.update(completion_id, metadata=None)
    assert removed.model_dump()["metadata"] == {}


def test_metadata_of_a_completion_that_is_deleted_at_the_same_moment(client: openai.OpenAI) -> None:
    def change(completion_id: str) -> int:
        answer = client.chat.completions.with_raw_response
        try:
            return int(answer.update(completion_id, metadata={"new": "2"}).status_code)
        except openai.APIStatusError as exc:
            return exc.status_code

    with ThreadPoolExecutor(3) as threads:
        for _ in range(20):
            completion_id = keep(client)
            changes = [threads.submit(change, completion_id) for _ in range(2)]
            assert client.chat.completions.delete(completion_id).deleted
            assert {one.result() for one in changes} <= {200, 404}


def test_deleted_completion_is_gone(client: openai.OpenAI) -> None:
    completion_id = keep(client)
    deleted = client.chat.completions.delete(completion_id)
    assert (deleted.id, deleted.deleted) == (completion_id, True)
    assert deleted.object == "chat.completion.deleted"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(completion_id)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.delete(completion_id)


def test_other_project_sees_nothing_of_it(stack: ServedStack, client: openai.OpenAI) -> None:
    completion_id = keep(client)
    stranger = stack.client(make_key(stack).secret)
    assert list(stranger.chat.completions.list()) == []
    for attempt in (
        lambda: stranger.chat.completions.retrieve(completion_id),
        lambda: stranger.chat.completions.update(completion_id, metadata={"a": "b"}),
        lambda: stranger.chat.completions.delete(completion_id),
        lambda: stranger.chat.completions.messages.list(completion_id),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    with pytest.raises(openai.BadRequestError) as caught:
        stranger.chat.completions.list(after=completion_id)
    assert caught.value.param == "after"
    assert client.chat.completions.retrieve(completion_id).id == completion_id


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({"k" * 65: "v"}, "metadata"),
        ({"k": "v" * 513}, "metadata.k"),
        ({str(n): "v" for n in range(17)}, "metadata"),
        ({"k": 1}, "metadata.k"),
    ],
)
def test_metadata_has_limits(client: openai.OpenAI, metadata: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        keep(client, metadata=metadata)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 101}, {"order": "up"}])
def test_bad_page_is_400(client: openai.OpenAI, query: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.list(**query)
    assert caught.value.param == next(iter(query))
