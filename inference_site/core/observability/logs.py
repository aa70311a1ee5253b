"""Log lines: the fields of the request or run that they belong to, their format, and redaction.

The start of a request or run opens a set of fields with ``log_fields``; ``add_log_fields`` adds
those that become known later. Every line that the same thread or asyncio task logs has all of them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE, fault_of_database

LogFields = dict[str, Any]
_ExceptionInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)

_fields: ContextVar[LogFields | None] = ContextVar("log_fields", default=None)

_SECURITY_LOGGERS = "django.security."
_HINTS_LOGGER = "channels_redis.pubsub"
_PAGES_LOGGER = "django.request"
_RECONNECTING_LOGGERS = {_HINTS_LOGGER, "psycopg.pool", "celery.worker.consumer.consumer"}
"""Of libraries that log each attempt to reach a server that is away, one or more a second."""
_REPEATED_AFTER_S = 60.0
_STANDARD_ATTRIBUTES = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}
_SECRET = re.compile(
    # The token of a link for setting a password (people/urls.py).
    r"(?P<link>/(?:reset|invitation)/[^/\s]+/)[^/\s?&\"']+"
    # A query parameter whose name says that it is a secret, or a code of single sign-on.
    r"|(?P<parameter>(?i:[?&;](?:[a-z0-9_.-]*(?:key|token|secret|password|passwd|signature)"
    r"|code|auth|authorization|state|session_state|sig)=))[^&;\s\"']+"
    # The credentials after the name of a scheme of HTTP authentication.
    r"|(?P<scheme>\b(?i:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"
    # An API key. The part of a key that the console shows is shorter.
    r"|(?P<key>\bsk-)[A-Za-z0-9_-]{16,}"
)


@contextmanager
def log_fields(fields: LogFields) -> Iterator[None]:
    """Add these fields, and those of ``add_log_fields``, to every line logged in this block."""
    token = _fields.set(fields)
    try:
        yield
    finally:
        _fields.reset(token)


def add_log_fields(**fields: Any) -> None:
    """Add fields to the lines of this request or run; outside of one, do nothing."""
    current = _fields.get()
    if current is not None:
        current.update(fields)


def redacted(text: str) -> str:
    """Return the text without the secrets that URLs and headers of requests may contain."""
    return _SECRET.sub(lambda found: found[found.lastgroup or 0] + "[redacted]", text)


def _escaped(text: str) -> str:
    """Return the text with every character escaped that is not printable.

    A line break would forge a log line, and a terminal that shows the log would act on escape
    sequences.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class AddLogFields(logging.Filter):
    """Adds the fields to log records; the handlers of ``settings.LOGGING`` use it.

    Django attaches the request to its own records. It is removed, because its text form contains
    the full URL with the words of a search. Django logs a request that it refuses for security,
    for example for its ``Host``, as an error of the server: here it is a warning without a
    traceback. So is a page that PostgreSQL or Redis did not answer, and what the channel layer logs
    while its Redis is away. What a library logs at each attempt to reach a server is shown once a
    minute, as an ``OutageLog`` does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown_at: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields to the record; fields of the record itself take precedence.

        Return whether the record is to be shown.
        """
        record.__dict__.pop("request", None)
        if record.name.startswith(_SECURITY_LOGGERS):
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        elif record.name in (_HINTS_LOGGER, _PAGES_LOGGER) and record.exc_info:
            _shorten_if_away(record)
        for name, value in (_fields.get() or {}).items():
            record.__dict__.setdefault(name, value)
        return not self._is_repeated(record)

    def _is_repeated(self, record: logging.LogRecord) -> bool:
        if record.name not in _RECONNECTING_LOGGERS or record.exc_info:
            return False
        text, now = (record.name, str(record.msg)), time.monotonic()
        if now - self._shown_at.get(text, -_REPEATED_AFTER_S) < _REPEATED_AFTER_S:
            return True
        self._shown_at[text] = now
        return False


def _shorten_if_away(record: logging.LogRecord) -> None:
    """Make a traceback one line of a warning if it says that Redis or PostgreSQL is away."""
    import redis  # Commands that use no Redis need not import it.

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, *DATABASE_UNAVAILABLE)):
        what = "no hints" if record.name == _HINTS_LOGGER else record.getMessage()
        record.msg, record.args = "%s: %s", (what, fault_of_database(error))
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"


class LineFormatter(logging.Formatter):
    """Formats a record as one readable line: the message, then the fields; then a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # The library's name.
        """Return the line, with the extra fields as ``name=value``."""
        extra = [f"{k}={v}" for k, v in record.__dict__.items() if k not in _STANDARD_ATTRIBUTES]
        return _escaped(redacted(" ".join([super().formatMessage(record), *extra])))

    def formatException(self, ei: _ExceptionInfo) -> str:  # The library's name.
        """Return a traceback."""
        lines = redacted(super().formatException(ei)).split("\n")
        return "\n".join(map(_escaped, lines))


class JsonLineFormatter(JsonFormatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        return redacted(super().format(record))
