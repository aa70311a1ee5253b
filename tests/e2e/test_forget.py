"""``manage.py forget``: nothing of an end user is left in PostgreSQL, in Redis or on the disk."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.keys import make_key
from tests.served_stack import ServedStack
from tests.waiting import wait_until

SECRET = "Zwetschgenkuchen"
"""A word that only the forgotten user says."""


def places_with(stack: ServedStack, word: str) -> Iterator[str]:
    """Where the word is: tables, keys of Redis, files."""
    tables = stack.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    for (table,) in tables:
        like = f'SELECT count(*) FROM "{table}" row WHERE row::text ILIKE %s'  # noqa: S608
        if stack.sql(like, f"%{word}%")[0][0]:
            yield f"table {table}"
    with stack.redis() as client:
        for key in client.scan_iter(count=1000):
            if word.encode() in (client.dump(key) or b""):
                yield f"key {key!r}"
    found = subprocess.run(
        ["grep", "-rlI", word, str(stack.data_dir)],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    for path in found.stdout.splitlines():
        if "postgres" not in Path(path).parts and "pg_wal" not in path:
            yield f"file {path}"


def say(client: openai.OpenAI, text: Any, **fields: Any) -> Any:
    return client.responses.create(model="scripted", input=text, **fields)


def test_nothing_of_a_forgotten_user_is_left(stack: ServedStack) -> None:
    key = make_key(stack)
    client = stack.client(key.secret)
    theirs: dict[str, Any] = {"safety_identifier": "user-to-forget"}
    first = say(client, f"{SECRET} one", **theirs)
    say(client, f"{SECRET} two", previous_response_id=first.id, **theirs)
    own = client.conversations.create(metadata={"topic": "cake"})
    say(client, f"{SECRET} three", conversation=own.id, **theirs)
    shared = client.conversations.create()
    say(client, f"{SECRET} four", conversation=shared.id, **theirs)
    other = say(client, "Plum tart", conversation=shared.id, safety_identifier="somebody-else")
    named = client.conversations.create(
        metadata={"user_id": "user-to-forget"},
        items=[{"type": "message", "role": "user", "content": f"{SECRET} five"}],
    )
    message: Any = {"role": "user", "content": f"{SECRET} six"}
    client.chat.completions.create(model="scripted", messages=[message], store=True, **theirs)
    client.chat.completions.create(
        model="scripted",
        messages=[message],
        user="user-to-forget",
        extra_headers={"Idempotency-Key": "forget-me"},
    )
    wait_until(
        lambda: (
            not stack.sql(
                "SELECT 1 FROM generations_generation WHERE end_user = %s AND finished_at IS NULL",
                "user-to-forget",
            )
        )
    )
    assert "table responses_api_item" in set(places_with(stack, SECRET))
    usage = stack.sql(
        "SELECT count(*), sum(input_tokens) FROM generations_generation WHERE project_id = %s",
        key.project_id,
    )

    report = stack.manage("forget", "--user", "user-to-forget")

    assert "6 generations" in report
    assert "4 responses" in report
    assert "2 conversations" in report
    assert "1 chat completions" in report
    assert list(places_with(stack, SECRET)) == []
    assert list(places_with(stack, "user-to-forget")) == []
    for gone in (own.id, named.id):
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(gone)
    # What others have said stays, and goes on; so do the counts of tokens.
    assert client.responses.retrieve(other.id).output_text == other.output_text
    assert say(client, "More", conversation=shared.id).status == "completed"
    assert usage == stack.sql(
        "SELECT count(*), sum(input_tokens) FROM generations_generation WHERE project_id = %s"
        " AND end_user IN ('', 'somebody-else') AND id NOT IN"
        " (SELECT max(id) FROM generations_generation WHERE project_id = %s)",
        key.project_id,
        key.project_id,
    )
    assert "0 generations" in stack.manage("forget", "--user", "user-to-forget")


def test_what_others_build_on_keeps_its_form(stack: ServedStack) -> None:
    client = stack.client(make_key(stack).secret)
    theirs: dict[str, Any] = {"safety_identifier": "user-before"}
    first = say(client, f"{SECRET} seven", **theirs)
    compacted = client.responses.compact(model="scripted", previous_response_id=first.id)
    history: Any = [item.to_dict(warnings=False) for item in compacted.output]
    second = say(client, [*history, {"role": "user", "content": "More"}], **theirs)
    other = say(client, "Plum", previous_response_id=second.id, safety_identifier="after")

    stack.manage("forget", "--user", "user-before")

    items = list(client.responses.input_items.list(other.id, order="asc"))
    messages = [item for item in items if item.type == "message"]
    contents = {(item.role, part.type) for item in messages for part in item.content}
    assert contents == {("user", "input_text"), ("assistant", "output_text")}
    assert "compaction" in {item.type for item in items}
    assert say(client, "Go on", previous_response_id=other.id).status == "completed"


def test_a_conversation_of_theirs_in_which_others_have_responses(stack: ServedStack) -> None:
    client = stack.client(make_key(stack).secret)
    message: Any = {"type": "message", "role": "user", "content": "Quittenbrot"}
    talks = [
        client.conversations.create(metadata={"user_id": "user-of-talk"}, items=[message])
        for _ in range(2)
    ]
    guest: dict[str, Any] = {"safety_identifier": "guest"}
    others = [say(client, "Plum", conversation=talk.id, **guest) for talk in talks]
    client.conversations.delete(talks[1].id)

    assert "2 conversations" in stack.manage("forget", "--user", "user-of-talk")

    assert list(places_with(stack, "Quittenbrot")) == []
    assert list(places_with(stack, "user-of-talk")) == []
    for other in others:
        assert client.responses.retrieve(other.id).output_text == other.output_text
        assert say(client, "Go on", previous_response_id=other.id).status == "completed"
    assert "0 conversations" in stack.manage("forget", "--user", "user-of-talk")


def test_only_in_one_project(stack: ServedStack) -> None:
    here, there = make_key(stack), make_key(stack)
    for key in (here, there):
        say(stack.client(key.secret), "Hello", user="same-name")
    name = stack.sql("SELECT name FROM accounts_project WHERE id = %s", here.project_id)[0][0]
    assert "1 responses" in stack.manage("forget", "--user", "same-name", "--project", name)
    left = stack.sql("SELECT project_id FROM generations_generation WHERE end_user = 'same-name'")
    assert left == [(there.project_id,)]
    with pytest.raises(subprocess.CalledProcessError):
        stack.manage("forget", "--user", "same-name", "--project", "no such project")
