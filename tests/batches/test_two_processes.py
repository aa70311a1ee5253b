"""Batches on which two processes work, because one of them stood still for a while."""

from __future__ import annotations

import datetime as dt
import errno
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from django.core.files.storage import storages
from django.db.models import F
from django.utils import timezone
from pytest_django.fixtures import Settings

from inference_site.accounts.models import ApiKey
from inference_site.batches import feeding, results
from inference_site.batches.feeding import Feeder
from inference_site.batches.models import Batch, BatchLine, BatchStatus, LineState
from inference_site.core.errors.api_errors import UnavailableError
from inference_site.files import storage
from inference_site.files.models import StoredFile

pytestmark = pytest.mark.django_db

Key = tuple[ApiKey, str]
LINES = 300


def finalizing(key: ApiKey) -> Batch:
    """Return a batch whose lines have ended."""
    batch = Batch.objects.create(
        public_id="batch_1",
        project_id=key.project_id,
        api_key=key,
        endpoint="/v1/chat/completions",
        window_s=60,
        expires_at=timezone.now() + dt.timedelta(hours=1),
        status=BatchStatus.FINALIZING,
        total=LINES,
    )
    BatchLine.objects.bulk_create(
        BatchLine(
            batch=batch,
            number=number,
            custom_id=str(number),
            state=LineState.ENDED,
            status_code=200,
            answer="{}",
        )
        for number in range(1, LINES + 1)
    )
    return batch


def take_over() -> None:
    """Work on what another process has held for too long."""
    Batch.objects.update(worked_until=timezone.now() - dt.timedelta(seconds=1))
    Feeder().prepare()


def test_a_clock_that_was_set_back_keeps_no_batch_of_a_process_that_is_gone(
    folder: Path, api_key: Key
) -> None:
    batch = finalizing(api_key[0])
    assert Batch.objects.hold(batch, "gone", results.HELD_S)
    assert not Batch.objects.hold(batch, "other", results.HELD_S)
    Batch.objects.update(worked_until=F("worked_until") + dt.timedelta(hours=2))
    Feeder().prepare()
    check_results(folder)


def check_results(folder: Path) -> None:
    """Raise AssertionError unless there is one file, in which each line is once."""
    batch, file = Batch.objects.get(), StoredFile.objects.get()
    assert batch.status == BatchStatus.COMPLETED
    assert (batch.completed, batch.failed, batch.skipped) == (LINES, 0, 0)
    assert (batch.output_file_id, batch.error_file_id) == (file.public_id, "")
    lines = b"".join(storage.read(file)).splitlines()
    ids = [orjson.loads(line)["custom_id"] for line in lines]
    assert ids == [str(number) for number in range(1, LINES + 1)]
    assert [path.name for path in folder.rglob("file-*")] == [file.public_id]


@pytest.mark.parametrize("at", ["lines", "before the content", "after the content"])
def test_a_process_that_stood_still_takes_nothing_of_the_results_along(
    api_key: Key, folder: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """It deleted the content of the file that the other process had stored, or its lines."""
    finalizing(api_key[0])
    files, save, read = storages["files"], storages["files"].save, results._lines
    has_stood_still = False

    def stand_still(when: str) -> None:
        nonlocal has_stood_still
        if when == at and not has_stood_still:
            has_stood_still = True
            take_over()

    def save_slowly(*args: Any, **kwargs: Any) -> str:
        stand_still("before the content")
        name = save(*args, **kwargs)
        stand_still("after the content")
        return name

    def read_slowly(batch: Batch) -> Iterator[BatchLine]:
        for line in read(batch):
            if line.number == LINES // 2:
                stand_still("lines")
            yield line

    monkeypatch.setattr(files, "save", save_slowly)
    monkeypatch.setattr(results, "_lines", read_slowly)
    Feeder().prepare()
    assert has_stood_still
    check_results(folder)
    Feeder().prepare()
    check_results(folder)


def test_a_batch_rests_while_its_results_cannot_be_stored(
    api_key: Key, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finalizing(api_key[0])
    feeder, files, tries = Feeder(), storages["files"], list[str]()

    def save(name: str, content: Any, *args: Any, **kwargs: Any) -> str:
        tries.append(name)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(files, "save", save)
        for _ in range(3):
            feeder.prepare()
        assert len(tries) == 1
        full.setattr(feeding, "_STORAGE_REST_S", 0.0)
        full.setattr(feeding, "_REST_S", 0.0)
        feeder._rests_until.clear()
        feeder.prepare()
        assert len(tries) == 2
    feeder.prepare()
    check_results(folder)


def test_a_batch_rests_while_its_results_cannot_be_written(
    api_key: Key,
    folder: Path,
    tmp_path: Path,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beat tried again every 2 s, with a long error in the log that did not name the folder."""
    finalizing(api_key[0])
    received = tmp_path / "received"
    settings.FILE_UPLOAD_TEMP_DIR = str(received)
    feeder = Feeder()
    feeder.prepare()
    assert f"a temporary file in {received} cannot be written" in caplog.text
    assert "Traceback" not in caplog.text
    [until] = feeder._rests_until.values()
    assert until > time.monotonic() + feeding._REST_S
    received.mkdir()
    feeder._rests_until.clear()
    feeder.prepare()
    check_results(folder)


def test_files_of_a_process_that_has_died_are_deleted(api_key: Key, folder: Path) -> None:
    batch = finalizing(api_key[0])
    Batch.objects.update(output_file_id="file-died", worked_by="died")
    died = StoredFile(
        public_id="file-died", project_id=batch.project_id, filename="a", size_bytes=1
    )
    storage.store(died, io.BytesIO(b"a"))
    take_over()
    check_results(folder)


def test_a_batch_that_is_cancelled_while_it_is_validated_has_no_results(
    api_key: Key, folder: Path
) -> None:
    """The lines that had been checked were in a file of errors."""
    finalizing(api_key[0])
    BatchLine.objects.update(state=LineState.PENDING, status_code=None, answer="")
    Batch.objects.update(status=BatchStatus.VALIDATING, total=0)
    Batch.objects.cancel(Batch.objects.get())
    Feeder().prepare()
    batch = Batch.objects.get()
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("cancelled", "", "")
    assert not BatchLine.objects.exists()
    assert not StoredFile.objects.exists()


def test_a_validation_that_another_process_has_repeated_begins_again(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on behind the lines that the other process had stored, so some were missing."""
    finalizing(api_key[0])
    Batch.objects.update(status=BatchStatus.VALIDATING)
    began: list[Batch] = []

    def validate(batch: Batch) -> Iterator[None]:
        began.append(batch)
        while True:
            yield

    monkeypatch.setattr(feeding, "validate", validate)
    monkeypatch.setattr(feeding, "_SLICE_S", 0.01)
    first = Feeder()
    for _ in range(3):
        first.prepare()
    assert len(began) == 1
    take_over()
    assert len(began) == 2
    Batch.objects.update(worked_until=None)
    first.prepare()
    assert len(began) == 3


def test_a_validation_that_cannot_go_on_now_is_no_error_of_the_site(
    api_key: Key, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log had a traceback for each second without a worker."""
    finalizing(api_key[0])
    Batch.objects.update(status=BatchStatus.VALIDATING)

    def validate(batch: Batch) -> Iterator[None]:
        yield
        raise UnavailableError(code="no_worker")

    monkeypatch.setattr(feeding, "validate", validate)
    Feeder().prepare()
    assert Batch.objects.get().status == BatchStatus.VALIDATING
    assert [(one.levelname, one.exc_info) for one in caplog.records] == [("WARNING", None)]
