"""What lines of the log say of the request or run they belong to."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import redis
from django.db import OperationalError
from django.http import HttpResponse
from django.test import RequestFactory
from django.utils.log import log_response
from pythonjsonlogger.json import JsonFormatter

from inference_site.core.observability import logs
from inference_site.core.observability.logs import (
    AddLogFields,
    LineFormatter,
    add_log_fields,
    log_fields,
)


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What a logger of the site writes, as settings.LOGGING has it."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.addFilter(AddLogFields())
    handler.setFormatter(LineFormatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("test.facts")
    logger.addHandler(handler)
    yield out
    logger.removeHandler(handler)


def log(message: str, **extra: object) -> None:
    logging.getLogger("test.facts").warning(message, extra=extra)


def test_lines_carry_the_facts_that_are_known_by_then(written: io.StringIO) -> None:
    log("before")
    with log_fields({"request_id": "req_1"}):
        log("begun")
        add_log_fields(generation_id="chatcmpl-2")
        log("going on", status=200)
    add_log_fields(model="lost")
    log("after")
    assert written.getvalue().splitlines() == [
        "WARNING test.facts: before",
        "WARNING test.facts: begun request_id=req_1",
        "WARNING test.facts: going on status=200 request_id=req_1 generation_id=chatcmpl-2",
        "WARNING test.facts: after",
    ]


def test_a_redis_that_is_away_is_one_line_of_the_channel_layer(
    written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library logs a traceback each second."""
    logger = logging.getLogger("test.facts")
    monkeypatch.setattr(logger, "name", "channels_redis.pubsub")
    for error in (redis.AuthenticationError("wrong password"), ValueError("a fault")):
        try:
            raise error
        except Exception:
            logger.exception("Unexpected exception in receive task")
    first, second, *traceback = written.getvalue().splitlines()
    assert first == "WARNING channels_redis.pubsub: no hints: wrong password"
    assert second == "ERROR channels_redis.pubsub: Unexpected exception in receive task"
    assert traceback[-1] == "ValueError: a fault"


def test_a_page_without_its_database_is_one_line(
    written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("test.facts")
    monkeypatch.setattr(logger, "name", "django.request")
    try:
        raise OperationalError("connection refused\nIs the server running?")
    except OperationalError as exc:
        asked = RequestFactory().get("/admin/")
        log_response(
            "%s: %s",
            *("Service Unavailable", "/admin/"),
            response=HttpResponse(status=503),
            request=asked,
            logger=logger,
            exception=exc,
        )
    assert written.getvalue() == (
        "WARNING django.request: Service Unavailable: /admin/: connection refused status_code=503\n"
    )


def test_what_a_library_logs_of_each_attempt_to_connect_is_a_line_a_minute(
    written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: now))
    logger = logging.getLogger("test.facts")
    monkeypatch.setattr(logger, "name", "psycopg.pool")
    for number in range(90):
        logger.warning("error connecting in %r: %s", "pool-1", f"refused {number}")
        now += 1
    logger.warning("discarding closed connection: %r", "[BAD]")
    assert written.getvalue().splitlines() == [
        "WARNING psycopg.pool: error connecting in 'pool-1': refused 0",
        "WARNING psycopg.pool: error connecting in 'pool-1': refused 60",
        "WARNING psycopg.pool: discarding closed connection: '[BAD]'",
    ]


def test_what_a_line_says_itself_goes_before(written: io.StringIO) -> None:
    with log_fields({"status": "running", "message": "no field of a record is replaced"}):
        log("ended", status="completed")
    assert written.getvalue() == "WARNING test.facts: ended status=completed\n"


def test_facts_come_before_a_traceback(written: io.StringIO) -> None:
    with log_fields({"request_id": "req_1"}):
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("test.facts").exception("failed")
    first, second, *_, last = written.getvalue().splitlines()
    assert first == "ERROR test.facts: failed request_id=req_1"
    assert second.startswith("Traceback")
    assert last == "ValueError: boom"


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonFormatter()])
def test_lines_of_django_do_not_have_the_words_of_a_search(
    written: io.StringIO, formatter: logging.Formatter
) -> None:
    logger = logging.getLogger("test.facts")
    logger.handlers[0].setFormatter(formatter)
    request, failed = RequestFactory().get("/admin/?q=xylophone"), HttpResponse(status=500)
    log_response("Failed: %s", request.path, response=failed, request=request, logger=logger)
    assert "Failed: /admin/" in written.getvalue()
    assert "xylophone" not in written.getvalue()
