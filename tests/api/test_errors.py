"""The one table from exceptions to what clients are told."""

from __future__ import annotations

from collections.abc import Iterator

import kombu.exceptions
import orjson
import pytest
import redis.exceptions
from django.db import InterfaceError, OperationalError
from django.http import Http404
from rest_framework import exceptions as drf

from inference_site.core.domain import errors as domain
from inference_site.core.errors import exceptions
from inference_site.core.errors.api_errors import (
    ApiError,
    AuthenticationError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    UnavailableError,
)
from inference_site.core.errors.exceptions import api_error, log_error

CLIENT, SERVER = "invalid_request_error", "server_error"
TABLE: list[tuple[Exception, int, str, str | None, str | None]] = [
    (domain.ContextLengthExceeded(8, 9), 400, CLIENT, "context_length_exceeded", None),
    (domain.InvalidRequest("no", "messages"), 400, CLIENT, None, None),
    (domain.AnswerTooLong("no", 5), 400, CLIENT, None, None),
    (domain.ImageNotSupported("no", "messages"), 400, CLIENT, "unsupported_parameter", None),
    (domain.GenerationFailed("boom"), 500, SERVER, "model_error", None),
    (domain.EngineError("boom"), 500, SERVER, "model_error", None),
    (domain.EngineUnavailable("busy"), 503, SERVER, "engine_unavailable", "5"),
    (domain.EngineUnavailable("busy", 0), 503, SERVER, "engine_unavailable", "0"),
    (domain.EngineLoadError("bad"), 503, SERVER, "engine_unavailable", "5"),
    (domain.ModelServerUnreachable(), 503, SERVER, "engine_unavailable", "5"),
    (domain.ConnectionLost("cut"), 500, SERVER, "model_error", None),
    (domain.RateLimited("slow"), 429, "requests", "rate_limit_exceeded", "5"),
    (domain.RateLimited("slow", 9), 429, "requests", "rate_limit_exceeded", "9"),
    (domain.WorkerLost(), 503, SERVER, "worker_lost", "1"),
    (domain.ModelServerLost(is_suspect=True), 503, SERVER, "worker_lost", "1"),
    (domain.DocumentLost(), 503, SERVER, "worker_unavailable", "1"),
    (domain.StreamLost(), 503, SERVER, "worker_unavailable", "1"),
    (domain.ShuttingDown(), 503, SERVER, "worker_unavailable", "1"),
    (domain.Cancelled(), 503, SERVER, "cancelled", "1"),
    (domain.QueueFull(), 503, SERVER, "queue_full", "5"),
    (domain.ProjectQueueFull(), 429, "requests", "project_queue_full", "5"),
    (domain.RedisFull(), 503, SERVER, "queue_memory_full", "5"),
    (redis.exceptions.OutOfMemoryError("secret"), 503, SERVER, "queue_memory_full", "5"),
    (domain.ProjectQuotaReached(), 429, "requests", "rate_limit_exceeded", "5"),
    (domain.RequestTooLarge(9), 413, CLIENT, None, None),
    (domain.QueueTimeout(), 504, SERVER, "queue_timeout", "5"),
    (domain.ModelLoading(), 503, SERVER, "model_loading", "10"),
    (domain.LoadFailed(), 503, SERVER, "no_worker", "5"),
    (domain.ModelRemoved(), 404, CLIENT, "model_not_found", None),
    (domain.StoppedByOperator(), 400, CLIENT, "stopped_by_operator", None),
    (OperationalError("secret"), 503, SERVER, "database_unavailable", "5"),
    (InterfaceError("secret"), 503, SERVER, "database_unavailable", "5"),
    (redis.exceptions.ConnectionError("secret"), 503, SERVER, "queue_unavailable", "5"),
    (redis.exceptions.TimeoutError("secret"), 503, SERVER, "queue_unavailable", "5"),
    (kombu.exceptions.OperationalError("secret"), 503, SERVER, "queue_unavailable", "5"),
    (drf.MethodNotAllowed("PUT"), 405, CLIENT, "method_not_supported", None),
    (drf.UnsupportedMediaType("text/xml"), 415, CLIENT, "unsupported_content_type", None),
    (drf.NotAuthenticated(), 401, CLIENT, None, None),
    (drf.AuthenticationFailed(), 401, CLIENT, None, None),
    (Http404("secret"), 404, CLIENT, None, None),
    (ZeroDivisionError("secret"), 500, SERVER, None, None),
    (KeyError("secret"), 500, SERVER, None, None),
]


