"""PostgreSQL: connections with time limits, short transactions, and prepared statements.

Every wait for the server has a limit. A server that disappears behind a pooler or a load balancer
never answers, while the other end of the TCP connection still acknowledges what is sent, so neither
TCP nor PostgreSQL ends the wait. The client does, after ``DATABASE_TIMEOUT_S`` in the processes
that serve: it closes the connection, and the pool opens new ones.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Self, TypeVar, TypeVarTuple

import psycopg
from asgiref.sync import sync_to_async
from django.db import InterfaceError, OperationalError, connection, connections, transaction
from psycopg.abc import PQGen
from psycopg.types.numeric import Int8
from psycopg_pool import PoolTimeout

if TYPE_CHECKING:
    from django.db.models import QuerySet  # The settings import this module.

logger = logging.getLogger(__name__)

DATABASE_UNAVAILABLE = (OperationalError, InterfaceError)
"""The exceptions that mean: PostgreSQL cannot do this now, but may later. It is down, silent, full,
out of connections, not migrated yet, a standby or read-only, or a lock or a timeout was in the way.
``PooledConnection`` raises these classes for all of that, and not for faulty statements."""

TIMEOUTS = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled)
"""What psycopg raises when a lock or a limit of the server has stopped a statement."""
PREPARE_ONLY_ON_REQUEST = 2**31
"""``prepare_threshold`` of psycopg: it prepares only statements with ``prepare=True``."""
_LIVENESS_CHECK = ""
"""The statement that psycopg's pool sends before it lends a connection; Django cannot change it."""
_LIVENESS_CHECK_S = 2.0
_CANCEL_S = 1.0
_DRAIN_INTERVAL_S = 1.0
_INTERVAL_S = 0.1
"""How often a wait checks for signals; psycopg's default."""
_LOCK_TIMEOUT_MS = 2_000
_STATEMENT_TIMEOUT_S = 30.0
_SERVER_MARGIN_S = 0.5
"""The server's timeout is this much shorter than the client's, which closes the connection."""
_STILL_MS = 10_000
_MAX_CACHED_SQL = 16
"""Texts kept for each function; some arguments change, for example once a day."""

_READ_ONLY_TRANSACTION = "25006"
_NOT_PREPARED = frozenset({"26000", "42P05"})
"""A prepared statement is missing, or another client of the pooler has prepared one of its name."""
_ENDED_BY_SERVER = frozenset({"25P03", "25P04"})  # Timeouts in a transaction; the session is over.
_LIMIT_EXCEEDED = "54"  # Class program_limit_exceeded: the statement is at fault.

_NOT_MIGRATED = frozenset({"42P01", "42703"})
"""A table or a column is missing."""

Returned = TypeVar("Returned")
Arguments = TypeVarTuple("Arguments")

_process_timeout_s: float | None = None
_connection_fault = ""
"""Why the last attempt to connect has failed; "" when it has not."""
_block_timeout_s: ContextVar[float | None] = ContextVar("block_timeout_s")
_drain_lock = threading.Lock()
_drained_at = 0.0


def set_statement_timeout(seconds: float) -> None:
    """Limit the wait for every statement of this process that has no limit of its own.

    For processes that serve. Administrative commands, such as ``migrate``, have no limit.
    """
    global _process_timeout_s  # noqa: PLW0603  # A property of the process.
    _process_timeout_s = seconds


@contextmanager
def statement_timeout(seconds: float | None) -> Iterator[None]:
    """Give the statements of the block, in this thread or task, another limit; None is no limit.

    In a process without a limit the block has none either.
    """
    token = _block_timeout_s.set(seconds)
    try:
        yield
    finally:
        _block_timeout_s.reset(token)


def _current_timeout_s() -> float | None:
    return None if _process_timeout_s is None else _block_timeout_s.get(_process_timeout_s)


class ReadOnlyServer(psycopg.OperationalError):
    """The server rejects writes: it is a standby, or its operator or provider made it read-only."""


class LosesPreparedStatements(psycopg.OperationalError):
    """The pooler gives each transaction another session, and keeps no prepared statements."""


class NotMigrated(psycopg.OperationalError):
    """A table or a column is missing, which the migrations of this release make."""


class OutsideTransactions:
    """Whether no transaction is open, for Django's ``DISABLE_SERVER_SIDE_CURSORS``.

    A cursor of the server that outlives its transaction belongs to a session, and a pooler may give
    the next transaction another one. Outside of transactions, ``iterator()`` therefore reads
    all rows at once; forms of Django do so for the choices of a field.
    """

    def __bool__(self) -> bool:
        return not connection.in_atomic_block


