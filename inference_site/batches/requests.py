"""The requests of batches: which endpoints they may have, and what is submitted for a line.

An API app lists its endpoints in ``batch_endpoints`` of its ``AppConfig``. Its modules are imported
when a batch first needs one: beat, which works on the batches, does not need them otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import orjson
from django.apps import apps
from django.utils.module_loading import import_string

from inference_site.accounts.keys import Caller
from inference_site.batches.models import OPENAI, Batch, BatchLine
from inference_site.core.errors.api_errors import ApiError, InvalidRequestError
from inference_site.core.storage.cipher import seal, unseal
from inference_site.gateway.api.payload import WireRequest, parse
from inference_site.gateway.submission.submit import Submission
from inference_site.runs.models import ServiceClass

_NOT_IN_BATCHES = ("stream", "background")
_MAX_CUSTOM_ID = 512


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
    for name in _NOT_IN_BATCHES:
        if body.get(name):
            path = f"body.{name}"
            raise _invalid(f"Invalid '{path}': a batch has no such requests.", param=path)
    try:
        return endpoint.submission_of(caller, body)
    except ApiError as exc:
        exc.param = f"body.{exc.param}" if exc.param else "body"
        raise


def _invalid(message: str, code: str | None = None, param: str | None = None) -> ApiError:
    return InvalidRequestError(message, param=param, code=code or "invalid_request")
