"""Files in storage: what a crash, a failure or the clock leaves is deleted."""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.files.storage import storages
from django.db import OperationalError
from django.utils import timezone

from inference_site.accounts.models import Project
from inference_site.batches.models import Batch
from inference_site.batches.results import store_failed_requests
from inference_site.core.errors.api_errors import (
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from inference_site.core.transfer import FILES_FOLDER
from inference_site.files import bucket as bucket_module
from inference_site.files import storage
from inference_site.files.models import FilePurpose, FileState, StoredFile, Upload, UploadStatus
from inference_site.files.transfer import FileLine, import_lines
from inference_site.settings import BUCKET_OPTIONS
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db


def made_bucket(url: str) -> bool:
    try:
        return httpx.put(f"{url}/bucket").is_success
    except httpx.TransportError:
        return False


@pytest.fixture
def bucket(settings: Any) -> Iterator[str]:
    """Files in a bucket of a real S3 server instead; returns its URL."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: made_bucket(url))
        options = {"bucket_name": "bucket", "endpoint_url": url, "region_name": "us-east-1"}
        keys = {"access_key": "a", "secret_key": "b"}
        backend = "inference_site.files.bucket.BucketStorage"
        files = {"BACKEND": backend, "OPTIONS": {**BUCKET_OPTIONS, **options, **keys}}
        settings.STORAGES = {**settings.STORAGES, "files": files}
        yield url
    finally:
        server.kill()
        server.wait()


def test_bucket(project: Project, bucket: str) -> None:
    content = bytes(range(256)) * 40_000
    file = made(project, "big", expires_at=timezone.now() - dt.timedelta(seconds=1))
    file.size_bytes = len(content)
    storage.store(file, io.BytesIO(content))
    asked: list[Any] = []
    client = storages["files"].connection.meta.client  # type: ignore[attr-defined]  # boto3's.
    client.meta.events.register(
        "before-send.s3.GetObject", lambda request, **_: asked.append(request.headers["Range"])
    )
    assert b"".join(storage.read(file)) == content
    assert b"".join(storage.read(file, 300_000, 900_000)) == content[300_000:900_000]
    last = len(content) - 1
    assert list(storage.read(file, last)) == [content[last:]]
    assert list(storage.read(file, 5, 5)) == []
    ranges = [f"0-{last}", "300000-899999", f"{last}-{last}"]
    assert asked == [f"bytes={one}".encode() for one in ranges], "nothing else is transferred"
    reading = storage.read(file)
    next(reading)
    reading.close()  # type: ignore[attr-defined]  # A generator, as when a client has gone.
    httpx.put(f"{bucket}/bucket/{file.key}", content=content[:1_000_000])
    with pytest.raises(UnavailableError, match="part of the file is missing"):
        list(storage.read(file))
    assert prune() == 1
    listed = httpx.get(f"{bucket}/bucket?list-type=2").text
    assert "file-big" not in listed
    assert not StoredFile.objects.exists()


def test_a_bucket_that_does_not_answer_is_not_waited_for_long(
    project: Project, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the threads of requests for five minutes each."""
    monkeypatch.setattr(bucket_module, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"bucket_name": "bucket", "endpoint_url": url, "region_name": "us-east-1"}
        keys = {"access_key": "a", "secret_key": "b"}
        backend = "inference_site.files.bucket.BucketStorage"
        files = {"BACKEND": backend, "OPTIONS": {**BUCKET_OPTIONS, **options, **keys}}
        settings.STORAGES = {**settings.STORAGES, "files": files}
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            stored(project, "silent")
        assert time.monotonic() - began < 20


def made(project: Project, name: str, **fields: Any) -> StoredFile:
    return StoredFile(
        public_id=f"file-{name}",
        project=project,
        filename=name,
        purpose="user_data",
        size_bytes=3,
        **fields,
    )


def stored(project: Project, name: str, **fields: Any) -> StoredFile:
    file = made(project, name, **fields)
    storage.store(file, io.BytesIO(b"abc"))
    return file


@pytest.mark.parametrize("content", [b"abc", b"[1]", b"{}", b"null"])
def test_imported_files_may_be_none_of_a_batch(project: Project, content: bytes) -> None:
    for name in ("given", "errors"):
        storage.store(made(project, name), io.BytesIO(content))
    StoredFile.objects.update(size_bytes=len(content))
    batch = Batch(
        public_id="batch_1",
        project=project,
        input_file_id="file-given",
        error_file_id="file-errors",
    )
    with pytest.raises(InvalidRequestError, match="custom_id"):
        store_failed_requests(batch)
    assert StoredFile.objects.count() == 2


def prune() -> int:
    return storage.prune(time.monotonic() + 10)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("file-*")}


