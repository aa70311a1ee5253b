"""The connections to PostgreSQL: each wait has a limit, and one is lent without a round trip.

A server that has vanished behind a pooler or a load balancer answers nothing, while the other end
of the connection acknowledges what is sent. Neither TCP nor PostgreSQL ends such a wait. So the
client does, after ``DATABASE_TIMEOUT_S`` in the processes that serve; then the connection is
closed, and the pool makes new ones.

The pool asks a connection something before it lends it, to learn whether it is still open. A server
that has closed it, or ended its session, has written to it: so the question is asked only of a
connection from which there is something to read.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import psycopg
from django.db import connections
from psycopg.abc import PQGen

logger = logging.getLogger(__name__)

NEVER_BY_ITSELF = 2**31
"""After so many executions psycopg prepares a statement that does not ask for it."""
_QUESTION = ""
"""What psycopg's pool asks, and Django has no say in."""
_QUESTION_S = 2.0
_CANCEL_S = 1.0
_DRAIN_EVERY_S = 1.0
_INTERVAL_S = 0.1
"""How often a wait looks whether it was interrupted; psycopg's own."""

_OTHER_PRIMARY = "25006"  # read_only_sql_transaction
_ENDED_BY_SERVER = frozenset({"25P03", "25P04"})  # time-outs in a transaction; the session is over.
_STATEMENT_TOO_LARGE = "54"  # program_limit_exceeded: the statement's fault, and it stays so.

Returned = TypeVar("Returned")


class ReadOnlyServer(psycopg.OperationalError):
    """The server takes no writes: it is a standby, or its operator or provider has said so."""


class _ProcessLimit:
    """The limit of this process's statements that have none of their own."""

    seconds: float | None = None


_own_limit: ContextVar[float | None] = ContextVar("own_limit")


def limit_statements(seconds: float) -> None:
    """Let no statement of this process wait for longer than this, unless it has its own limit.

    For processes that serve. Commands of administration, such as ``migrate``, have no limit.
    """
    _ProcessLimit.seconds = seconds


@contextlib.contextmanager
def statements_within(seconds: float | None) -> Iterator[None]:
    """Give the statements of the block, in this thread or task, a limit of their own; None: none.

    A process without a limit for statements has none here either.
    """
    token = _own_limit.set(seconds)
    try:
        yield
    finally:
        _own_limit.reset(token)


def limit_s() -> float | None:
    """Return for how long a statement may wait here and now, in seconds; None: for ever."""
    default = _ProcessLimit.seconds
    return default if default is None else _own_limit.get(default)


class PooledConnection(psycopg.Connection[Any]):
    """A connection whose waits are limited, and that knows whether its server has closed it.

    What means that the database is unavailable is an OperationalError, also where psycopg has
    another class for it (``storage.connections.DATABASE_UNAVAILABLE``).
    """

    def execute(self, query: Any, *args: Any, **options: Any) -> psycopg.Cursor[Any]:
        """Execute a statement; the pool's question only if there is something to read."""
        if query != _QUESTION:
            return super().execute(query, *args, **options)
        if self._is_quiet():
            return self.cursor()
        with statements_within(_QUESTION_S):
            return super().execute(query, *args, **options)

    def wait(
        self,
        gen: PQGen[Returned],
        interval: float = _INTERVAL_S,
        timeout: float | None = None,
    ) -> Returned:
        """Wait for the server (see psycopg), no longer than the limit.

        Each statement, each COMMIT and each fetch from a server's cursor is one wait. Past the
        limit the statement is cancelled; the connection is closed when no answer comes to that
        either. Raise OperationalError in both cases.
        """
        limit = limit_s() if timeout is None else timeout
        began = time.monotonic()
        try:
            return super().wait(gen, interval, limit)
        except psycopg.OperationalError as exc:
            if (exc.sqlstate or "").startswith(_STATEMENT_TOO_LARGE):
                raise psycopg.DataError(str(exc)) from exc
            is_late = timeout is None and limit is not None and time.monotonic() - began >= limit
            if is_late and not self.closed and exc.sqlstate is None:
                return self._end_late(gen, interval)
            raise
        except psycopg.InternalError as exc:
            if exc.sqlstate == _OTHER_PRIMARY:
                drain_pool()  # After a failover the same address leads to the new primary.
                raise ReadOnlyServer(str(exc)) from exc
            if exc.sqlstate in _ENDED_BY_SERVER:
                raise psycopg.OperationalError(str(exc)) from exc
            raise

    def _end_late(self, gen: PQGen[Returned], interval: float) -> Returned:
        """Cancel what is waited for, and wait for its end: a server that is only slow answers."""
        try:
            if psycopg.capabilities.has_cancel_safe():  # Else this might wait for as long.
                self.cancel_safe(timeout=_CANCEL_S)
                return super().wait(gen, interval, _CANCEL_S)
        except psycopg.errors.QueryCanceled:
            raise
        except psycopg.Error as exc:
            logger.debug("a statement could not be cancelled: %s", exc)
        logger.warning("PostgreSQL does not answer: the connection is closed")
        self.close()
        drain_pool()
        raise psycopg.OperationalError("PostgreSQL does not answer.")

    def _is_quiet(self) -> bool:
        if self.closed or self.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            return False
        poll = select.poll()  # ``select`` itself takes no descriptors above 1023.
        poll.register(self.fileno(), select.POLLIN)
        return not poll.poll(0)


class _Drains:
    """When the pool was drained the last time."""

    lock = threading.Lock()
    at = 0.0


def drain_pool() -> None:
    """Have the pool replace its connections: what has become of one has become of all.

    Those that are lent are replaced when they come back. Not more often than once in
    ``_DRAIN_EVERY_S``.
    """
    with _Drains.lock:
        now = time.monotonic()
        if now - _Drains.at < _DRAIN_EVERY_S:
            return
        _Drains.at = now
    pool: Any = getattr(connections["default"], "pool", None)  # Django's stubs do not know it.
    if pool is not None and not pool.closed:
        pool.drain()
