"""The results of a batch: two files, of the answers and of the errors, in the order of the lines.

The id of each file is saved before it is stored, so that a process that continues after another has
died deletes that file. Its own files have other ids: the other process may only have stood still,
and would take the content of a file with the same id along when it gives up its own.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

import orjson
from django.db.models import Exists, OuterRef, QuerySet, Sum
from django.utils import timezone

from inference_site.batches.models import (
    ANTHROPIC,
    Batch,
    BatchLine,
    BatchStatus,
    LineState,
    delete_rows,
)
from inference_site.batches.requests import split_lines
from inference_site.core.errors.api_errors import InvalidRequestError, UnavailableError
from inference_site.core.storage.temporary_files import (
    new_temporary_file,
    temporary_file_errors,
)
from inference_site.files import storage
from inference_site.files.models import BATCH_LIFETIME, FilePurpose, StoredFile
from inference_site.runs.models import Generation
from inference_site.runs.queue import new_id

logger = logging.getLogger(__name__)

HELD_S = 60.0
"""For how long a process has a batch for itself, unless it renews that."""
_RENEWED_EVERY = 2_000
_DELETING_S = 0.5
_READ_AT_ONCE = 200
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_SKIPPED = {
    BatchStatus.EXPIRED: "This request could not be executed before the completion window expired.",
    BatchStatus.CANCELLED: "The batch was cancelled before this request was executed.",
}


class _Lost(Exception):
    """Another process works on the batch: this one stood still for longer than it was held."""


def finalize(batch: Batch, process: str) -> None:
    """Store the files of the results and end the batch, which this process holds.

    No line of it runs. Raise FileStorageError if the files cannot be stored; it is called again
    then.
    """
    batch.refresh_from_db()
    _delete_files(batch)
    batch.output_file_id, batch.error_file_id = new_id("file-"), new_id("file-")
    ids = {"output_file_id": batch.output_file_id, "error_file_id": batch.error_file_id}
    if not Batch.objects.filter(pk=batch.pk, worked_by=process).update(**ids):
        return
    try:
        _store_and_end(batch, process)
    except _Lost:
        logger.warning("batch %s: another process writes its results", batch)
        _delete_files(batch)
        return
    # Their content is in the files now. What is left of many lines is deleted by ``models.prune``.
    delete_rows(BatchLine.objects.filter(batch=batch), time.monotonic() + _DELETING_S)


def _store_and_end(batch: Batch, process: str) -> None:
    """Raise _Lost if another process works on the batch meanwhile."""
    completed = failed = 0
    with temporary_file_errors(), new_temporary_file() as answers, new_temporary_file() as errors:
        # Without a total it was cancelled while its lines were validated: it has no results.
        for line in _lines(batch) if batch.total else ():
            if line.number % _RENEWED_EVERY == 0:
                _renew(batch, process)
            is_success = line.state == LineState.ENDED and (line.status_code or 0) < 400
            if batch.dialect == ANTHROPIC:
                answers.write(message_result_of(batch, line))
            else:
                (answers if is_success else errors).write(result_of(batch, line))
            completed += is_success
            failed += line.state == LineState.ENDED and not is_success
        kept = {}
        for name, kind, content in (
            ("output_file_id", "output", answers),
            ("error_file_id", "error", errors),
        ):
            _renew(batch, process)
            kept[name] = _store(batch, getattr(batch, name), kind, content)
    has_ended = Batch.objects.move(
        batch,
        BatchStatus(batch.ends_as),
        **kept,
        completed=completed,
        failed=failed,
        skipped=batch.total - completed - failed,
        failures=BatchLine.objects.filter(batch=batch).failures(),
        usage=_usage_of(batch),
        cost=BatchLine.objects.filter(batch=batch).aggregate(sum=Sum("cost", default=0))["sum"],
    )
    if not has_ended:
        raise _Lost


def _renew(batch: Batch, process: str) -> None:
    if not Batch.objects.hold(batch, process, HELD_S):
        raise _Lost


def _delete_files(batch: Batch) -> None:
    """Delete the files of results that are not those of an ended batch."""
    ids = (batch.output_file_id, batch.error_file_id)
    storage.delete(list(StoredFile.objects.filter(public_id__in=ids)))


def result_of(batch: Batch, line: BatchLine) -> bytes:
    """Return the line of the results for a line: the answer as the API gave it, or an error."""
    request_id = batch.request_id(line.number)
    response = error = b"null"
    if line.state == LineState.ENDED and line.answer:
        status = str(line.status_code).encode()
        ids = orjson.dumps(line.generation_id or request_id)
        response = b'{"status_code":%b,"request_id":%b,"body":%b}' % (
            status,
            ids,
            line.answer.encode(),
        )
    else:
        is_skipped = line.state != LineState.ENDED
        code = f"batch_{batch.ends_as}" if is_skipped else line.error_code or "no_answer"
        message = "The request was not answered; send it again."
        if is_skipped:
            message = _SKIPPED.get(BatchStatus(batch.ends_as), message)
        error = orjson.dumps({"code": code, "message": message})
    head = orjson.dumps({"id": request_id, "custom_id": line.custom_id})[:-1]
    return b'%b,"response":%b,"error":%b}\n' % (head, response, error)


def message_result_of(batch: Batch, line: BatchLine) -> bytes:
    """Return the same for a batch of Anthropic's API."""
    head = orjson.dumps({"custom_id": line.custom_id})[:-1]
    if line.state != LineState.ENDED:
        kind = "expired" if batch.ends_as == BatchStatus.EXPIRED else "canceled"
        result = b'{"type":"%b"}' % kind.encode()
    elif (line.status_code or 0) < 400:
        result = b'{"type":"succeeded","message":%b}' % line.answer.encode()
    else:
        error = line.answer or orjson.dumps(UnavailableError().shown_at(batch.endpoint)).decode()
        result = b'{"type":"errored","error":%b}' % error.encode()
    return b'%b,"result":%b}\n' % (head, result)