def test_expired_hidden_and_incomplete_files_are_deleted(project: Project, folder: Path) -> None:
    now, past = timezone.now(), timezone.now() - dt.timedelta(hours=2)
    stored(project, "kept", expires_at=now + dt.timedelta(hours=1))
    stored(project, "expired", expires_at=past)
    hidden = StoredFile.objects.filter(pk=stored(project, "hidden").pk)
    assert hidden.hide() == 1
    # As a process leaves them that is killed while it stores a file.
    for name, created_at in (("incomplete", past), ("arriving", now)):
        file = stored(project, name, created_at=created_at)
        StoredFile.objects.filter(pk=file.pk).update(state=FileState.STORING)
    assert prune() == 3
    assert names(folder) == {"file-kept", "file-arriving"}
    assert prune() == 0


def test_expired_file_cannot_be_read_before_it_is_deleted(project: Project) -> None:
    stored(project, "old", expires_at=timezone.now() - dt.timedelta(seconds=1))
    assert not StoredFile.objects.readable(project.pk).exists()


def test_old_files_are_not_deleted_while_they_are_imported(
    project: Project, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look as if a process had died over them an hour ago, or have expired; the import
    failed."""
    past = timezone.now() - dt.timedelta(days=2)
    (tmp_path / FILES_FOLDER).mkdir(exist_ok=True)
    ids = ["file-old", "file-expired"]
    lines = [
        FileLine(
            id=id_,
            filename="a",
            purpose=FilePurpose.USER_DATA,
            content_type="",
            bytes=3,
            sha256=hashlib.sha256(b"abc").hexdigest(),
            created_at=past,
            expires_at=expires_at,
        )
        for id_, expires_at in zip(ids, (None, past), strict=True)
    ]
    for id_ in ids:
        (tmp_path / FILES_FOLDER / id_).write_bytes(b"abc")
    save = storages["files"].save

    def save_slowly(*args: Any, **kwargs: Any) -> str:
        assert prune() == 0
        return save(*args, **kwargs)

    with monkeypatch.context() as slow:
        slow.setattr(storages["files"], "save", save_slowly)
        for line in lines:
            assert import_lines(project.pk, "file", [line], tmp_path) == 1
    rows = StoredFile.objects.order_by("pk").values_list("public_id", "created_at", "expires_at")
    assert list(rows) == [(line.id, line.created_at, line.expires_at) for line in lines]
    assert prune() == 1
    assert {path.name for path in (folder / str(project.pk)).iterdir()} == {"file-old"}


def test_parts_of_ended_uploads_are_deleted(project: Project, folder: Path) -> None:
    past = timezone.now() - dt.timedelta(seconds=1)
    for status, expires_at, name in (
        (UploadStatus.PENDING, past, "late"),
        (UploadStatus.CANCELLED, past, "cancelled"),
        (UploadStatus.PENDING, past + dt.timedelta(hours=1), "going-on"),
    ):
        upload = Upload.objects.create(
            public_id=f"upload_{name}",
            project=project,
            filename="a",
            purpose="user_data",
            content_type="a/b",
            size_bytes=3,
            status=status,
            expires_at=expires_at,
        )
        stored(project, name, upload=upload)
    assert prune() == 2
    assert names(folder) == {"file-going-on"}
    assert Upload.objects.get(public_id="upload_late").status == UploadStatus.EXPIRED


def test_storage_that_fails_leaves_no_row_and_says_so(project: Project, folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.raises(UnavailableError) as caught:
        stored(project, "a")
    assert caught.value.code == "storage_unavailable"
    assert not StoredFile.objects.readable(project.pk).exists()
    folder.unlink()
    assert prune() <= 1
    assert not StoredFile.objects.exists()
    stored(project, "a")


def test_a_file_stays_whose_commit_has_no_answer(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an upload that is completed has a file without content."""
    make_ready = type(StoredFile.objects).make_ready

    def lose_answer(*arguments: Any) -> bool:
        make_ready(*arguments)
        raise OperationalError("the connection is lost")

    monkeypatch.setattr(type(StoredFile.objects), "make_ready", lose_answer)
    file = StoredFile(
        public_id="file-1", project=project, filename="a", purpose="user_data", size_bytes=3
    )
    with pytest.raises(OperationalError):
        storage.store(file, io.BytesIO(b"abc"))
    file.refresh_from_db()
    assert file.state == FileState.READY
    assert b"".join(storage.read(file)) == b"abc"


def test_content_is_deleted_later_when_storage_is_away(
    project: Project, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = stored(project, "a")

    def fail(name: str) -> None:
        raise OSError("gone")

    with monkeypatch.context() as broken:
        broken.setattr(storages["files"], "delete", fail)
        storage.delete([file])
        assert prune() == 0
    assert not StoredFile.objects.readable(project.pk).exists()
    assert prune() == 1
    assert names(folder) == set()


def test_files_that_cannot_be_deleted_keep_no_others_from_being_deleted(
    project: Project, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there are more of them than a pass tries, or each takes all of its time."""
    for n in range(12):
        stored(project, f"locked-{n}")
    stored(project, "free")
    StoredFile.objects.hide()
    erase = storages["files"].delete

    def fail(name: str) -> None:
        if "locked" in name:
            raise PermissionError(name)
        erase(name)

    with monkeypatch.context() as locked:
        locked.setattr(storages["files"], "delete", fail)
        assert prune() == 0
        assert prune() == 1
        assert "file-free" not in names(folder)
        StoredFile.objects.filter(pk=stored(project, "late").pk).hide()
        for _ in range(13):
            storage.prune(time.monotonic())
        assert "file-late" not in names(folder)
    assert prune() + prune() == 12
    assert names(folder) == set()


def test_files_are_deleted_although_all_of_the_time_went_into_finding_them(
    project: Project, folder: Path
) -> None:
    StoredFile.objects.filter(pk=stored(project, "a").pk).hide()
    assert storage.prune(time.monotonic()) == 1
    assert names(folder) == set()


def test_content_that_is_cut_is_an_error(project: Project, folder: Path) -> None:
    file = stored(project, "a")
    next(iter(folder.rglob("file-a"))).write_bytes(b"ab")
    with pytest.raises(UnavailableError):
        list(storage.read(file))


def test_a_file_that_is_deleted_before_its_content_is_opened_is_not_found(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    """It was a 503 and a traceback in the log, as if the storage were away."""
    file = stored(project, "a")
    content = storage.read(file)
    storage.delete([file])
    with pytest.raises(NotFoundError, match="No such File object: file-a"):
        next(content)
    assert caplog.records == []


def test_content_that_is_missing_is_an_error_of_the_storage(project: Project, folder: Path) -> None:
    file = stored(project, "a")
    next(iter(folder.rglob("file-a"))).unlink()
    with pytest.raises(UnavailableError):
        next(storage.read(file))
