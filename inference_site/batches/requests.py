"""The requests of batches: which endpoints they may have, their validation, what is submitted.

An API app lists its endpoints in ``batch_endpoints`` of its ``AppConfig``. Its modules are imported
when a batch first needs one: beat, which works on the batches, does not need them otherwise.
Nothing runs before all lines are valid. Each invalid line is an entry of the batch's ``errors``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from typing import Any

import orjson
from django.apps import apps
from django.conf import settings
from django.utils.module_loading import import_string

from inference_site.accounts.keys import Caller, caller_of_key
from inference_site.batches.models import OPENAI, Batch, BatchLine, BatchStatus
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.models_file import Route
from inference_site.core.errors.api_errors import (
    ApiError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from inference_site.core.storage.cipher import seal, unseal
from inference_site.files import storage
from inference_site.files.models import StoredFile
from inference_site.gateway.api.payload import WireRequest, parse
from inference_site.gateway.submission.admission import most_usage
from inference_site.gateway.submission.submit import Submission
from inference_site.runs.models import ServiceClass

_NOT_IN_BATCHES = ("stream", "background")
_MAX_CUSTOM_ID = 512
_STORED_AT_ONCE = 200
_MOST_ERRORS = 100


@dataclass(frozen=True, slots=True)
class BatchEndpoint:
    """How a line of an endpoint is submitted; the first two are dotted names.

    ``body`` is the wire model of its requests. ``submission`` returns the submission for a caller
    and such a body. ``fixed`` are fields that every line has: they keep it in its service class.
    ``dialect`` is the API whose batches may have it.
    """

    body: str
    submission: str
    fixed: Mapping[str, Any]
    dialect: str = OPENAI

    def submission_of(self, caller: Caller, request: Mapping[str, Any]) -> Submission:
        """Return what is submitted for a request of a line. Raise ApiError."""
        for name in _NOT_IN_BATCHES:
            if request.get(name):
                message = f"Invalid '{name}': a batch has no such requests."
                raise InvalidRequestError(message, param=name, code="invalid_request")
        body: type[WireRequest] = import_string(self.body)
        make: Callable[[Caller, WireRequest], Submission] = import_string(self.submission)
        submission = make(caller, parse(body, {**request, **self.fixed}))
        return replace(
            submission,
            document=replace(submission.document, is_delivered=True),
            service_class=ServiceClass.BACKGROUND,
            background=True,
            grace_s=0,
        )


@cache
def endpoints() -> Mapping[str, BatchEndpoint]:
    """Return the endpoints of all apps by path."""
    found: dict[str, BatchEndpoint] = {}
    for config in apps.get_app_configs():
        for path, given in getattr(config, "batch_endpoints", {}).items():
            found[path] = BatchEndpoint(*given)
    return found


@dataclass(frozen=True, slots=True)
class LineRequest:
    """One line of an input file: the client's id for it, and the body of its request."""

    custom_id: str
    body: dict[str, Any]


def read_line(line: bytes, endpoint: str) -> LineRequest:
    """Return a line of an input file. Raise InvalidRequestError naming its field."""
    try:
        entry: Any = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        message = f"This line is not parseable as valid JSON: {exc}."
        raise _invalid(message, "invalid_json_line") from exc
    if not isinstance(entry, dict):
        raise _invalid("This line is not a JSON object.", "invalid_json_line")
    custom_id = entry.get("custom_id")
    if (
        not isinstance(custom_id, str)
        or not 0 < len(custom_id) <= _MAX_CUSTOM_ID
        or "\0" in custom_id
    ):
        raise _invalid(
            f"Invalid 'custom_id': expected a string of 1 to {_MAX_CUSTOM_ID} characters.",
            "invalid_custom_id",
            "custom_id",
        )
    if entry.get("method") != "POST":
        raise _invalid("Invalid 'method': the only supported value is 'POST'.", param="method")
    if entry.get("url") != endpoint:
        raise _invalid(
            f"Invalid 'url': it differs from the endpoint of the batch, '{endpoint}'.",
            "mismatched_endpoint",
            "url",
        )
    body = entry.get("body")
    if not isinstance(body, dict):
        raise _invalid("Invalid 'body': expected an object.", param="body")
    return LineRequest(custom_id, body)


def new_line(
    batch: Batch, project_id: int, number: int, custom_id: str, body: Mapping[str, Any]
) -> BatchLine:
    """Return the row of a line, which is not stored yet; its request is sealed."""
    request = seal(orjson.dumps(body).decode(), project_id)
    return BatchLine(batch=batch, number=number, custom_id=custom_id, request=request)


def body_of(line: BatchLine, project_id: int) -> dict[str, Any]:
    """Return the body of a line's request. Raise InvalidRequestError if it cannot be unsealed."""
    body: dict[str, Any] = orjson.loads(unseal(line.request, project_id, "body"))
    return body


def check_request(endpoint: BatchEndpoint, caller: Caller, body: Mapping[str, Any]) -> Submission:
    """Return the submission of a line's request, to see that it is valid.

    Raise InvalidRequestError with the path of the field in the line, or another ApiError.
    """
    try:
        return endpoint.submission_of(caller, body)
    except ApiError as exc:
        exc.param = f"body.{exc.param}" if exc.param else "body"
        raise


def _invalid(message: str, code: str | None = None, param: str | None = None) -> ApiError:
    return InvalidRequestError(message, param=param, code=code or "invalid_request")


def validate(batch: Batch) -> Iterator[None]:
    """Check and store all lines of a batch; each step does a part of the work.

    The batch is ``in_progress`` or ``failed`` after the last step. If the process dies in between,
    or a FileStorageError is raised, but for a file that is missing, it stays ``validating``, and
    the next validation begins again.
    """
    caller = caller_of_key(batch.api_key_id)
    if caller is None:
        error = InvalidRequestError("The API key is not valid any more.", code="invalid_api_key")
        _fail(batch, [_error(error, None)])
        return
    BatchLine.objects.filter(batch=batch).delete()
    checked = _CheckedLines(batch, caller)
    some: list[BatchLine] = []
    try:
        file = StoredFile.objects.get_readable(batch.project_id, batch.input_file_id)
        texts = split_lines(storage.read(file), settings.MAX_BODY_BYTES)
        for number, text in enumerate(texts, 1):
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
    except storage.ContentMissing:
        missing = InvalidRequestError(
            f"The content of the input file '{batch.input_file_id}' is missing.",
            param="input_file_id",
            code="input_file_not_found",
        )
        _fail(batch, [_error(missing, None)])
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
        named = catalogue().named(str(line.body.get("model") or ""))
        # Each line has a target of its own, which is chosen again when the line runs.
        model = named.id if isinstance(named, Route) else request.model
        self.model = self.model or model
        if model != self.model:
            raise InvalidRequestError(
                f"Invalid 'body.model': earlier lines have the model '{self.model}'.",
                param="body.model",
                code="mismatched_model",
            )
        self.most_cost += most_usage(request).cost
        project_id = self._batch.project_id
        return new_line(self._batch, project_id, number, line.custom_id, line.body)


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
