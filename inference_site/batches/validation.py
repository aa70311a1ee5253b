"""Validation: reads the input file of a batch, checks every line, and stores the lines.

Nothing runs before all lines are valid. Each invalid line is an entry of the batch's ``errors``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from django.conf import settings

from inference_site.accounts.keys import Caller, caller_of_key
from inference_site.batches.models import Batch, BatchLine, BatchStatus
from inference_site.batches.requests import check_request, endpoints, new_line, read_line
from inference_site.core.errors.api_errors import (
    ApiError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from inference_site.files import storage
from inference_site.files.models import StoredFile
from inference_site.gateway.submission.admission import most_usage

_STORED_AT_ONCE = 200
_MOST_ERRORS = 100


def validate(batch: Batch) -> Iterator[None]:
    """Check and store all lines of a batch; each step does a part of the work.

    The batch is ``in_progress`` or ``failed`` after the last step. Whoever dies in between leaves
    it ``validating``, and the next validation begins again. Raise FileStorageError, then too.
    """
    caller = caller_of_key(batch.api_key_id)
    if caller is None:
        gone = InvalidRequestError("The API key is not valid any more.", code="invalid_api_key")
        _fail(batch, [_error(gone, None)])
        return
    BatchLine.objects.filter(batch=batch).delete()
    checked = _CheckedLines(batch, caller)
    some: list[BatchLine] = []
    try:
        for number, text in enumerate(_lines_of(batch), 1):
            if (line := checked.add(number, text)) is not None:
                some.append(line)
            if len(some) >= _STORED_AT_ONCE:
                BatchLine.objects.bulk_create(some)
                some = []
            if checked.is_over:
                break
            if number % 20 == 0:
                yield
    except NotFoundError as exc:
        _fail(batch, [_error(exc, None, "input_file_not_found")])
        return
    BatchLine.objects.bulk_create(some)
    if not checked.total and not checked.errors:
        empty = InvalidRequestError("The input file has no lines.", code="empty_file")
        checked.errors.append(_error(empty, None))
    if checked.errors:
        _fail(batch, checked.errors)
        return
    Batch.objects.move(
        batch,
        BatchStatus.IN_PROGRESS,
        total=checked.total,
        model=checked.model,
        most_cost=checked.most_cost,
    )


class _CheckedLines:
    """The lines of a batch that were read, with what must hold for all of them together."""

    def __init__(self, batch: Batch, caller: Caller) -> None:
        self._batch, self._caller = batch, caller
        self._endpoint = endpoints()[batch.endpoint]
        self._seen: set[bytes] = set()
        self.errors: list[dict[str, Any]] = []
        self.model, self.total, self.most_cost = "", 0, Decimal(0)

    @property
    def is_over(self) -> bool:
        """Whether no more lines need be read, because enough of them are invalid."""
        return len(self.errors) >= _MOST_ERRORS or self.total > settings.BATCH_MAX_LINES

    def add(self, number: int, text: bytes | None) -> BatchLine | None:
        """Return the row of a line; None for an empty and an invalid one."""
        try:
            return self._checked(number, text)
        except UnavailableError:  # A fault of the site: the validation begins again.
            raise
        except ApiError as exc:
            self.errors.append(_error(exc, number))
            return None

    def _checked(self, number: int, text: bytes | None) -> BatchLine | None:
        if text is None:
            raise InvalidRequestError(
                f"The line has more than {settings.MAX_BODY_BYTES} bytes.", code="line_too_long"
            )
        if not text.strip():
            return None
        self.total += 1
        if self.total > settings.BATCH_MAX_LINES:
            raise InvalidRequestError(
                f"The batch has more than {settings.BATCH_MAX_LINES} lines.",
                code="too_many_requests",
            )
        line = read_line(text, self._batch.endpoint)
        digest = hashlib.blake2b(line.custom_id.encode("utf-8", "replace"), digest_size=16).digest()
        if digest in self._seen:
            raise InvalidRequestError(
                "Invalid 'custom_id': an earlier line has the same.",
                param="custom_id",
                code="duplicate_custom_id",
            )
        self._seen.add(digest)
        submission = check_request(self._endpoint, self._caller, line.body)
        request = submission.document.request
        self.model = self.model or request.model
        if request.model != self.model:
            raise InvalidRequestError(
                f"Invalid 'body.model': earlier lines have the model '{self.model}'.",
                param="body.model",
                code="mismatched_model",
            )
        self.most_cost += most_usage(request).cost
        project_id = self._batch.project_id
        return new_line(self._batch, project_id, number, line.custom_id, line.body)


def _lines_of(batch: Batch) -> Iterator[bytes | None]:
    """Yield the lines of the input file; None for one that is longer than a request may be."""
    file = StoredFile.objects.get_readable(batch.project_id, batch.input_file_id)
    return split_lines(storage.read(file), settings.MAX_BODY_BYTES)


def split_lines(chunks: Iterable[bytes], most: int) -> Iterator[bytes | None]:
    """Yield the lines in these bytes; None for one of more than ``most`` bytes.

    No more than that is held, whatever a file contains.
    """
    held, is_too_long = bytearray(), False
    for chunk in chunks:
        for i, part in enumerate(chunk.split(b"\n")):
            if i:
                yield None if is_too_long else bytes(held)
                held, is_too_long = bytearray(), False
            is_too_long = is_too_long or len(held) + len(part) > most
            if is_too_long:
                held.clear()
            else:
                held += part
    if held or is_too_long:
        yield None if is_too_long else bytes(held)


def _error(exc: ApiError, number: int | None, code: str | None = None) -> dict[str, Any]:
    return {
        "code": code or exc.code or exc.type,
        "line": number,
        "message": exc.message,
        "param": exc.param,
    }


def _fail(batch: Batch, errors: list[dict[str, Any]]) -> None:
    """End a batch that has run nothing; its lines are deleted by ``models.prune``."""
    Batch.objects.move(batch, BatchStatus.FAILED, errors=errors)
