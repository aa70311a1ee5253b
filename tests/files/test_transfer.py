"""Export and import of files: two imports of one folder at the same time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from inference_site.accounts.models import Project
from inference_site.files import storage
from inference_site.files.models import StoredFile

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_second_import_of_a_folder_leaves_the_files_of_the_first_one(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaced the file that the first one was storing, which then deleted the new content."""
    given = {"filename": "a", "size_bytes": 3, "purpose": "user_data"}
    file = StoredFile(public_id="file-1", project=project, **given)
    storage.store(file, io.BytesIO(b"abc"))
    arguments = ("import_project", "new", tmp_path / "export", "--create")
    call_command("export_project", project.name, tmp_path / "export")
    storage.delete([file])
    make_ready, errors = StoredFile.objects.make_ready, []

    def slow_make_ready(*given: Any) -> bool:
        monkeypatch.setattr(StoredFile.objects, "make_ready", make_ready)
        with pytest.raises(CommandError) as caught:
            call_command(*arguments)
        errors.append(str(caught.value))
        return make_ready(*given)

    monkeypatch.setattr(StoredFile.objects, "make_ready", slow_make_ready)
    call_command(*arguments)
    assert errors == [f"Another import of {tmp_path / 'export'} runs."]
    assert b"".join(storage.read(StoredFile.objects.get())) == b"abc"
    call_command(*arguments)
