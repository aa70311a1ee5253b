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
import datetime as dt
import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, TypeVar, TypeVarTuple

import psycopg
from django.db import InterfaceError, OperationalError, connection, connections, transaction
from django.db.models import QuerySet
from psycopg.abc import PQGen
from psycopg.types.numeric import Int8

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


# The module's text:
# """Database connections: borrowed from the pool for a short time, or outside of it; and what it
# means that the database is unavailable."""


DATABASE_UNAVAILABLE = (OperationalError, InterfaceError)
"""What is raised when PostgreSQL cannot do now what it could do later: it is down, silent, full,
out of connections, a standby or read-only, or a lock or a time-out was in the way. The one
definition: ``PooledConnection`` raises these classes for all of it, and for nothing that is wrong
with the statement itself."""

_LOCK_TIMEOUT_MS = 2_000
_STATEMENT_TIMEOUT_S = 30.0
_BEFORE_LIMIT_S = 0.5
"""The server ends a statement so much before this process would close the connection."""
_STILL_MS = 10_000


@contextmanager
def lent_connection() -> Iterator[None]:
    """Return the connection to the pool after the block, unless a transaction is open around it.

    A worker thread lives as long as a generation. If each held its connection, a worker would need
    one connection for every slot.
    """
    try:
        yield
    finally:
        if not connection.in_atomic_block:
            connection.close()


@contextmanager
def impatient_transaction(lock_ms: int | None = None) -> Iterator[None]:
    """Run the block in a transaction that does not wait long for a locked row or table.

    It waits for ``lock_ms``, or 2 s.

    Who holds it may be frozen, and one row must not hold up what is to be done with the others.
    Nor does a statement take long for another reason. Raise OperationalError then (``is_held_up``).
    """
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(*impatience(lock_ms))
        yield


def impatience(lock_ms: int | None = None) -> tuple[str, dict[str, str]]:
    """Return a statement, and its values, that bounds the waits of the transaction it is in."""
    statement = (
        "SELECT set_config('lock_timeout', %(lock_ms)s, true), "
        "set_config('statement_timeout', %(statement_ms)s, true)"
    )
    limit = limit_s()
    statement_s = _STATEMENT_TIMEOUT_S if limit is None else max(0.1, limit - _BEFORE_LIMIT_S)
    return statement, {
        "lock_ms": str(_LOCK_TIMEOUT_MS if lock_ms is None else lock_ms),
        "statement_ms": str(round(1000 * min(_STATEMENT_TIMEOUT_S, statement_s))),
    }


def is_held_up(error: Exception) -> bool:
    """Whether an ``impatient_transaction`` failed because it would have had to wait."""
    held_up = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled)
    return isinstance(error.__cause__, held_up)


def end_if_still() -> None:
    """Have the server end this transaction when it hears nothing for ``_STILL_MS``.

    For one that holds a row which others wait for: this process may be stopped in it.
    """
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = {_STILL_MS}")


def own_connection() -> psycopg.Connection[Any]:
    """Connect to PostgreSQL without the pool, whose connections may hang when the server does."""
    parameters = connection.get_connection_params()
    parameters.pop("pool", None)
    parameters.pop("context", None)
    parameters |= {"connect_timeout": 1, "cursor_factory": psycopg.Cursor}
    return PooledConnection.connect(**parameters)


# The module's text:
# """Statements that every request runs: PostgreSQL plans them once for each connection.
#
# To plan them takes it ten times as long as to run them. Django's own statements are planned each
# time, because their values are part of their text.
# """


def execute_prepared(statement: str, given: Mapping[str, Any]) -> psycopg.Cursor[Any]:
    """Run a statement; it is planned when its connection first runs it.

    That is Django's connection if the thread has one, and else one that is lent for this statement.
    The text must be one of a few. Raise Django's errors.
    """
    with _lent() as lent:
        return _run(lent, statement, given)


def execute_impatiently(statement: str, given: Mapping[str, Any]) -> psycopg.Cursor[Any]:
    """Run one statement like ``execute_prepared``, as the whole of an ``impatient_transaction``.

    It takes one round trip in place of four: what a pipeline sends is one transaction, unless one
    is open already.
    """
    with _lent() as lent, lent.pipeline():
        _run(lent, *impatience())
        return _run(lent, statement, given)


def execute_together(
    *statements: tuple[str, Mapping[str, Any]],
) -> list[psycopg.Cursor[Any]]:
    """Run statements like ``execute_prepared``, in one round trip and as one transaction.

    They become part of a transaction that is open already.
    """
    with _lent() as lent, lent.pipeline():
        return [_run(lent, statement, given) for statement, given in statements]


@contextmanager
def _lent() -> Iterator[psycopg.Connection[Any]]:
    with connection.wrap_database_errors:
        pool: Any = getattr(connection, "pool", None)  # Django's stubs do not know it.
        if connection.connection is not None or pool is None:
            connection.ensure_connection()
            connection.validate_no_broken_transaction()
            yield connection.connection
            return
        pool.open()
        lent = pool.getconn()
        try:
            yield lent
        finally:
            pool.putconn(lent)


def _run(
    lent: psycopg.Connection[Any], statement: str, given: Mapping[str, Any]
) -> psycopg.Cursor[Any]:
    values = {name: _typed(value) for name, value in given.items()}
    return psycopg.Cursor(lent).execute(statement, values, prepare=True)


def _typed(value: Any) -> Any:
    """Return whole numbers as one type: psycopg's depends on how large each is, and so would the
    plan."""
    if isinstance(value, list):
        return [_typed(entry) for entry in value]
    return Int8(value) if isinstance(value, int) and not isinstance(value, bool) else value


# The module's text:
# """Statements that are run every second: Django makes the SQL of each once.
#
# To make it takes a processor several times as long as to run the statement, and most of what a site
# without work costs is such statements.
# """


Arguments = TypeVarTuple("Arguments")
_MOST_KEPT = 16
"""How many texts are kept of one function: some of its arguments change, once a day for example."""


def repeated(
    make: Callable[[*Arguments], QuerySet[Any, Any]],
) -> Callable[[*Arguments], list[Any]]:
    """Have a function run the query that it returns, and return the rows as tuples.

    The function is called once for each set of arguments, which must be hashable; a time of the
    query is one of the database (``Now()``). It selects columns of plain types by
    ``values_list``: no field converts what is read.
    """

    @lru_cache(_MOST_KEPT)
    def made(*args: *Arguments) -> tuple[str, Any]:
        return make(*args).query.sql_with_params()

    @wraps(make)
    def run(*args: *Arguments) -> list[Any]:
        with connection.cursor() as cursor:
            cursor.execute(*made(*args))
            rows: list[Any] = cursor.fetchall()
        return rows

    return run


# The module's text:
# """Deleting what is older than it is kept for."""


def delete_older(rows: QuerySet[Any], limit: dt.datetime, until: float, batch: int) -> int:
    """Delete rows that were created before ``limit``, oldest first; return how many.

    Their ids grow with time. A transaction deletes a ``batch`` of them, so that writers of the
    table wait for one at most; none begins once the monotonic clock has passed ``until``.
    """
    deleted = 0
    while time.monotonic() < until:
        oldest = rows.order_by("pk").values_list("pk", "created_at")[:batch]
        gone = [pk for pk, created_at in oldest if created_at < limit]
        deleted += rows.filter(pk__in=gone).delete()[0]
        if len(gone) < batch:
            break
    return deleted
