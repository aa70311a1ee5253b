"""A project is exported, deleted, imported into another one, and goes on with the same ids."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import MadeKey, make_key
from tests.e2e.scripts import dicts
from tests.served_stack import ServedStack
from tests.waiting import wait_until

MESSAGE: Any = {"role": "user", "content": "kept words"}


def name_of(stack: ServedStack, key: MadeKey) -> str:
    return str(stack.sql("SELECT name FROM accounts_project WHERE id = %s", key.project_id)[0][0])


def say(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.responses.create(model="scripted", input=text, **fields)


def test_exported_project_goes_on_in_another_one(stack: ServedStack, tmp_path: Path) -> None:
    here, there = make_key(stack), make_key(stack)
    client = stack.client(here.secret)
    content = bytes(range(256)) * 5_000
    file = client.files.create(file=("data.bin", content), purpose="user_data")
    # A chain whose first response is deleted: it stays, hidden.
    first = say(client, "one two three")
    second = say(client, "four", previous_response_id=first.id, metadata={"topic": "cake"})
    client.responses.delete(first.id)
    talk = client.conversations.create(
        metadata={"mood": "good"},
        items=[{"type": "message", "role": "user", "content": "a word before"}],
    )
    said = say(client, "five", conversation=talk.id)
    items_before = dicts(client.conversations.items.list(talk.id, order="asc"))
    completion = client.chat.completions.create(
        model="scripted", messages=[MESSAGE], store=True, metadata={"a": "b"}
    )
    shown = client.responses.retrieve(second.id)
    rated = [f"responses/{second.id}/feedback", f"chat/completions/{completion.id}/feedback"]
    for path in rated:
        client.post(f"/{path}", body={"rating": "down", "note": "dry"}, cast_to=httpx.Response)
    folder = tmp_path / "export"

    report = stack.manage("export_project", name_of(stack, here), str(folder))

    assert "3 × response" in report
    assert "1 × file" in report
    with pytest.raises(subprocess.CalledProcessError) as taken:
        stack.manage("import_project", name_of(stack, there), str(folder))
    assert "Line 2: another project has an object with the id" in taken.value.stderr
    client.files.delete(file.id)
    for response in (second, said):
        client.responses.delete(response.id)
    client.conversations.delete(talk.id)
    client.chat.completions.delete(completion.id)
    assert not stack.sql(
        "SELECT 1 FROM responses_api_item WHERE project_id = %s", here.project_id
    ), "all is deleted"

    report = stack.manage("import_project", name_of(stack, there), str(folder))

    assert "3 × response\n" in report
    other = stack.client(there.secret)
    assert other.files.content(file.id).read() == content
    assert other.files.retrieve(file.id).filename == "data.bin"
    again = other.responses.retrieve(second.id)
    assert again.model_dump() == shown.model_dump()
    assert (
        "".join(
            event.delta
            for event in other.responses.retrieve(second.id, stream=True)
            if event.type == "response.output_text.delta"
        )
        == shown.output_text
    )
    third = say(other, "six", previous_response_id=second.id)
    assert third.usage.input_tokens == 9  # One two three, its echo, four, its echo, and six.
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(first.id)
    assert dicts(other.conversations.items.list(talk.id, order="asc")) == items_before
    assert other.conversations.retrieve(talk.id).metadata == {"mood": "good"}
    more = say(other, "seven", conversation=talk.id)
    assert more.usage.input_tokens == 6  # A word before, five, its echo, and seven.
    found = other.chat.completions.retrieve(completion.id)
    assert found.choices[0].message.content == "kept words"
    assert found.metadata == {"a": "b"}
    with there.http(stack) as http:
        for path in rated:
            (entry,) = http.get(f"/v1/{path}").json()["data"]
            assert (entry["rating"], entry["note"]) == ("down", "dry")
    for use in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            use(second.id)
    # Again: nothing is new, and what has been added since stays.
    report = stack.manage("import_project", name_of(stack, there), str(folder))
    assert "0 × response, 3 known already" in report
    assert "0 × file, 1 known already" in report
    assert len(dicts(other.conversations.items.list(talk.id))) == len(items_before) + 2
    assert say(other, "eight", previous_response_id=third.id).status == "completed"


def test_batches_move_with_their_files(stack: ServedStack, tmp_path: Path) -> None:
    here, there = make_key(stack), make_key(stack)
    client, other = stack.client(here.secret), stack.client(there.secret)
    ids = []
    for model in ("scripted", "of-elsewhere"):  # The second one is refused line by line.
        body = {"model": model, "messages": [MESSAGE]}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        content = json.dumps(line).encode()
        file = client.files.create(file=("requests.jsonl", content), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"night": "1"},
        )
        ids.append(made.id)

    def batches() -> list[Any]:
        return [client.batches.retrieve(one) for one in ids]

    wait_until(lambda: [one.status for one in batches()] == ["completed", "failed"], timeout_s=60)
    done, failed = before = batches()
    assert failed.errors is not None
    answers = client.files.content(done.output_file_id).text
    folder = tmp_path / "export"
    assert "2 × batch\n" in stack.manage("export_project", name_of(stack, here), str(folder))
    for statement in (
        "DELETE FROM batches_batch WHERE project_id = %s",
        "DELETE FROM files_storedfile WHERE project_id = %s",
    ):
        stack.sql(statement, here.project_id)

    arguments = ("import_project", name_of(stack, there), str(folder))
    assert "2 × batch\n" in stack.manage(*arguments)
    assert "0 × batch, 2 known already" in stack.manage(*arguments)

    assert [other.batches.retrieve(one).to_dict() for one in ids] == [
        batch.to_dict() for batch in before
    ]
    assert len(dicts(other.batches.list())) == 2
    assert other.files.content(done.output_file_id).text == answers
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(done.id)
    # Who pays for them is a key without a secret.
    keys = "SELECT name FROM accounts_apikey WHERE project_id = %s AND NOT EXISTS "
    keys += "(SELECT FROM accounts_keysecret WHERE api_key_id = accounts_apikey.id)"
    assert stack.sql(keys, there.project_id) == [("import",)]


def test_cut_or_changed_export_is_refused_whole(stack: ServedStack, tmp_path: Path) -> None:
    here, there = make_key(stack), make_key(stack)
    client = stack.client(here.secret)
    made = [say(client, f"number {n}") for n in range(3)]
    file = client.files.create(file=("a.txt", b"abc"), purpose="user_data")
    folder = tmp_path / "export"
    stack.manage("export_project", name_of(stack, here), str(folder))
    with pytest.raises(subprocess.CalledProcessError, match="returned non-zero"):
        stack.manage("export_project", name_of(stack, here), str(folder))
    client.files.delete(file.id)
    for response in made:
        client.responses.delete(response.id)
    path = folder / "objects.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["export", "file", "response", "response", "response", "end"]
    other_status = json.loads(lines[3]) | {"status": "queued"}
    outside = json.loads(lines[1]) | {"id": "../../etc/passwd"}
    torn = {
        "Line 4 is cut off": b"".join(lines[:4])[:-20],
        "Line 6 is missing": b"".join(lines[:5]),
        "Line 5: lines before it are missing": b"".join([*lines[:3], *lines[4:]]).replace(
            b"}\n{", b"}\n{"
        ),
        "Line 4 is not valid: 'status'": b"".join(
            [*lines[:3], json.dumps(other_status).encode() + b"\n", *lines[4:]]
        ),
        "'id'": b"".join([lines[0], json.dumps(outside).encode() + b"\n", *lines[2:]]),
        "this site does not know the kind 'spell'": whole.replace(
            b'"kind":"response"', b'"kind":"spell"', 1
        ),
        "Line 1: this is version 9": whole.replace(b'"version":1', b'"version":9', 1),
        "Line 4 is not valid: it has the character NUL": whole.replace(b"number 1", b"a\\u0000b"),
        "Line 1 is not valid": b"\xff\xfe" + whole,
    }
    for message, content in torn.items():
        path.write_bytes(content)
        with pytest.raises(subprocess.CalledProcessError) as caught:
            stack.manage("import_project", name_of(stack, there), str(folder))
        assert message in caught.value.stderr
        assert "Traceback" not in caught.value.stderr
    path.write_bytes(whole)
    kept = folder / "files" / file.id
    kept.write_bytes(b"abd")
    with pytest.raises(subprocess.CalledProcessError) as changed:
        stack.manage("import_project", name_of(stack, there), str(folder))
    assert "is not the content that was exported" in changed.value.stderr
    assert stack.sql(
        "SELECT count(*) FROM files_storedfile WHERE project_id = %s", there.project_id
    ) == [(0,)]
    kept.write_bytes(b"abc")
    stack.manage("import_project", name_of(stack, there), str(folder))
    assert stack.client(there.secret).files.content(file.id).read() == b"abc"


def test_export_has_no_secrets_and_only_its_project(
    stack: ServedStack, http: httpx.Client, tmp_path: Path
) -> None:
    here, stranger = make_key(stack), make_key(stack)
    say(stack.client(here.secret), "mine")
    say(stack.client(stranger.secret), "Zwiebelkuchen")
    folder = tmp_path / "export"
    stack.manage("export_project", name_of(stack, here), str(folder))
    text = (folder / "objects.jsonl").read_text()
    assert "mine" in text
    for secret in ("Zwiebelkuchen", here.secret, here.secret[:10]):
        assert secret not in text
    assert folder.stat().st_mode & 0o077 == 0
