"""A generation with an image: the worker fetches, and the engine gets what was fetched."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from inference_site.accounts.models import ApiKey
from inference_site.core.domain.deltas import Finish, Usage
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import FilePart, GenerationRequest, ImagePart, TextPart
from inference_site.files import storage
from inference_site.files.models import StoredFile
from inference_site.runs.models import Generation, Status
from inference_site.runs.streams.request_documents import save_document
from tests.generations.rows import chat_document, create_generation
from tests.image_server import ImageServer
from tests.images import PNG, data_url, request_of
from tests.worker.runtime.test_run import LocalStream
from worker.engines.base import Sink
from worker.engines.scripted import ScriptedEngine
from worker.runtime.run import Run


class NotingEngine(ScriptedEngine):
    """Answers nothing, and notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(ModelSpec("m", "scripted"))
        self.requests: list[GenerationRequest] = []

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        self.requests.append(request)
        sink.feed(Finish("stop"))
        sink.feed(Usage())


def run(api_key: ApiKey, url: str) -> tuple[Generation, LocalStream, list[GenerationRequest]]:
    """Run a generation about the image; return its row, what went out, what the engine got."""
    return run_about(api_key, ImagePart(url, "messages"))


def run_about(
    api_key: ApiKey, part: ImagePart | FilePart
) -> tuple[Generation, LocalStream, list[GenerationRequest]]:
    """Run a generation about an image or a file, as ``run`` does."""
    public_id = create_generation(api_key).public_id
    request = request_of(TextPart("Look:"), part)
    document = replace(chat_document(public_id, "", stream=False), request=request)
    save_document(public_id, document, "web.one")
    claim = Generation.objects.claim("m", "w")
    assert claim is not None
    stream, engine = LocalStream(public_id), NotingEngine()
    Run(claim, stream).start(engine, lambda _: None)
    return Generation.objects.get(public_id=public_id), stream, engine.requests


@pytest.mark.usefixtures("private_network")
def test_the_engine_gets_the_image_and_not_its_address(
    api_key: tuple[ApiKey, str], server: ImageServer
) -> None:
    row, _, (request,) = run(api_key[0], server.give("/a", PNG))
    assert row.status == Status.COMPLETED
    assert request.messages[0].parts == (
        TextPart("Look:"),
        ImagePart(data_url(PNG), "messages"),
    )


def test_an_image_that_is_not_to_be_had_is_the_clients_fault(
    api_key: tuple[ApiKey, str], server: ImageServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        row, stream, requests = run(api_key[0], server.give("/a", PNG))
    assert row.status == Status.FAILED
    assert stream.ending.status == 400
    assert b"has no public address" in stream.ending.body
    assert not requests
    assert not server.asked
    assert all(record.levelno == logging.INFO for record in caplog.records)
    assert "127.0.0.1" not in caplog.text


@pytest.mark.usefixtures("folder")
def test_a_file_that_is_deleted_while_the_worker_reads_it_becomes_a_note(
    api_key: tuple[ApiKey, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request failed, as if the storage of files were away."""
    project = api_key[0].project
    file = StoredFile(public_id="file-1", project=project, purpose="user_data", size_bytes=3)
    storage.store(file, io.BytesIO(b"abc"))
    read = storage.read

    def read_too_late(found: StoredFile) -> Iterator[bytes]:
        storage.delete([found])
        return read(found)

    monkeypatch.setattr(storage, "read", read_too_late)
    row, _, (request,) = run_about(api_key[0], FilePart("messages", "file-1"))
    assert row.status == Status.COMPLETED
    assert "[The file file-1 was deleted.]" in str(request.messages[0])
    assert all(record.levelno < logging.WARNING for record in caplog.records)
