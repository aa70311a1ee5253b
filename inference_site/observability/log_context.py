"""Log context: the fields that every log line of one request or run carries.

The start of a request or run opens a set of fields with ``logged_with``; ``note`` adds fields that
become known later. Every line logged by the same thread or asyncio task carries all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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
    contains the full URL with the words of a search.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields to the record; fields of the record itself take precedence."""
        record.__dict__.pop("request", None)
        for name, value in (_current.get() or {}).items():
            record.__dict__.setdefault(name, value)
        return True


class LineFormatter(logging.Formatter):
    """Formats a record as one readable line: the message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Append the extra fields as ``name=value``, before a traceback."""
        given = [f"{k}={v}" for k, v in record.__dict__.items() if k not in _STANDARD]
        if not given:
            return super().format(record)
        line, newline, traceback = super().format(record).partition("\n")
        return f"{line} {' '.join(given)}{newline}{traceback}"


_STANDARD = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}
