"""Errors that clients see: a status and OpenAI's error envelope, never HTML or a traceback.

    ApiError
    ├── InvalidRequestError     400  the request is invalid; ``param`` names the field
    ├── AuthenticationError     401
    ├── ForbiddenError          403  the key is valid, but lacks the permission
    ├── NotFoundError           404
    ├── MethodNotAllowedError   405
    ├── RequestTimeoutError     408  the body did not arrive in time
    ├── ConflictError           409
    ├── PayloadTooLargeError    413
    ├── UriTooLongError         414
    ├── UnsupportedMediaError   415
    ├── RangeError              416
    ├── RateLimitError          429  try again; carries Retry-After
    │   └── QuotaError               a budget is used up
    ├── HeadersTooLargeError    431
    ├── InternalError           500
    └── UnavailableError        503  try again; carries Retry-After
        ├── StreamLostError          carries the usage if the generation has completed
        ├── FileStorageError         the disk is full, or the bucket is away
        └── QueueTimeoutError   504

``exceptions.api_error`` maps every other exception to one of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

RETRY_AFTER_S = 5
ANTHROPIC_VERSION = "anthropic-version"
"""The header that every request of Anthropic's clients has."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The names of errors in Anthropic's API, by their status."""
_ANTHROPIC_PHRASES = {
    "Missing required parameter: '{}'.": "Field required",
    "Unknown parameter: '{}'.": "Extra inputs are not permitted",
    "Invalid type for '{}': ": "",
    "Invalid value for '{}': ": "",
    "Invalid '{}': ": "",
    "{}: ": "",
}
"""How messages begin that name their field, and what Anthropic's API says after its path."""
_POSITION = re.compile(r"\[(\d*)\]")


def dotted(path: str) -> str:
    """Return the path of a field as Anthropic's API writes it: ``messages.0.content``."""
    return _POSITION.sub(r".\1", path)


def speaks_anthropic(path: str, *, has_version: bool) -> bool:
    """Whether errors of requests to this path have Anthropic's form.

    Models and files have both forms: Anthropic's for requests with the header of its version.
    """
    lists = ("/v1/models", "/v1/files") if has_version else ()
    return any(path == one or path.startswith(f"{one}/") for one in ("/v1/messages", *lists))


class ApiError(Exception):
    """The server had an error while processing your request."""

    status: ClassVar[int] = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic_message: str | None = None,
    ) -> None:
        self.message = message or (self.__doc__ or "").strip()
        super().__init__(self.message)
        self.anthropic_message = anthropic_message
        self.param = param
        self.code = code or self.code
        self.headers = dict(headers or {})

    @property
    def envelope(self) -> dict[str, Any]:
        """The response body: ``{"error": {message, type, param, code}}``, always all four keys."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def retry_after_s(self) -> int | None:
        """The value of ``Retry-After``, if it is set."""
        value = self.headers.get("Retry-After")
        return None if value is None else int(value)

    @property
    def body(self) -> bytes:
        """The envelope, encoded."""
        return orjson.dumps(self.envelope)

    def name_field(self, path: str) -> None:
        """Name this field of the client's request in place of ``param``, which was made from it."""
        if self.param:
            self.message = self.message.replace(f"'{self.param}'", f"'{path}'")
            self.param = path

    def shown_at(self, path: str, *, has_version: bool = False) -> dict[str, Any]:
        """Return the response body for a request to this path.

        Ollama's API has its own form, and so has Anthropic's. ``has_version``: the request has the
        header ``anthropic-version``.
        """
        if path.startswith("/api/"):
            return {"error": self.message}
        if speaks_anthropic(path.rstrip("/"), has_version=has_version):
            return self.anthropic_envelope
        return self.envelope

    @property
    def anthropic_envelope(self) -> dict[str, Any]:
        """The response body of Anthropic's API; the message begins with the path of the field.

        ``anthropic_message`` takes the place of such a message.
        """
        message = self.anthropic_message or self.message
        if self.param and self.anthropic_message is None:
            path = dotted(self.param)
            message = message.replace(f"'{self.param}'", f"'{path}'")
            for begins, instead in _ANTHROPIC_PHRASES.items():
                if self.message.startswith(said := begins.format(self.param)):
                    message = f"{instead}{self.message[len(said) :]}"
                    break
            message = f"{path}: {message}"
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        error: dict[str, Any] = {"type": kind, "message": message}
        if self.code:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error}


