"""Export and import of responses: sealed content, chains across batches, and what contradicts."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone

from inference_site.accounts.models import Project
from inference_site.core.storage.cipher import seal, unseal
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.management.commands import import_project
from responses_api.models import (
    Conversation,
    Item,
    McpApproval,
    PromptTemplate,
    PromptVersion,
    ResponseStatus,
    StoredResponse,
)

pytestmark = pytest.mark.django_db(transaction=True)


def response(project: Project, name: str, **fields: Any) -> StoredResponse:
    given = {"model": "m", "status": ResponseStatus.COMPLETED, **fields}
    return StoredResponse.objects.create(public_id=name, project=project, **given)


def item(project: Project, name: str, data: dict[str, Any], **fields: Any) -> Item:
    return Item.objects.create(public_id=name, project=project, data=data, **fields)


def command(*arguments: Any) -> str:
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


def spoken(n: int) -> dict[str, Any]:
    """Return the data of a message of the model."""
    part = {"type": "output_text", "text": str(n), "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": "completed", "content": [part]}


@pytest.fixture
def moved(project: Project, tmp_path: Path, settings: Any) -> Callable[[], Project]:
    """Exports the project, deletes all, and imports it into another one of a site with its key."""

    def move() -> Project:
        command("export_project", project.name, tmp_path / "export")
        McpApproval.objects.all().delete()
        Item.objects.all().delete()
        StoredResponse.objects.update(previous=None)
        StoredResponse.objects.all().delete()
        Conversation.objects.all().delete()
        settings.SECRET_KEY = "that of the other site"
        command("import_project", "new", tmp_path / "export", "--create")
        return Project.objects.get(name="new")

    return move


def test_sealed_content_is_sealed_for_the_other_site(
    project: Project, moved: Callable[[], Project], tmp_path: Path
) -> None:
    row = response(project, "resp_1")
    sealed = seal("the summary", project.pk)
    whole: Any = {"type": "compaction", "encrypted_content": f"context.{sealed}"}
    thought: Any = {"type": "reasoning", "summary": [], "encrypted_content": seal("hm", project.pk)}
    of_elsewhere = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA-unreadable"}
    for position, data in enumerate((whole, thought, of_elsewhere)):
        item(project, f"item_{position}", data, response=row, position=position)
    new = moved()
    text = (tmp_path / "export" / "objects.jsonl").read_text()
    assert sealed not in text
    assert "unreadable" not in text
    items = [row.data["encrypted_content"] for row in Item.objects.order_by("position")]
    assert items[0].startswith("context.")
    assert unseal(items[0].removeprefix("context."), new.pk, "") == "the summary"
    assert unseal(items[1], new.pk, "") == "hm"
    assert items[2] == ""


def test_chains_and_conversations_keep_their_order_across_batches(
    project: Project, moved: Callable[[], Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_project, "_BATCH", 3)
    talk = Conversation.objects.create(public_id="conv_1", project=project, next_position=8)
    previous = None
    for n in range(10):
        failed = {"type": "error", "code": "server_error", "message": str(n)}
        judged = {"input": failed, "output": failed}
        previous = response(project, f"resp_{n}", previous=previous, moderation=judged)
        item(project, f"msg_{n}", {"type": "message", "n": n}, response=previous)
    for n in range(4):
        row = response(project, f"resp_c{n}", conversation=talk, conversation_position=2 * n)
        place = {"conversation": talk, "conversation_position": 2 * n + 1}
        item(project, f"own_{n}", {"n": n}, conversation=talk, conversation_position=2 * n)
        item(project, f"said_{n}", spoken(n), response=row, is_output=True, **place)
    asked = Item.objects.get(public_id="msg_3")
    McpApproval.objects.create(
        item=asked, project=project, server_label="files", name="rm", arguments_sha256="0" * 64
    )
    response(project, "resp_runs", status=ResponseStatus.IN_PROGRESS)
    new = moved()
    last: StoredResponse | None = StoredResponse.objects.get(public_id="resp_9")
    chain = []
    while last:
        assert last.project == new
        assert last.moderation is not None
        chain.append((last.public_id, [row.data["n"] for row in last.items.all()]))
        last = last.previous
    assert chain == [(f"resp_{n}", [n]) for n in reversed(range(10))]
    [talk] = Conversation.objects.all()
    said = Item.objects.filter(conversation=talk).order_by("conversation_position")
    assert [row.public_id for row in said] == [
        name for n in range(4) for name in (f"own_{n}", f"said_{n}")
    ]
    assert talk.next_position == 8
    assert McpApproval.objects.get().item.public_id == "msg_3"
    assert not StoredResponse.objects.filter(public_id="resp_runs").exists()


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change each line of an export."""
    path = folder / "objects.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_import_that_stops_goes_on_from_there(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_project, "_BATCH", 3)
    for n in range(9):
        row = response(project, f"resp_{n}")
        item(project, f"msg_{n}", {"n": n}, response=row)
    folder = tmp_path / "export"
    command("export_project", project.name, folder)
    StoredResponse.objects.all().delete()

    def refer(line: dict[str, Any]) -> None:
        if line.get("id") == "resp_7":
            line["previous"] = "resp_missing"

    whole = (folder / "objects.jsonl").read_bytes()
    edited(folder, refer)
    with pytest.raises(CommandError, match="Line 9: the project has no response resp_missing"):
        command("import_project", project.name, folder)
    assert StoredResponse.objects.count() == Item.objects.count() == 6
    (folder / "objects.jsonl").write_bytes(whole)
    assert "3 × response, 6 known already" in command("import_project", project.name, folder)
    assert StoredResponse.objects.count() == Item.objects.count() == 9