class PooledConnection(psycopg.Connection[Any]):
    """A connection with a limit on each wait, and without a round trip when it is borrowed.

    It raises OperationalError for everything that means that the database is unavailable, also
    where psycopg raises another class (``DATABASE_UNAVAILABLE``).
    """

    @classmethod
    def connect(cls, *args: Any, **options: Any) -> Self:
        """Connect, and remember a fault: those who wait for the pool only get a timeout."""
        global _connection_fault  # noqa: PLW0603  # Of the one server of the process.
        try:
            connected = super().connect(*args, **options)
        except psycopg.Error as exc:
            _connection_fault = str(exc)
            raise
        _connection_fault = ""
        return connected

    def execute(self, query: Any, *args: Any, **options: Any) -> psycopg.Cursor[Any]:
        """Execute a statement; skip the pool's liveness check if the server has sent nothing.

        A server that has closed the connection or ended the session has written to it. Without
        data to read the connection is open, and the round trip is saved.
        """
        if query != _LIVENESS_CHECK:
            return super().execute(query, *args, **options)
        if not self.closed and self.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            poll = select.poll()  # ``select.select`` takes no descriptors above 1023.
            poll.register(self.fileno(), select.POLLIN)
            if not poll.poll(0):
                return self.cursor()
        with statement_timeout(_LIVENESS_CHECK_S):
            return super().execute(query, *args, **options)

    def wait(
        self,
        gen: PQGen[Returned],
        interval: float = _INTERVAL_S,
        timeout: float | None = None,
    ) -> Returned:
        """Wait for the server, as psycopg does, but no longer than the statement timeout.

        Each statement, each COMMIT and each fetch from a server-side cursor is one wait. After the
        timeout the statement is cancelled; without an answer to that the connection is closed.
        Raise OperationalError in both cases.
        """
        limit = _current_timeout_s() if timeout is None else timeout
        started = time.monotonic()
        try:
            return super().wait(gen, interval, limit)
        except psycopg.OperationalError as exc:
            if (exc.sqlstate or "").startswith(_LIMIT_EXCEEDED):
                raise psycopg.DataError(str(exc)) from exc
            is_late = timeout is None and limit is not None and time.monotonic() - started >= limit
            if is_late and not self.closed and exc.sqlstate is None:
                return self._cancel_statement(gen, interval)
            raise
        except psycopg.ProgrammingError as exc:
            if exc.sqlstate in _NOT_PREPARED:
                raise LosesPreparedStatements(
                    f"{exc}: set PREPARED_STATEMENTS=false for this pooler"
                ) from exc
            if exc.sqlstate in _NOT_MIGRATED:
                missing = str(exc).splitlines()[0]
                raise NotMigrated(f"the database is not migrated: {missing}") from exc
            raise
        except psycopg.InternalError as exc:
            if exc.sqlstate == _READ_ONLY_TRANSACTION:
                drain_pool()  # After a failover the same address leads to the new primary.
                raise ReadOnlyServer(str(exc)) from exc
            if exc.sqlstate in _ENDED_BY_SERVER:
                raise psycopg.OperationalError(str(exc)) from exc
            raise

    def _cancel_statement(self, gen: PQGen[Returned], interval: float) -> Returned:
        """Cancel the statement and wait for its end, which comes if the server is only slow."""
        try:
            if psycopg.capabilities.has_cancel_safe():  # Otherwise this could wait as long again.
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


def fault_of_database(error: BaseException) -> str:
    """Return the first line of an error; of a timeout of the pool why it has no connection."""
    is_timeout_of_pool = any(isinstance(e, PoolTimeout) for e in (error, error.__cause__))
    text = (_connection_fault if is_timeout_of_pool else "") or str(error)
    return next(iter(text.strip().splitlines()), "")


def drain_pool() -> None:
    """Have the pool replace its connections: when one is broken, the others are likely broken too.

    Borrowed connections are replaced when they are returned. Calls within ``_DRAIN_INTERVAL_S`` of
    the last drain do nothing.
    """
    global _drained_at  # noqa: PLW0603  # One pool for the process.
    with _drain_lock:
        now = time.monotonic()
        if now - _drained_at < _DRAIN_INTERVAL_S:
            return
        _drained_at = now
    pool: Any = getattr(connections["default"], "pool", None)  # Missing in Django's stubs.
    if pool is not None and not pool.closed:
        pool.drain()


@contextmanager
def release_connection_after() -> Iterator[None]:
    """Return the thread's connection to the pool after the block, unless a transaction is open.

    A worker thread lives as long as a generation. If each kept its connection, a worker would need
    one connection for every slot.
    """
    try:
        yield
    finally:
        if not connection.in_atomic_block:
            connection.close()


async def in_database_thread(call: Callable[[], Returned]) -> Returned:
    """Run a call that uses the database on a thread, for asyncio code."""

    def run() -> Returned:
        with release_connection_after():
            return call()

    result: Returned = await sync_to_async(run, thread_sensitive=False)()
    return result


def unpooled_connection() -> psycopg.Connection[Any]:
    """Connect without the pool, whose connections may hang when the server does."""
    parameters = connection.get_connection_params()
    parameters.pop("pool", None)
    parameters.pop("context", None)
    parameters |= {"connect_timeout": 1, "cursor_factory": psycopg.Cursor}
    return PooledConnection.connect(**parameters)


