"""Uploaded files on their way into storage: nothing is left of one that fails."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.files.storage import FileSystemStorage
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import TemporaryFileUploadHandler
from django.test import Client

from inference_site.accounts.models import ApiKey
from inference_site.files.models import StoredFile, Upload
from inference_site.gateway import file_views

pytestmark = pytest.mark.django_db
CONTENT = b"0123456789abcdef" * 200_000  # Too large for memory: it goes to a temporary file.
Send = Callable[[], Any]
InParts = tuple[Client, str, dict[str, list[str]]]


@pytest.fixture(autouse=True)
def received(settings: Any, tmp_path: Path) -> Path:
    """The folder of files that are being received."""
    settings.FILE_UPLOAD_TEMP_DIR = str(tmp_path / "received")
    (tmp_path / "received").mkdir()
    return tmp_path / "received"


@pytest.fixture
def upload(api_key: tuple[ApiKey, str]) -> Send:
    """Uploads a file; returns the response."""

    def send() -> Any:
        file = SimpleUploadedFile("a.txt", CONTENT)
        return Client(headers={"Authorization": f"Bearer {api_key[1]}"}).post(
            "/v1/files", {"purpose": "user_data", "file": file}
        )

    return send


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No garbage collector, which would delete temporary files that a traceback keeps open."""
    gc.disable()
    yield
    gc.enable()


def open_files(folder: Path) -> list[str]:
    """The open files of this process that are, or were, in a folder."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # That of this listing.
            links.append(os.readlink(entry))
    return [link for link in links if link.startswith(str(folder))]


def test_an_uploaded_file_has_no_name_until_it_is_stored(
    upload: Send, received: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a process that is killed leaves nothing in the folder."""
    seen: list[tuple[list[str], list[Path]]] = []
    save = FileSystemStorage.save

    def watched(storage: FileSystemStorage, name: str, content: Any) -> str:
        seen.append((open_files(received), [*received.iterdir()]))
        return save(storage, name, content)

    monkeypatch.setattr(FileSystemStorage, "save", watched)
    answer = upload()
    assert answer.status_code == 200, answer.content
    [(opened, named)] = seen
    assert len(opened) == 1
    assert named == []
    stored = StoredFile.objects.get(public_id=answer.json()["id"])
    assert (received.parent / "files" / stored.key).read_bytes() == CONTENT


@pytest.mark.usefixtures("without_collector")
def test_a_disk_that_is_full_while_a_file_comes_keeps_nothing_of_it(
    upload: Send,
    received: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fill(self: Any, raw_data: bytes, start: int) -> None:
        self.file.write(raw_data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TemporaryFileUploadHandler, "receive_data_chunk", fill)
    answer = upload()
    assert answer.status_code == 503, answer.content
    assert answer.json()["error"]["code"] == "storage_unavailable"
    assert not open_files(received)
    assert f"a temporary file in {received} cannot be written: [Errno 28]" in caplog.text


@pytest.mark.usefixtures("without_collector")
def test_storage_that_fails_keeps_no_temporary_file(upload: Send, received: Path) -> None:
    (received.parent / "files").write_text("a file where the folder should be")
    answer = upload()
    assert answer.status_code == 503, answer.content
    assert not open_files(received)


@pytest.fixture
def in_parts(api_key: tuple[ApiKey, str]) -> InParts:
    """A client, the URL of an upload, and the body that completes it."""
    client = Client(headers={"Authorization": f"Bearer {api_key[1]}"})
    of_upload = {"filename": "a.txt", "purpose": "user_data", "bytes": 3, "mime_type": "text/plain"}
    url = f"/v1/uploads/{client.post('/v1/uploads', of_upload, 'application/json').json()['id']}"
    data = SimpleUploadedFile("part", b"abc")
    parts = {"part_ids": [client.post(f"{url}/parts", {"data": data}).json()["id"]]}
    return client, url, parts


def test_parts_that_cannot_be_joined_are_joined_later(
    in_parts: InParts, received: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client got a 500, and a file that was received left no reason in the log."""
    client, url, parts = in_parts
    received.rmdir()
    answer = client.post(f"{url}/complete", parts, "application/json")
    assert answer.status_code == 503, answer.content
    assert answer.json()["error"]["code"] == "storage_unavailable"
    assert f"a temporary file in {received} cannot be written" in caplog.text
    received.mkdir()
    answer = client.post(f"{url}/complete", parts, "application/json")
    assert answer.json()["status"] == "completed"


@pytest.mark.parametrize("ending", ["complete", "cancel"])
def test_an_upload_that_ends_while_another_request_completes_it_is_named(
    in_parts: InParts, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was about a part: the upload had it no more."""
    client, url, parts = in_parts
    require_pending = file_views._require_pending

    def end_meanwhile(upload: Upload) -> None:
        monkeypatch.setattr(file_views, "_require_pending", require_pending)
        require_pending(upload)
        assert client.post(f"{url}/{ending}", parts, "application/json").status_code == 200

    monkeypatch.setattr(file_views, "_require_pending", end_meanwhile)
    answer = client.post(f"{url}/complete", parts, "application/json")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_upload_status"


def test_part_whose_upload_ends_while_it_is_stored_is_refused(
    api_key: tuple[ApiKey, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a 503, which clients send again."""
    client = Client(headers={"Authorization": f"Bearer {api_key[1]}"})
    begun = {"filename": "a", "bytes": 1, "mime_type": "a/b", "purpose": "user_data"}
    address = f"/v1/uploads/{client.post('/v1/uploads', begun, 'application/json').json()['id']}"
    save = FileSystemStorage.save

    def save_late(*arguments: Any) -> str:
        assert client.post(f"{address}/cancel").status_code == 200
        return save(*arguments)

    monkeypatch.setattr(FileSystemStorage, "save", save_late)
    answer = client.post(f"{address}/parts", {"data": SimpleUploadedFile("a", b"x")})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_upload_status"
    assert not StoredFile.objects.exists()