def test_prompt_that_is_too_long_is_said_in_the_words_of_each_api() -> None:
    counts = "This model's maximum context length is 8 tokens. However, your"
    chat = api_error(domain.ContextLengthExceeded(8, 9, "messages"))
    assert str(chat).startswith(f"{counts} messages resulted in 9 tokens.")
    responses = api_error(domain.ContextLengthExceeded(8, 9, "input"))
    beginning = "Your input exceeds the context window of this model."
    assert str(responses).startswith(f"{beginning} {counts} input resulted in 9 tokens.")
    assert responses.anthropic_envelope["error"]["message"].startswith("prompt is too long: 9")


@pytest.mark.parametrize(
    ("exc", "status", "type_", "code", "retry_after"), TABLE, ids=lambda v: type(v).__name__
)
def test_every_exception_has_its_status_type_and_code(
    exc: Exception, status: int, type_: str, code: str | None, retry_after: str | None
) -> None:
    error = api_error(exc)
    assert (error.status, error.type, error.code) == (status, type_, code)
    assert error.headers.get("Retry-After") == retry_after
    assert error.message
    assert "secret" not in error.message


def subclasses(root: type[Exception]) -> Iterator[type[Exception]]:
    for child in root.__subclasses__():
        yield child
        yield from subclasses(child)


def test_no_error_of_the_worker_is_missing_from_the_table() -> None:
    tested = {type(exc) for exc, *_ in TABLE}
    own = {c for c in subclasses(domain.EngineError) if not c.__name__.startswith("_")}
    assert own <= tested


@pytest.mark.parametrize(("exc", "status"), [(exc, status) for exc, status, *_ in TABLE])
def test_the_envelope_always_has_its_four_keys(exc: Exception, status: int) -> None:
    envelope = orjson.loads(api_error(exc).body)
    assert envelope.keys() == {"error"}
    assert envelope["error"].keys() == {"message", "type", "param", "code"}
    for key in ("param", "code"):
        assert envelope["error"][key] is None or isinstance(envelope["error"][key], str)


def test_the_context_error_has_the_words_that_clients_look_for() -> None:
    error = api_error(domain.ContextLengthExceeded(8, 9))
    assert error.param == "messages"
    assert "maximum context length is 8 tokens" in error.message
    assert "resulted in 9 tokens" in error.message


def test_an_error_for_clients_passes_as_it_is() -> None:
    error = InvalidRequestError("no", param="stop", code="x")
    assert api_error(error) is error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError(), 400, None),
        (AuthenticationError(), 401, None),
        (NotFoundError(), 404, None),
        (MethodNotAllowedError(), 405, "method_not_supported"),
        (PayloadTooLargeError(), 413, None),
        (UnavailableError(), 503, "server_is_overloaded"),
        (ApiError(), 500, None),
    ],
)
def test_the_docstring_is_the_message_unless_one_is_given(
    error: ApiError, status: int, code: str | None
) -> None:
    assert (error.status, error.code) == (status, code)
    assert error.message == (type(error).__doc__ or "").strip()


def test_a_refused_caller_is_told_how_to_authenticate() -> None:
    assert AuthenticationError().headers == {"WWW-Authenticate": "Bearer"}


def test_while_a_server_is_away_the_first_errors_of_a_minute_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands a second; an error that nobody expects always has its line."""
    monkeypatch.setattr(exceptions, "_lines", {})
    for exc in (redis.exceptions.ConnectionError("away"), OperationalError("away"), KeyError("x")):
        for _ in range(100):
            log_error("websocket", exc, api_error(exc))
    logged = [record.getMessage().split(": ")[1] for record in caplog.records]
    assert logged == ["ConnectionError"] * 60 + ["OperationalError"] * 60 + ["KeyError"] * 100