@contextmanager
def transaction_with_timeouts(lock_ms: int | None = None) -> Iterator[None]:
    """Run the block in a transaction that waits for locks at most ``lock_ms``, by default 2 s.

    The process that holds a lock may be frozen, and one row must not delay work on the others. The
    statements have a time limit as well. Raise OperationalError after either (``is_timeout``).
    """
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(*_set_timeouts(lock_ms))
        yield


def _set_timeouts(lock_ms: int | None = None) -> tuple[str, dict[str, str]]:
    """Return the statement, and its values, that limits the waits of the current transaction."""
    statement = (
        "SELECT set_config('lock_timeout', %(lock_ms)s, true), "
        "set_config('statement_timeout', %(statement_ms)s, true)"
    )
    limit = _current_timeout_s()
    statement_s = _STATEMENT_TIMEOUT_S if limit is None else max(0.1, limit - _SERVER_MARGIN_S)
    return statement, {
        "lock_ms": str(_LOCK_TIMEOUT_MS if lock_ms is None else lock_ms),
        "statement_ms": str(round(1000 * min(_STATEMENT_TIMEOUT_S, statement_s))),
    }


def is_timeout(error: Exception) -> bool:
    """Whether a transaction failed because of a lock timeout or a statement timeout."""
    return isinstance(error.__cause__, TIMEOUTS)


def end_transaction_if_idle() -> None:
    """Have the server end this transaction when this process sends nothing for ``_STILL_MS``.

    For a transaction that locks a row which others wait for: this process may be frozen.
    """
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = {_STILL_MS}")


def execute_prepared(statement: str, values: Mapping[str, Any]) -> psycopg.Cursor[Any]:
    """Run a prepared statement: PostgreSQL plans it once for each connection.

    For statements of every request: planning takes ten times as long as running them, and Django's
    own statements are planned each time, because their values are part of the text. Uses the
    thread's connection if it has one, otherwise one that is borrowed for this statement. The
    statement must be one of a few fixed texts. Raise Django's errors.
    """
    with _borrowed_connection() as borrowed:
        return _execute(borrowed, statement, values)


def execute_with_timeouts(statement: str, values: Mapping[str, Any]) -> psycopg.Cursor[Any]:
    """Run one prepared statement as a ``transaction_with_timeouts``, in one round trip, not four.

    The statements of a pipeline are one transaction, unless one is open already.
    """
    with _borrowed_connection() as borrowed, borrowed.pipeline():
        _execute(borrowed, *_set_timeouts())
        return _execute(borrowed, statement, values)


def execute_pipelined(*statements: tuple[str, Mapping[str, Any]]) -> list[psycopg.Cursor[Any]]:
    """Run prepared statements in one round trip and one transaction (the open one, if any)."""
    with _borrowed_connection() as borrowed, borrowed.pipeline():
        return [_execute(borrowed, statement, values) for statement, values in statements]


@contextmanager
def _borrowed_connection() -> Iterator[psycopg.Connection[Any]]:
    with connection.wrap_database_errors:
        pool: Any = getattr(connection, "pool", None)  # Missing in Django's stubs.
        if connection.connection is not None or pool is None:
            connection.ensure_connection()
            connection.validate_no_broken_transaction()
            yield connection.connection
            return
        pool.open()
        borrowed = pool.getconn()
        try:
            yield borrowed
        finally:
            pool.putconn(borrowed)


def _execute(
    borrowed: psycopg.Connection[Any], statement: str, values: Mapping[str, Any]
) -> psycopg.Cursor[Any]:
    typed = {name: _with_one_integer_type(value) for name, value in values.items()}
    return psycopg.Cursor(borrowed).execute(statement, typed, prepare=True)


def _with_one_integer_type(value: Any) -> Any:
    """Return integers as ``bigint``: psycopg chooses by size, and each type needs its own plan."""
    if isinstance(value, list):
        return [_with_one_integer_type(entry) for entry in value]
    return Int8(value) if isinstance(value, int) and not isinstance(value, bool) else value


def cached_sql(
    make_query: Callable[[*Arguments], QuerySet[Any, Any]],
) -> Callable[[*Arguments], list[Any]]:
    """Decorate a function that returns a query: run the query and return its rows as tuples.

    For queries that run every second: Django takes several times as long to compile the SQL as
    PostgreSQL to run it. The SQL is compiled once for each set of arguments, so they must be
    hashable, and the query must take the time from the database (``Now()``). The query selects
    columns of plain types with ``values_list``, because no field converts the values.
    """

    @lru_cache(_MAX_CACHED_SQL)
    def compiled(*args: *Arguments) -> tuple[str, Any]:
        return make_query(*args).query.sql_with_params()

    @wraps(make_query)
    def run(*args: *Arguments) -> list[Any]:
        with connection.cursor() as cursor:
            cursor.execute(*compiled(*args))
            rows: list[Any] = cursor.fetchall()
        return rows

    return run
