"""The one table that maps exceptions to API errors. Web and worker processes use it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import kombu.exceptions
import redis.exceptions
from django.http import Http404
from rest_framework import exceptions as drf

from inference_site.core.domain import errors as domain
from inference_site.core.errors.api_errors import (
    RETRY_AFTER_S,
    ApiError,
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    QueueTimeoutError,
    RateLimitError,
    UnavailableError,
    UnsupportedMediaError,
)
from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE, fault_of_database

logger = logging.getLogger(__name__)

_MOST_LINES = 60
_lines: dict[str, tuple[float, int]] = {}
"""For each code of a 503, when its minute ends and how many lines it has had in it."""
_lines_lock = threading.Lock()

LOAD_RETRY_S = 10
"""``Retry-After`` while a model is loading."""


def _retry_after_s(exc: domain.EngineUnavailable) -> int:
    return RETRY_AFTER_S if exc.retry_after_s is None else exc.retry_after_s


_OF_RESPONSES = "Your input exceeds the context window of this model."
"""How OpenAI's Responses API says it."""


def _prompt_too_long(exc: domain.ContextLengthExceeded) -> ApiError:
    """Return the error in OpenAI's words and in Anthropic's: agents compact after these words."""
    counts = f"{exc.input_tokens} tokens > {exc.context_length} maximum"
    said = counts if exc.input_tokens > exc.context_length else str(exc)
    return InvalidRequestError(
        f"{_OF_RESPONSES} {exc}" if exc.param == "input" else str(exc),
        param=exc.param,
        code="context_length_exceeded",
        anthropic_message=f"prompt is too long: {said}",
    )


_TABLE: tuple[tuple[tuple[type[Exception], ...], Callable[[Any], ApiError]], ...] = (
    ((domain.ContextLengthExceeded,), _prompt_too_long),
    ((domain.RequestTooLarge,), lambda e: PayloadTooLargeError(str(e))),
    (
        (domain.ImageNotSupported,),
        lambda e: InvalidRequestError(str(e), param=e.param, code="unsupported_parameter"),
    ),
    ((domain.InvalidRequest,), lambda e: InvalidRequestError(str(e), param=e.param)),
    (
        (domain.WorkerLost, domain.ModelServerLost),
        lambda e: UnavailableError(str(e), code="worker_lost", retry_after_s=1),
    ),
    (
        (domain.DocumentLost, domain.StreamLost, domain.ShuttingDown),
        lambda e: UnavailableError(str(e), code="worker_unavailable", retry_after_s=1),
    ),
    ((domain.Cancelled,), lambda e: UnavailableError(str(e), code="cancelled", retry_after_s=1)),
    (
        # A 400, because clients retry a 5xx.
        (domain.StoppedByOperator,),
        lambda e: InvalidRequestError(str(e.__doc__), code="stopped_by_operator"),
    ),
    ((domain.HookFailed,), lambda _: InternalError(code="hook_failed")),
    ((domain.QueueTimeout,), lambda e: QueueTimeoutError(str(e))),
    (
        (domain.ModelLoading,),
        lambda e: UnavailableError(str(e), code="model_loading", retry_after_s=LOAD_RETRY_S),
    ),
    ((domain.LoadFailed,), lambda e: UnavailableError(str(e), code="no_worker")),
    ((domain.ModelRemoved,), lambda e: NotFoundError(str(e), code="model_not_found")),
    ((domain.QueueFull,), lambda e: UnavailableError(str(e), code="queue_full")),
    ((domain.ProjectQueueFull,), lambda e: RateLimitError(str(e), code="project_queue_full")),
    ((domain.RedisFull,), lambda e: UnavailableError(str(e), code="queue_memory_full")),
    (
        (redis.exceptions.OutOfMemoryError,),
        lambda _: UnavailableError(str(domain.RedisFull()), code="queue_memory_full"),
    ),
    ((domain.ProjectQuotaReached,), lambda e: RateLimitError(str(e))),
    (
        (domain.RateLimited,),
        lambda e: RateLimitError(str(e), retry_after_s=_retry_after_s(e)),
    ),
    (
        (domain.EngineUnavailable,),
        lambda e: UnavailableError(
            str(e),
            code="engine_unavailable",
            retry_after_s=_retry_after_s(e),
        ),
    ),
    ((domain.EngineError,), lambda e: InternalError(f"The model failed: {e}", code="model_error")),
    (
        DATABASE_UNAVAILABLE,
        lambda _: UnavailableError("The database is not available.", code="database_unavailable"),
    ),
    (
        (redis.exceptions.RedisError, kombu.exceptions.OperationalError),
        lambda _: UnavailableError("The queue is not reachable.", code="queue_unavailable"),
    ),
    ((drf.MethodNotAllowed,), lambda e: MethodNotAllowedError(str(e.detail))),
    ((drf.UnsupportedMediaType,), lambda _: UnsupportedMediaError()),
    ((drf.NotAuthenticated, drf.AuthenticationFailed), lambda _: AuthenticationError()),
    ((Http404,), lambda _: NotFoundError()),
)
"""Exceptions, and how to make their API error; the first matching row applies."""


def api_error(exc: Exception) -> ApiError:
    """Return the API error for this exception; InternalError if the table has no matching row."""
    if isinstance(exc, ApiError):
        return exc
    make = next((make for types, make in _TABLE if isinstance(exc, types)), None)
    return InternalError() if make is None else make(exc)


def _has_line(code: str) -> bool:
    """Whether one more error with this code is logged in this minute."""
    now = time.monotonic()
    with _lines_lock:
        ends_at, lines = _lines.get(code, (0.0, 0))
        if now >= ends_at:
            ends_at, lines = now + 60, 0
        _lines[code] = ends_at, lines + 1
    return lines < _MOST_LINES


def log_error(what: str, exc: Exception, error: ApiError) -> None:
    """Log a server error (5xx); with a traceback if the table has no row for the exception.

    While a part of the site is away, that is the first ``_MOST_LINES`` of a minute with one code;
    the request log counts the others (``runs.request_log.refusals``). ``what`` begins the line.
    """
    if error.status < 500 or isinstance(exc, ApiError):
        return
    if error.status == 503 and not _has_line(error.code or error.type):
        return
    traceback = exc if error.status == 500 else None
    shown = exc if traceback else fault_of_database(exc)
    logger.error("%s: %s: %s", what, type(exc).__name__, shown, exc_info=traceback)
