"""Export of batches that end while it runs."""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command
from django.utils import timezone

from inference_site.accounts.models import ApiKey, Project
from inference_site.batches.models import Batch, BatchStatus
from inference_site.core.transfer import LINES_FILE
from inference_site.files import storage, transfer
from inference_site.files.models import StoredFile

pytestmark = pytest.mark.django_db(transaction=True)

Key = tuple[ApiKey, str]


def test_a_batch_that_ends_after_the_files_were_exported_is_left_out(
    api_key: Key, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was exported as completed, without its results, and no later import added them."""
    key, of_files = api_key[0], transfer.export_lines

    def ended(name: str) -> None:
        given = {"filename": "a", "size_bytes": 1, "purpose": "batch_output"}
        file = StoredFile(public_id=f"file-{name}", project=key.project, **given)
        storage.store(file, io.BytesIO(b"a"))
        Batch.objects.create(
            public_id=f"batch_{name}",
            project=key.project,
            api_key=key,
            endpoint="/v1/chat/completions",
            input_file_id="file-deleted",
            output_file_id=file.public_id,
            window_s=60,
            expires_at=timezone.now() + dt.timedelta(hours=1),
            status=BatchStatus.COMPLETED,
        )

    def export_lines(project_id: int, into: Path) -> Iterator[transfer.FileLine]:
        yield from of_files(project_id, into)
        ended("late")

    monkeypatch.setattr(transfer, "export_lines", export_lines)
    ended("early")
    call_command("export_project", Project.objects.get().name, tmp_path / "export")
    text = (tmp_path / "export" / LINES_FILE).read_text()
    assert "batch_early" in text
    assert "batch_late" not in text
