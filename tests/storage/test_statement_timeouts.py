"""Statements that take too long, servers that do not answer, and servers that take no writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from django import db
from django.db import connection

from inference_site.core.errors.exceptions import api_error
from inference_site.core.storage import postgresql
from inference_site.core.storage.postgresql import (
    DATABASE_UNAVAILABLE,
    PooledConnection,
    is_timeout,
    release_connection_after,
    statement_timeout,
    unpooled_connection,
)
from tests.silent_proxy import SilentProxy

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the statements of this process as those of one that serves."""
    monkeypatch.setattr(postgresql, "_process_timeout_s", 1.0)


@pytest.fixture
def own() -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A connection of the project, outside of the pool."""
    with unpooled_connection() as found:
        yield found


def test_a_statement_that_takes_too_long_is_cancelled_and_its_connection_kept(
    own: PooledConnection,
) -> None:
    began = time.monotonic()
    with pytest.raises(psycopg.errors.QueryCanceled):
        own.execute("SELECT pg_sleep(20)")
    assert time.monotonic() - began < 10
    own.rollback()
    assert own.execute("SELECT 1").fetchone() == (1,)


def test_a_pipeline_that_takes_too_long_is_cancelled_too(own: PooledConnection) -> None:
    def sleep_in_a_pipeline() -> None:
        with own.pipeline():
            own.execute("SELECT 1")
            own.execute("SELECT pg_sleep(20)").fetchone()

    with pytest.raises(psycopg.errors.QueryCanceled):
        sleep_in_a_pipeline()
    own.rollback()
    assert own.execute("SELECT 1").fetchone() == (1,)


def test_a_block_has_its_own_limit_or_none(own: PooledConnection) -> None:
    with statement_timeout(30):
        own.execute("SELECT pg_sleep(1.2)")
    with statement_timeout(None):
        own.execute("SELECT pg_sleep(1.2)")


@contextlib.contextmanager
def silent() -> Iterator[tuple[SilentProxy, PooledConnection]]:
    """A connection through a proxy."""
    parameters = connection.get_connection_params()
    for name in ("pool", "context", "cursor_factory"):
        parameters.pop(name, None)
    host, port = parameters["host"], int(parameters.get("port", 5432))
    is_socket = host.startswith("/")
    proxy = SilentProxy(Path(host) / f".s.PGSQL.{port}" if is_socket else (host, port))
    parameters |= {"host": "127.0.0.1", "port": proxy.port}
    found = PooledConnection.connect(**parameters)
    try:
        yield proxy, found
    finally:
        found.close()
        proxy.close()


@pytest.mark.parametrize("waits_in", ["a statement", "a commit", "the pool's question"])
def test_a_server_that_does_not_answer_is_given_up(waits_in: str) -> None:
    with silent() as (proxy, found):
        found.execute("CREATE TEMPORARY TABLE something ()")
        began = time.monotonic()
        if waits_in == "the pool's question":
            found.commit()
            assert found.execute("") is not None  # Nothing to read: no question.
        proxy.fall_silent()
        with pytest.raises(psycopg.OperationalError):
            found.commit() if waits_in == "a commit" else found.execute("SELECT 1")
        assert time.monotonic() - began < 10
        assert found.closed
        proxy.heal()


def test_a_server_that_takes_no_writes_is_unavailable() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(DATABASE_UNAVAILABLE) as caught:
            cursor.execute("CREATE TABLE something ()")
    error = api_error(caught.value)
    assert (error.status, error.code) == (503, "database_unavailable")
    assert not is_timeout(caught.value)
    connection.needs_rollback = False


@pytest.mark.django_db(transaction=True)
def test_a_server_that_takes_no_writes_has_its_connections_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address of a primary leads to another server after a failover."""
    monkeypatch.setattr(postgresql, "_drained_at", 0.0)
    before = backend()
    with (
        release_connection_after(),
        connection.cursor() as cursor,
        pytest.raises(DATABASE_UNAVAILABLE),
    ):
        cursor.execute("BEGIN READ ONLY; CREATE TABLE something ()")
    assert backend() != before


def backend() -> int:
    """Return the process of the server that a connection of the pool leads to."""
    with release_connection_after(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    return int(pid)


@pytest.mark.parametrize(
    ("state", "is_unavailable"),
    [
        ("25006", True),  # read-only
        ("25P03", True),  # the server has ended a transaction that stood still
        ("40001", True),  # also a conflict with recovery on a standby
        ("40P01", True),
        ("53300", True),  # too many connections
        ("53100", True),  # disk full
        ("57P01", True),  # shut down by an administrator
        ("57P03", True),  # cannot connect now
        ("58030", True),  # I/O error
        ("42P01", True),  # a table is missing: not migrated
        ("42703", True),  # a column
        ("54000", False),  # the statement is too large
        ("23505", False),
        ("22003", False),
        ("42601", False),
    ],
)
def test_what_means_that_the_database_is_unavailable(state: str, is_unavailable: bool) -> None:
    with pytest.raises(db.Error) as caught, db.transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{state}'; END $$")
    assert isinstance(caught.value, DATABASE_UNAVAILABLE) == is_unavailable
    assert (api_error(caught.value).code == "database_unavailable") == is_unavailable
