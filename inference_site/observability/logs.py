"""Log context: the fields that every log line of one request or run carries.

The start of a request or run opens a set of fields with ``logged_with``; ``note`` adds fields that
become known later. Every line logged by the same thread or asyncio task carries all of them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

Facts = dict[str, Any]

_current: ContextVar[Facts | None] = ContextVar("log_facts", default=None)


@contextmanager
def logged_with(facts: Facts) -> Iterator[None]:
    """Add these fields, and those added by ``note``, to every line logged in this block."""
    token = _current.set(facts)
    try:
        yield
    finally:
        _current.reset(token)


def note(**facts: Any) -> None:
    """Add fields to the log context of this request or run; without a context, do nothing."""
    current = _current.get()
    if current is not None:
        current.update(facts)


class AddFacts(logging.Filter):
    """Adds the fields to log records; used by the handlers of ``settings.LOGGING``.

    Removes the request object that Django attaches to its own records, because its text form
    contains the full URL with the words of a search. Django logs a request that it refuses for
    security's sake, as for its ``Host``, like a failure of the server: it becomes a warning without
    a traceback.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields to the record; fields of the record itself take precedence."""
        record.__dict__.pop("request", None)
        if record.name.startswith(_REFUSALS):
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        for name, value in (_current.get() or {}).items():
            record.__dict__.setdefault(name, value)
        return True


class LineFormatter(logging.Formatter):
    """Formats a record as one readable line: the message, then the fields; then a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # The library's name.
        """Return the line, with the extra fields as ``name=value``."""
        given = [f"{k}={v}" for k, v in record.__dict__.items() if k not in _STANDARD]
        return one_line(redacted(" ".join([super().formatMessage(record), *given])))

    def formatException(self, ei: _ExceptionInfo) -> str:  # The library's name.
        """Return a traceback."""
        lines = redacted(super().formatException(ei)).split("\n")
        return "\n".join(map(one_line, lines))


class ObjectFormatter(JsonFormatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        return redacted(super().format(record))


_ExceptionInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)
_REFUSALS = "django.security."
_STANDARD = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}


# The module's text:
# """Text of clients as the log and traces may have it: without secrets, and on one line."""


_HIDDEN = "[redacted]"
_SECRET = re.compile(
    # The token of a link with which somebody sets a password (people/urls.py).
    r"(?P<link>/(?:reset|invitation)/[^/\s]+/)[^/\s?&\"']+"
    # A parameter of a query whose name says that it is a secret; also a code of single sign-on.
    r"|(?P<parameter>(?i:[?&;](?:[a-z0-9_.-]*(?:key|token|secret|password|passwd|signature)"
    r"|code|auth|authorization|state|session_state|sig)=))[^&;\s\"']+"
    # What follows the name of a scheme of HTTP authentication.
    r"|(?P<scheme>\b(?i:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"
    # An API key, wherever it is. What the console shows of a key is shorter.
    r"|(?P<key>\bsk-)[A-Za-z0-9_-]{16,}"
)


def redacted(text: str) -> str:
    """Return the text without the secrets that URLs and headers of requests may hold."""
    return _SECRET.sub(lambda found: (found[found.lastgroup or 0]) + _HIDDEN, text)


def one_line(text: str) -> str:
    """Return the text with every character escaped that is not printable.

    A line break would forge a line, and a terminal that shows the log acts on escape sequences.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
