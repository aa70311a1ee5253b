"""Files of vector stores whose indexing is interrupted by a fault of the site."""

from __future__ import annotations

import datetime as dt
import io
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.db import transaction
from django.utils import timezone
from pytest_django.fixtures import Settings

from inference_site.accounts.models import ApiKey
from inference_site.core.errors.api_errors import UnavailableError
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.files import storage
from inference_site.files.models import FileState, StoredFile
from inference_site.runs.streams.batches import Ending
from inference_site.vector_stores import chunks, kinds, models
from inference_site.vector_stores.models import (
    MAX_ATTEMPTS,
    Chunk,
    IndexingStatus,
    VectorStore,
    VectorStoreFile,
    VectorStoreFileQuerySet,
)
from inference_site.vector_stores.search import require_language
from tests.waiting import wait_for_a_wait
from worker.indexing import Indexing, _Document

pytestmark = pytest.mark.django_db
AGAIN = {"status": IndexingStatus.IN_PROGRESS, "attempts": 0, "worked_by": ""}
"""What a file becomes that is added again after it was cancelled or has failed."""


@pytest.fixture
def entry(folder: Path, api_key: tuple[ApiKey, str]) -> VectorStoreFile:
    """A file that waits in a store."""
    key = api_key[0]
    file = StoredFile(
        public_id="file-1", project_id=key.project_id, filename="tea.txt", size_bytes=3
    )
    storage.store(file, io.BytesIO(b"Tea"))
    store = VectorStore.objects.create(
        public_id="vs_1", project_id=key.project_id, embedding_model="demo", language="english"
    )
    return VectorStoreFile.objects.create(
        store=store,
        file=file,
        project_id=key.project_id,
        api_key=key,
        chunk_size=100,
        chunk_overlap=0,
    )


def claimed(worker: str = "one", held: tuple[int, ...] = ()) -> VectorStoreFile | None:
    return VectorStoreFile.objects.claim(worker, held, ["one", "two"], {}, 600)


def cancelled_and_added_again(entry: VectorStoreFile) -> None:
    VectorStoreFile.objects.filter(pk=entry.pk).cancel()
    VectorStoreFile.objects.filter(pk=entry.pk).update(**AGAIN)


def complete(entry: VectorStoreFile) -> None:
    """Have another worker index the file."""
    claim = claimed("two")
    assert claim is not None
    Chunk.objects.create(store=entry.store, file=entry, position=0, embedding=[1.0], dimensions=1)
    assert VectorStoreFile.objects.end(claim, IndexingStatus.COMPLETED, chunk_count=1)


def indexed(entry: VectorStoreFile) -> IndexingStatus:
    """Index the file as soon as it may be claimed; return its status after that."""
    VectorStoreFile.objects.update(worked_until=None)
    claim = claimed()
    assert claim is not None
    _Document(claim).index()
    entry.refresh_from_db()
    return IndexingStatus(entry.status)