def test_an_export_that_numbers_events_beyond_all_bounds_is_refused(
    project: Project, moved: Callable[[], Project], tmp_path: Path
) -> None:
    """To read such a stream again took the memory of the web process."""
    sent: Any = {"first": 2, "sizes": [2, 3], "logprob_counts": []}
    deltas: Any = {"end": 9, "items": [sent, None]}
    response(project, "resp_1", deltas=deltas)
    moved()
    assert StoredResponse.objects.get(public_id="resp_1").deltas == deltas
    lines = tmp_path / "export" / "objects.jsonl"
    whole = lines.read_text()
    for wrong in ('"end":2147483648', '"end":-1', '"end":"x"'):
        lines.write_text(whole.replace('"end":9', wrong).replace("resp_1", "resp_2"))
        with pytest.raises(CommandError, match=r"Line 2 is not valid: 'deltas\.end'"):
            command("import_project", "new", lines.parent)
    lines.write_text(whole.replace('"first":2', '"first":2147483648').replace("resp_1", "resp_2"))
    with pytest.raises(CommandError, match=r"Line 2 is not valid: 'deltas\.items\.0\.first'"):
        command("import_project", "new", lines.parent)
    assert not StoredResponse.objects.filter(public_id="resp_2").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"error": {"message": "No"}}, "'code'"),
        ({"error": {"message": 5, "type": "server_error", "param": None, "code": None}}, "message"),
        ({"error": {"message": "No", "type": "a", "param": None, "code": ["b"]}}, "unhashable"),
        ({"usage": {"input_tokens": "many"}}, "usage.input_tokens"),
        ({"request": {"temperature": "warm"}}, "temperature"),
        ({"metadata": {"n": 1}}, "metadata.n"),
        ({"moderation": {"input": 1}}, "moderation.input"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_response_that_could_not_be_read_is_refused(
    project: Project, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """It was stored, and each answer that showed it was a 500."""
    row = response(project, "resp_1")
    item(project, "msg_1", spoken(1), response=row, is_output=True)
    folder = tmp_path / "export"
    command("export_project", project.name, folder)

    def broken(line: dict[str, Any]) -> None:
        if line["kind"] == "response":
            line.update(change)

    edited(folder, broken)
    row.delete()
    with pytest.raises(CommandError, match=rf"Line 2: resp_1 cannot be read: .*{reason}"):
        command("import_project", "new", folder, "--create")
    assert not StoredResponse.objects.exists()


@pytest.mark.parametrize("data", [{}, {"type": "message"}, {"type": "x"}, {"n": [1]}])
def test_output_that_could_not_be_read_is_refused(
    project: Project, tmp_path: Path, data: dict[str, Any]
) -> None:
    row = response(project, "resp_1")
    item(project, "msg_1", data, response=row, is_output=True)
    folder = tmp_path / "export"
    command("export_project", project.name, folder)
    row.deleted_at = timezone.now()  # Nobody can read it, and others may build on it.
    row.save()
    command("export_project", project.name, tmp_path / "hidden")
    row.delete()
    with pytest.raises(CommandError, match=r"Line 2: resp_1 cannot be read: 'output\.0"):
        command("import_project", "new", folder, "--create")
    assert "1 × response" in command("import_project", "new", tmp_path / "hidden")


def test_prompt_templates_keep_their_ids_and_versions(project: Project, tmp_path: Path) -> None:
    template = PromptTemplate.objects.create(project=project, name="greeting", default_version=1)
    for number in (1, 2):
        PromptVersion.objects.create(
            template=template, number=number, user_message=f"Hello {{{{name}}}} {number}", model="m"
        )
    folder = tmp_path / "export"
    command("export_project", project.name, folder)
    template.delete()
    assert "1 × prompt\n" in command("import_project", "new", folder, "--create")
    moved = PromptTemplate.objects.get(public_id=template.public_id)
    assert (moved.project.name, moved.name, moved.default_version) == ("new", "greeting", 1)
    versions = [(1, "Hello {{name}} 1", "m"), (2, "Hello {{name}} 2", "m")]
    columns = ("number", "user_message", "model")
    assert list(moved.versions.order_by("number").values_list(*columns)) == versions
    # A version that was added there stays, one that is missing is added.
    moved.versions.filter(number=1).delete()
    PromptVersion.objects.create(template=moved, number=3, user_message="Hi")
    assert "0 × prompt, 1 known already" in command("import_project", "new", folder)
    assert [version.number for version in moved.versions.all()] == [3, 2, 1]
    # A name that another template has.
    moved.delete()
    PromptTemplate.objects.create(project=Project.objects.get(name="new"), name="greeting")
    with pytest.raises(CommandError, match="another prompt template greeting; rename it"):
        command("import_project", "new", folder)
    assert not PromptVersion.objects.exists()


def test_objects_of_other_projects_are_neither_changed_nor_referred_to(
    project: Project, tmp_path: Path
) -> None:
    other = Project.objects.create(name="other")
    secret = response(other, "resp_secret")
    item(other, "msg_secret", {"n": 1}, response=secret)
    row = response(project, "resp_1")
    item(project, "msg_1", {"n": 1}, response=row)
    folder = tmp_path / "export"
    command("export_project", project.name, folder)
    StoredResponse.objects.filter(project=project).delete()
    whole = (folder / "objects.jsonl").read_bytes()

    def changed(**fields: Any) -> Callable[[dict[str, Any]], None]:
        def change(line: dict[str, Any]) -> None:
            if line["kind"] == "response":
                line.update(fields)

        return change

    stolen_item = {**json.loads(whole.splitlines()[1])["items"][0], "id": "msg_secret"}
    for fields, message in (
        ({"previous": "resp_secret"}, "has no response resp_secret"),
        ({"id": "resp_secret"}, "another project has an object with the id resp_secret"),
        ({"items": [stolen_item]}, "an item of resp_1 is stored already"),
        ({"conversation": "conv_unknown"}, "has no conversation conv_unknown"),
    ):
        (folder / "objects.jsonl").write_bytes(whole)
        edited(folder, changed(**fields))
        with pytest.raises(CommandError, match=message):
            command("import_project", project.name, folder)
    assert not StoredResponse.objects.filter(project=project).exists()
    assert Item.objects.get().project == other


def test_two_imports_at_once_store_each_object_once(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_project, "_BATCH", 5)
    previous = None
    for n in range(50):
        previous = response(project, f"resp_{n}", previous=previous)
        item(project, f"msg_{n}", {"n": n}, response=previous)
    folder = tmp_path / "export"
    command("export_project", project.name, folder)
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE responses_api_storedresponse CASCADE")

    def once(number: int) -> str:
        """Import a copy; return the error, if any."""
        copy = copytree(folder, tmp_path / f"copy-{number}")
        with release_connection_after():
            try:
                command("import_project", project.name, copy)
            except CommandError as exc:
                return str(exc)
            return ""

    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(once, range(3)))
    assert "" in errors
    assert all("stored" in error for error in errors if error)
    assert StoredResponse.objects.count() == Item.objects.count() == 50
    assert "0 × response, 50 known already" in command("import_project", project.name, folder)


def test_memory_does_not_grow_with_the_export(project: Project, tmp_path: Path) -> None:
    peaks = []
    for count in (1000, 2500):
        rows = StoredResponse.objects.bulk_create(
            StoredResponse(
                public_id=f"resp_{n}", project=project, model="m", status=ResponseStatus.COMPLETED
            )
            for n in range(count)
        )
        Item.objects.bulk_create(
            Item(public_id=f"msg_{n}", project=project, response=row, data={"text": "x" * 4000})
            for n, row in enumerate(rows)
        )
        folder = tmp_path / f"export-{count}"
        tracemalloc.start()
        command("export_project", project.name, folder)
        with connection.cursor() as cursor:
            cursor.execute("TRUNCATE responses_api_storedresponse CASCADE")
        command("import_project", project.name, folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        StoredResponse.objects.all().delete()
    assert peaks[1] < 1.5 * peaks[0]


def test_what_cannot_be_written_or_created_is_told(project: Project, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match=r"The export cannot be written: .*file"):
        command("export_project", project.name, tmp_path / "file" / "export")
    with pytest.raises(CommandError, match=r"The export cannot be written: .*File name too long"):
        command("export_project", project.name, tmp_path / ("x" * 300))
    command("export_project", project.name, tmp_path / "export")
    for name in ("", "x" * 101):
        with pytest.raises(CommandError, match="The name of the project: "):
            command("import_project", name, tmp_path / "export", "--create")
    assert Project.objects.count() == 1