class InvalidRequestError(ApiError):
    """The request is invalid."""

    status = 400
    type = "invalid_request_error"


class AuthenticationError(ApiError):
    """You didn't provide an API key. Send it in the header 'Authorization: Bearer YOUR_KEY'."""

    status = 401
    type = "invalid_request_error"

    def __init__(self, message: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message, code=code, headers={"WWW-Authenticate": "Bearer"})


class ForbiddenError(ApiError):
    """The API key does not allow this."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class NotFoundError(ApiError):
    """Not found."""

    status = 404
    type = "invalid_request_error"


class MethodNotAllowedError(ApiError):
    """This method is not allowed here."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_supported"


class RequestTimeoutError(ApiError):
    """The request body did not come in time. Please try again."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class ConflictError(ApiError):
    """The object is in use."""

    status = 409
    type = "conflict_error"
    code = "conflict"


class PayloadTooLargeError(ApiError):
    """The request body is too large."""

    status = 413
    type = "invalid_request_error"


class UriTooLongError(ApiError):
    """The URL is too long: the head of a request may have 16384 bytes."""

    status = 414
    type = "invalid_request_error"
    code = "uri_too_long"


class HeadersTooLargeError(ApiError):
    """The headers are too large: the head of a request may have 16384 bytes."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class UnsupportedMediaError(ApiError):
    """The request body must be JSON: send 'Content-Type: application/json'."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_content_type"


class RangeError(ApiError):
    """The file has no bytes in this range."""

    status = 416
    type = "invalid_request_error"
    code = "range_not_satisfiable"


class RateLimitError(ApiError):
    """Too many requests. Please try again later."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str | None = None,
        *,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        headers = {**(headers or {}), "Retry-After": str(retry_after_s)}
        super().__init__(message, code=code, headers=headers)


class QuotaError(RateLimitError):
    """You exceeded your current quota."""

    type = "insufficient_quota"
    code = "insufficient_quota"


class InternalError(ApiError):
    """The server had an error while processing your request."""


class UnavailableError(ApiError):
    """The server is overloaded or a part of it is down. Please try again later."""

    status = 503
    code = "server_is_overloaded"

    def __init__(
        self,
        message: str | None = None,
        *,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message, code=code, headers={"Retry-After": str(retry_after_s)})


class StreamLostError(UnavailableError):
    """The stream was lost. Please try again."""

    code = "stream_lost"

    def __init__(
        self, tokens: tuple[int, int] | None = None, *, has_completed: bool = False
    ) -> None:
        """``tokens`` are the (input, output) tokens of a generation that has ended."""
        message = "The answer was completed and counted, but its stream was lost."
        super().__init__(message if has_completed else None)
        self._tokens = tokens

    @property
    def envelope(self) -> dict[str, Any]:
        """The response body; ``error`` has ``usage`` if the generation has ended."""
        envelope = super().envelope
        if self._tokens is not None:
            input_tokens, output_tokens = self._tokens
            envelope["error"]["usage"] = {
                "input_tokens": input_tokens,
                "output_tokens": output_tokens,
                "total_tokens": input_tokens + output_tokens,
            }
        return envelope


class FileStorageError(UnavailableError):
    """The storage of files is not available."""

    code = "storage_unavailable"


class QueueTimeoutError(UnavailableError):
    """The request waited too long for a free slot. Please try again later."""

    status = 504
    code = "queue_timeout"
