"""Import of stored chat completions: what the API could not show is refused, lists stay whole."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from completions.models import StoredCompletion
from inference_site.accounts.models import Project
from inference_site.core.site_settings.models import forget

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"content": "Hi"},
        {"role": "user", "content": ["Hi"]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
    ],
)
def test_messages_that_could_not_be_read_are_refused(
    project: Project, tmp_path: Path, message: dict[str, Any]
) -> None:
    """They were stored, and ``GET /v1/chat/completions/{id}/messages`` was a 500."""
    given = {"project": project, "model": "m", "completion": {"choices": []}, "metadata": {}}
    said = {"role": "user", "content": "Hi"}
    StoredCompletion.objects.create(public_id="chatcmpl-1", messages=[said], **given)
    StoredCompletion.objects.create(public_id="chatcmpl-2", messages=[said, message], **given)
    call_command("export_project", project.name, tmp_path / "export")
    StoredCompletion.objects.all().delete()
    with pytest.raises(CommandError, match="Line 3: the messages of chatcmpl-2 cannot be read"):
        call_command("import_project", "new", tmp_path / "export", "--create")
    assert not StoredCompletion.objects.exists()


def test_exports_and_imports_are_in_the_audit_log(project: Project, tmp_path: Path) -> None:
    call_command("export_project", project.name, tmp_path / "export")
    for _ in range(2):
        call_command("import_project", "new", tmp_path / "export", "--create")
    entries = LogEntry.objects.order_by("pk").values_list("object_repr", "change_message")
    imported = ("new", "Imported by manage.py import_project.")
    assert list(entries) == [
        (project.name, "Exported by manage.py export_project."),
        ("new", "Made by manage.py import_project."),
        *(imported, imported),
    ]


def test_a_filter_by_time_shows_what_is_younger_than_the_rows_that_were_imported_after_it(
    admin: Client, project: Project, tmp_path: Path
) -> None:
    def made(number: int, age: timedelta) -> StoredCompletion:
        return StoredCompletion.objects.create(
            public_id=f"chatcmpl-{number}",
            project=project,
            model="m",
            messages=[{"role": "user", "content": "Hi"}],
            completion={"choices": []},
            metadata={},
            created_at=timezone.now() - age,
        )

    for number in range(8):
        made(number, timedelta(days=10))
    call_command("export_project", project.name, tmp_path / "export")
    StoredCompletion.objects.all().delete()
    young = made(8, timedelta(minutes=5))
    call_command("import_project", "new", tmp_path / "export", "--create")
    forget()
    shown = admin.get("/admin/completions/storedcompletion/?since=1h").context["cl"].result_list
    assert [row.public_id for row in shown] == [young.public_id]


def test_a_created_project_has_no_spaces_around_its_name(project: Project, tmp_path: Path) -> None:
    """``create_api_key --project " new "`` made a second project, "new"."""
    call_command("export_project", project.name, tmp_path / "export")
    call_command("import_project", " new ", tmp_path / "export", "--create")
    call_command("import_project", " new ", tmp_path / "export", "--create")
    names = Project.objects.exclude(pk=project.pk).values_list("name", flat=True)
    assert list(names) == ["new"]
