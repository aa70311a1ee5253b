"""The content of files: stored, read and deleted through Django's storage API.

A row is written before its content and deleted after it, so a process that dies between the two
leaves a row that ``prune`` finds, and never content without a row.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from django.conf import settings
from django.core.files import File
from django.core.files.storage import Storage, storages
from django.db import IntegrityError
from django.utils import timezone

from inference_site.accounts.models import retention_cutoffs
from inference_site.core.errors.api_errors import FileStorageError, NotFoundError
from inference_site.core.storage.old_rows import delete_in_batches, old_ids, old_ids_among
from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE, release_connection_after
from inference_site.files.models import StoredFile, Upload

logger = logging.getLogger(__name__)


class FileDeleted(NotFoundError):
    """The file was deleted after its row had been read."""


class ContentMissing(FileStorageError):
    """The content of the file is missing."""


UNAVAILABLE = (FileStorageError, FileDeleted)
"""What ``read`` raises, for a worker, which knows no errors of the API."""

STORING_TIMEOUT = dt.timedelta(hours=1)
"""After this, the row of a file whose content is not complete is deleted."""
_CHUNK = 256 * 1024
_BATCH = 100
_MOST_FAILURES = 10
"""How many files one pass fails to delete before it stops: the storage may be away."""
_stopped_at = 0
"""The row at which the last pass stopped; 0 if it came to the end."""


def store(
    file: StoredFile,
    content: IO[bytes],
    *,
    has_quota: bool = True,
    completes: Upload | None = None,
    dates: Mapping[str, dt.datetime | None] | None = None,
    also: Callable[[], None] | None = None,
) -> None:
    """Store a new file with its content, and complete the upload in the moment it can be read.

    It has the ``dates`` from that moment on: ``prune`` deletes what is old or has expired. ``also``
    is called in the transaction of that moment; if it raises, the file stays hidden.

    Raise InvalidRequestError beyond the project's quota, unless the site itself makes the file, and
    FileStorageError if it cannot be stored, or the upload has ended; then nothing is left of it.
    """
    if has_quota:
        StoredFile.objects.accept(
            file,
            most_files=settings.FILES_PER_PROJECT,
            most_bytes=settings.FILE_BYTES_PER_PROJECT,
        )
    else:
        file.save(force_insert=True)
    try:
        with _storage_errors():
            _storage().save(file.key, File(content))
    except BaseException:
        delete([file])
        raise
    # PostgreSQL may fail and have committed this; if it has not, ``prune`` deletes the file.
    is_ready = StoredFile.objects.make_ready(file, completes, dates or {}, also)
    if not is_ready:  # It took more than an hour, or the upload was cancelled.
        delete([file])
        raise FileStorageError("The file was stored too slowly.")


def delete(files: Sequence[StoredFile]) -> None:
    """Delete files: hide them, then delete their content. What fails is done by ``prune``."""
    try:
        StoredFile.objects.filter(pk__in=[file.pk for file in files]).hide()
        for file in files:
            _erase(file)
    except (FileStorageError, IntegrityError, *DATABASE_UNAVAILABLE) as exc:
        logger.warning("the content of %d files is deleted later: %s", len(files), exc)


def _erase(file: StoredFile) -> None:
    """Delete the content, then the row.

    Raise FileStorageError, or IntegrityError if a worker adds a chunk of it to a vector store.
    """
    with _storage_errors():
        _storage().delete(file.key)
    StoredFile.objects.filter(pk=file.pk).delete()


def read(file: StoredFile, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the bytes from ``start`` to before ``end``. Opens the content at the first ``next``.

    Raise FileStorageError if it cannot be read, ContentMissing if it is not there, and FileDeleted
    if it was deleted meanwhile.
    """
    end = file.size_bytes if end is None else end
    left = end - start
    with _storage_errors():
        try:
            for chunk in _chunks(file.key, start, end) if left > 0 else ():
                left -= len(chunk)
                yield chunk
        except Exception as exc:
            with release_connection_after():
                is_deleted = not StoredFile.objects.ready().filter(pk=file.pk).exists()
            if not is_deleted and isinstance(exc, FileNotFoundError):
                logger.error("the content of file %s is missing: %s", file, exc)
                raise ContentMissing from exc
            if not is_deleted:
                raise
            raise FileDeleted(f"No such File object: {file.public_id}", param="id") from exc
    if left > 0:
        raise ContentMissing("A part of the file is missing.")


def _chunks(key: str, start: int, end: int) -> Iterator[bytes]:
    """Yield what the content has between these places, by ranges if the storage can."""
    files = _storage()
    if hasattr(files, "read_range"):
        yield from files.read_range(key, start, end, _CHUNK)
        return
    with files.open(key) as content:
        content.seek(start)
        while start < end and (chunk := content.read(min(_CHUNK, end - start))):
            start += len(chunk)
            yield chunk


def prune(until: float) -> int:
    """Delete old, expired, hidden and incomplete files, parts of ended uploads, and old uploads.

    Stop when the monotonic clock passes ``until``, or when storage fails again and again; at least
    one deletion is tried, because finding them may take all of the time. Return how many were
    deleted.
    """
    StoredFile.objects.filter(upload__in=Upload.objects.expire()).hide()
    # Half of the time: what many projects hide has to be deleted, too.
    hide_until = (time.monotonic() + until) / 2
    deleted = 0
    for project, since in retention_cutoffs("files_days", hide_until):
        uploads = Upload.objects.ended_before(since).filter(project=project).order_by("pk")
        deleted += delete_in_batches(uploads, hide_until, _BATCH)
        for ids in old_ids(StoredFile.objects.filter(project=project), since, hide_until, _BATCH):
            StoredFile.objects.filter(pk__in=ids, created_at__lt=since).hide()
        imported = old_ids_among(StoredFile, project, since, hide_until, _BATCH)
        StoredFile.objects.filter(pk__in=imported).hide()
    return deleted + _erase_hidden(until)


def _erase_hidden(until: float) -> int:
    """Delete the files that nobody can read any more; return how many (see ``prune``).

    A file whose deletion fails keeps no other from being deleted: each pass goes on behind the file
    at which the last one stopped, and begins again after the last file.
    """
    global _stopped_at  # noqa: PLW0603  # One value for the process.
    deleted = failures = 0
    files = StoredFile.objects.to_delete(timezone.now() - STORING_TIMEOUT).order_by("pk")
    after = _stopped_at if files.filter(pk__gt=_stopped_at).exists() else 0
    while True:
        batch = list(files.filter(pk__gt=after)[:_BATCH])
        for file in batch:
            after = file.pk
            try:
                _erase(file)
                deleted += 1
            except (FileStorageError, IntegrityError) as exc:
                failures += 1
                logger.warning("the content of file %s is deleted later: %s", file, exc)
            _stopped_at = after
            if time.monotonic() >= until or failures >= _MOST_FAILURES:
                return deleted
        if len(batch) < _BATCH:
            _stopped_at = 0
            return deleted


def _storage() -> Storage:
    return storages["files"]


@contextmanager
def _storage_errors() -> Iterator[Any]:
    """Raise FileStorageError for an error of the storage, which may have any type."""
    try:
        yield
    except UNAVAILABLE:
        raise
    except Exception as exc:
        logger.exception("the storage of files failed")
        raise FileStorageError from exc