def store_failed_requests(batch: Batch) -> str:
    """Store a file of the lines of the input file that are in the file of errors; return its id.

    Raise NotFoundError if one of the two was deleted, InvalidRequestError beyond the quota or for
    imported files that are none of a batch, and FileStorageError.
    """
    files = StoredFile.objects
    errors = files.get_readable(batch.project_id, batch.error_file_id)
    given = files.get_readable(batch.project_id, batch.input_file_id)
    failed = {_custom_id_of(line) for line in texts_of(errors)}
    with temporary_file_errors(), new_temporary_file() as chosen:
        for line in texts_of(given):
            if line.strip() and _custom_id_of(line) in failed:
                chosen.write(line + b"\n")
        file = _new_file(batch, new_id("file-"), "failed", FilePurpose.BATCH, chosen)
        storage.store(file, chosen)
    return file.public_id


def _custom_id_of(line: bytes) -> str:
    try:
        return str(orjson.loads(line)["custom_id"])
    except (ValueError, TypeError, KeyError) as exc:
        raise InvalidRequestError("A file of the batch has lines without a 'custom_id'.") from exc


def texts_of(file: StoredFile) -> Iterator[bytes]:
    """Yield the lines of a file that was validated or written here."""
    return (line for line in split_lines(storage.read(file), file.size_bytes) if line)


def _lines(batch: Batch) -> Iterator[BatchLine]:
    """Yield all lines in order, without their requests."""
    return _in_order(BatchLine.objects.filter(batch=batch))


def _in_order(lines: QuerySet[BatchLine]) -> Iterator[BatchLine]:
    rows = lines.defer("request").order_by("number")
    after = 0
    while some := list(rows.filter(number__gt=after)[:_READ_AT_ONCE]):
        yield from some
        after = some[-1].number


def _store(batch: Batch, file_id: str, kind: str, content: IO[bytes]) -> str:
    """Store a file of results; return its id, "" for an empty one, which is not kept."""
    file = _new_file(batch, file_id, kind, FilePurpose.BATCH_OUTPUT, content)
    if not file.size_bytes:
        return ""
    if batch.output_lifetime_s is not None:
        file.expires_at = file.created_at + dt.timedelta(seconds=batch.output_lifetime_s)
    storage.store(file, content, has_quota=False)
    return file_id


def _new_file(
    batch: Batch, file_id: str, kind: str, purpose: FilePurpose, content: IO[bytes]
) -> StoredFile:
    """Return the row of a file of lines, which is not stored yet; its content is at the end."""
    now, size = timezone.now(), content.tell()
    content.seek(0)
    return StoredFile(
        public_id=file_id,
        project_id=batch.project_id,
        filename=f"{batch.public_id}_{kind}.jsonl",
        purpose=purpose,
        content_type="application/jsonl",
        size_bytes=size,
        created_at=now,
        expires_at=now + BATCH_LIFETIME,
    )


def _usage_of(batch: Batch) -> dict[str, int]:
    """Return the tokens of the generations that answered the lines.

    Of a generation that was deleted after its retention, the tokens are read from the answer.
    """
    lines = BatchLine.objects.filter(batch=batch).exclude(generation_id=None)
    sums = {name: Sum(name, default=0) for name in _TOKENS}
    ids = lines.values("generation_id")
    found: dict[str, int] = Generation.objects.filter(public_id__in=ids).aggregate(**sums)
    rows = Generation.objects.filter(public_id=OuterRef("generation_id"))
    for line in _in_order(lines.filter(~Exists(rows)).exclude(answer="")):
        usage = orjson.loads(line.answer).get("usage") or {}
        found = {name: found[name] + tokens for name, tokens in _tokens_of(usage).items()}
    return found


def _tokens_of(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of an answer's usage, in the form of any endpoint of batches."""
    given = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    made = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
    # Anthropic's API counts them apart from the other input.
    read, written = (usage.get(f"cache_{name}_input_tokens") or 0 for name in ("read", "creation"))
    counts = (
        (usage.get("input_tokens") or usage.get("prompt_tokens") or 0) + read + written,
        given.get("cached_tokens") or read,
        usage.get("output_tokens") or usage.get("completion_tokens") or 0,
        made.get("reasoning_tokens") or 0,
    )
    return dict(zip(_TOKENS, counts, strict=True))
