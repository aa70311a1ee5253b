"""What every line of the log says of the request or run that it belongs to.

Whoever begins one opens a set of facts; what is found out later is noted in it; every line that is
logged meanwhile, on that thread or in that task, carries all of them.
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
    """Have the lines that are logged inside carry these facts, and what is noted meanwhile."""
    token = _current.set(facts)
    try:
        yield
    finally:
        _current.reset(token)


def note(**facts: Any) -> None:
    """Add to the facts of the request or run that goes on here; outside of any, do nothing."""
    current = _current.get()
    if current is not None:
        current.update(facts)


class AddFacts(logging.Filter):
    """Puts the facts into the records; for the handlers of ``settings.LOGGING``.

    Takes out the request that Django gives to its own lines: as a text it has the whole address,
    with the words of a search.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add them to the record; what the line itself says goes before."""
        record.__dict__.pop("request", None)
        for name, value in (_current.get() or {}).items():
            record.__dict__.setdefault(name, value)
        return True


class LineFormatter(logging.Formatter):
    """One line for people to read: the message, then the ids and whatever else was given."""

    def format(self, record: logging.LogRecord) -> str:
        """Append what is no part of every record, as ``name=value``, before a traceback."""
        given = [f"{k}={v}" for k, v in record.__dict__.items() if k not in _STANDARD]
        if not given:
            return super().format(record)
        line, newline, traceback = super().format(record).partition("\n")
        return f"{line} {' '.join(given)}{newline}{traceback}"


_STANDARD = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}