def test_a_run_that_was_lost_is_repeated_and_one_that_failed_is_not(
    entry: VectorStoreFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file had failed for ever when Redis lost the request of its embeddings."""

    def indexed_with(status: int, code: str) -> IndexingStatus:
        ending = Ending((), status, b"{}", error_code=code)
        monkeypatch.setattr(kinds, "run_and_wait", lambda *_, **__: ending)
        return indexed(entry)

    for _ in range(MAX_ATTEMPTS + 1):  # A busy server is no attempt.
        assert indexed_with(429, "rate_limit_exceeded") == IndexingStatus.IN_PROGRESS
        assert (entry.worked_by, entry.attempts) == ("", 0)
    for number in range(1, MAX_ATTEMPTS):
        assert indexed_with(503, "worker_unavailable") == IndexingStatus.IN_PROGRESS
        assert (entry.worked_by, entry.attempts) == ("", number)
    assert indexed_with(503, "worker_unavailable") == IndexingStatus.FAILED
    VectorStoreFile.objects.update(status=IndexingStatus.IN_PROGRESS, attempts=0)
    assert indexed_with(500, "model_error") == IndexingStatus.FAILED


def test_a_file_waits_for_a_storage_that_is_away(
    entry: VectorStoreFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that waited had failed for ever after 15 seconds."""
    monkeypatch.setattr(_Document, "_embed", lambda _, texts: [array("f", [1, 0])] * len(texts))
    monkeypatch.setattr(chunks, "add", lambda *_: True)

    away = folder.rename(folder.with_name("away"))
    for _ in range(MAX_ATTEMPTS + 1):
        assert indexed(entry) == IndexingStatus.IN_PROGRESS
        assert (entry.worked_by, entry.attempts) == ("", 0)
    away.rename(folder)
    assert indexed(entry) == IndexingStatus.COMPLETED
    away = folder.rename(folder.with_name("away"))
    a_day_ago = timezone.now() - dt.timedelta(days=1, minutes=1)
    again = {"status": IndexingStatus.IN_PROGRESS, "worked_by": "", "attempts": 0}
    VectorStoreFile.objects.update(**again, created_at=a_day_ago)
    for _ in range(1, MAX_ATTEMPTS):
        assert indexed(entry) == IndexingStatus.IN_PROGRESS
    assert indexed(entry) == IndexingStatus.FAILED
    assert entry.error_message == "The content of the file cannot be read."


def test_a_statement_that_postgresql_refuses_is_not_repeated_for_ever(
    entry: VectorStoreFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt computes the embeddings again, which the project pays for."""
    VectorStore.objects.update(language="klingon")
    monkeypatch.setattr(_Document, "_embed", lambda _, texts: [array("f", [1, 0])] * len(texts))
    for _ in range(MAX_ATTEMPTS):
        VectorStoreFile.objects.update(worked_until=None)
        claim = claimed()
        assert claim is not None
        _Document(claim).index()
    entry.refresh_from_db()
    assert IndexingStatus(entry.status) == IndexingStatus.FAILED


def test_a_language_that_postgresql_does_not_know_is_told_before_a_store_is_made(
    entry: VectorStoreFile, settings: Settings
) -> None:
    require_language()
    settings.VECTOR_STORE_LANGUAGE = "klingon"
    with pytest.raises(UnavailableError, match="its setting VECTOR_STORE_LANGUAGE is no text"):
        require_language()


def test_a_claim_that_its_worker_does_not_know_of_is_over(entry: VectorStoreFile) -> None:
    """The database was away when the worker made it, or wanted to give it back."""
    assert claimed("one") is not None
    assert claimed("two") is None
    assert claimed("one", held=(entry.pk,)) is None
    again = claimed("one")
    assert again is not None
    assert again.attempts == 1


def test_a_file_that_is_added_again_is_not_claimed_by_the_worker_that_still_reads_it(
    entry: VectorStoreFile,
) -> None:
    """Both threads had one claim: the first completed the file after the second had deleted the
    chunks.
    """
    assert claimed("one") is not None
    cancelled_and_added_again(entry)
    assert claimed("one", held=(entry.pk,)) is None
    assert claimed("one") is not None


def test_a_file_that_is_being_deleted_is_not_claimed(entry: VectorStoreFile) -> None:
    """Each attempt to read it logged a traceback, as if the storage had failed."""
    StoredFile.objects.hide()
    assert claimed() is None


def test_a_worker_that_has_lost_its_claim_deletes_no_chunks_of_the_next(
    entry: VectorStoreFile,
) -> None:
    """It stood still before its first step: a completed file had no chunks after that."""
    lost = claimed("one")
    assert lost is not None
    cancelled_and_added_again(entry)
    complete(entry)
    _Document(lost).index()
    assert Chunk.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_file_is_not_taken_out_of_its_store_between_its_claim_and_the_reading_of_it(
    entry: VectorStoreFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log had a traceback; had another worker claimed it meanwhile, both had one claim."""
    select_related = VectorStoreFileQuerySet.select_related

    def take_out() -> None:
        with release_connection_after(), transaction.atomic():
            for row in VectorStoreFile.objects.select_for_update(skip_locked=True):
                row.delete()

    def select_late(files: VectorStoreFileQuerySet, *names: str) -> VectorStoreFileQuerySet:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(take_out).result(60)
        return select_related(files, *names)

    monkeypatch.setattr(VectorStoreFileQuerySet, "select_related", select_late)
    assert claimed() == entry


@pytest.mark.django_db(transaction=True)
def test_a_file_that_has_failed_is_added_again_only_without_its_chunks(
    entry: VectorStoreFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker with which it had failed deleted the chunks of the next one."""
    monkeypatch.setattr(storage, "read", lambda _: [b"\xff\xfe\xfd\xfc\0"])
    delete_of = chunks.delete_of

    def add_again() -> None:
        with release_connection_after():
            if VectorStoreFile.objects.filter(status=IndexingStatus.FAILED).update(**AGAIN):
                complete(entry)

    def add_again_before(claim: VectorStoreFile) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(add_again).result(60)
        delete_of(claim)

    monkeypatch.setattr(chunks, "delete_of", add_again_before)
    assert indexed(entry) == IndexingStatus.FAILED
    assert not Chunk.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_file_is_deleted_while_a_worker_adds_its_chunks(entry: VectorStoreFile) -> None:
    """The client got a 500, though nobody could read the file any more."""
    claim = claimed()
    assert claim is not None

    def delete() -> None:
        with release_connection_after():
            storage.delete([entry.file])

    chunk = Chunk(store=entry.store, file=entry, position=0, embedding=[1.0], dimensions=1)
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            assert VectorStoreFile.objects.is_held(claim)
            deleting = pool.submit(delete)
            wait_for_a_wait()
            chunk.save()
        deleting.result(60)
    assert StoredFile.objects.get().state == FileState.DELETING
    assert not VectorStoreFile.objects.renew(claim, 600)
    assert storage.prune(time.monotonic() + 60) == 1
    assert not Chunk.objects.exists()


def test_no_file_of_an_expired_store_is_completed_while_its_chunks_are_deleted(
    entry: VectorStoreFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that was used again meanwhile had completed files of which a part was found."""
    for position in (1, 2):
        Chunk.objects.create(
            store=entry.store, file=entry, position=position, embedding=[1.0], dimensions=1
        )
    complete(entry)
    monkeypatch.setattr(models, "_DELETED_AT_ONCE", 1)
    monkeypatch.setattr(models, "time", SimpleNamespace(monotonic=count().__next__))
    assert models.prune(1.0) == 0
    VectorStore.objects.update(expires_at=timezone.now())
    assert models.prune(1.0) == 1
    VectorStore.objects.update(expires_at=None)
    entry.refresh_from_db()
    assert (entry.status, Chunk.objects.count()) == (IndexingStatus.CANCELLED, 2)
    assert models.prune(9.0) == 0
    VectorStore.objects.update(expires_at=timezone.now())
    assert models.prune(9.0) == 3
    assert not VectorStoreFile.objects.exists()


def test_the_stop_of_a_worker_is_no_attempt_to_index_its_file(entry: VectorStoreFile) -> None:
    """Three planned restarts while a long file was indexed made it fail."""
    indexing = Indexing("one")
    claim = claimed("one")
    assert claim is not None
    indexing.stop()
    assert not VectorStoreFile.objects.is_held(claim)
    again = claimed("two")
    assert again is not None
    assert again.attempts == 1
