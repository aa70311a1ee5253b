"""Prepared statements, borrowed connections, and queries whose SQL is compiled once."""

from __future__ import annotations

import ast
import re
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, connection, transaction
from django.db.models import QuerySet

from inference_site.accounts.models import Project
from inference_site.core.storage.postgresql import (
    PooledConnection,
    cached_sql,
    execute_prepared,
    execute_with_timeouts,
    unpooled_connection,
)
from tests.served_stack import ROOT

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def borrowed() -> psycopg.Connection:
    """A connection as the pool has them."""
    parameters = connection.get_connection_params()
    parameters.pop("pool", None)
    found: psycopg.Connection = PooledConnection.connect(**{**parameters, "autocommit": True})
    return found


def test_no_statement_has_a_number_that_only_a_new_postgresql_reads() -> None:
    """Before release 16 it reads no hexadecimal numbers, and releases from 14 are supported."""
    folders = ("inference_site", "completions", "responses_api", "worker")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 100
    found = [
        (path.name, node.value)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if "SELECT" in node.value and re.search(r"\b0x[0-9A-Fa-f]", node.value)
    ]
    assert found == []


def test_numbers_of_all_sizes_share_a_plan() -> None:
    with transaction.atomic():
        for number in (1, 2**20, 2**40):
            found = execute_prepared("SELECT %(n)s + 1", {"n": number}).fetchone()
            assert found == (number + 1,)
        known = execute_prepared(
            "SELECT count(*) FROM pg_prepared_statements WHERE statement = %(text)s",
            {"text": "SELECT $1 + 1"},
        )
        assert known.fetchone() == (1,)


def test_a_refused_statement_raises_djangos_error_and_leaves_a_connection_to_others() -> None:
    connection.close()
    with pytest.raises(DatabaseError):
        execute_prepared("SELECT 1 / %(n)s", {"n": 0})
    assert execute_prepared("SELECT %(n)s::bigint", {"n": 7}).fetchone() == (7,)


def test_one_statement_may_be_a_transaction_that_does_not_wait_long() -> None:
    timeouts = "SELECT current_setting('lock_timeout'), current_setting('statement_timeout')"
    connection.close()
    for _ in range(2):  # Planned now, and before.
        assert execute_with_timeouts(timeouts, {}).fetchone() == ("2s", "30s")
        assert execute_prepared(timeouts, {}).fetchone() == ("0", "0")
    with pytest.raises(DatabaseError):
        execute_with_timeouts("SELECT 1 / %(n)s", {"n": 0})
    assert execute_with_timeouts("SELECT %(n)s::bigint", {"n": 7}).fetchone() == (7,)


def test_what_is_written_in_a_transaction_goes_with_it() -> None:
    with transaction.atomic():
        execute_prepared("CREATE TEMPORARY TABLE kept_for_a_test (n int) ON COMMIT DROP", {})
        execute_prepared("INSERT INTO kept_for_a_test VALUES (%(n)s)", {"n": 1})
        found = execute_prepared("SELECT count(*) FROM kept_for_a_test", {}).fetchone()
        assert found == (1,)


def test_the_question_of_the_pool_costs_no_round_trip_until_the_server_has_spoken(
    borrowed: psycopg.Connection,
) -> None:
    with unpooled_connection() as other:
        pid = borrowed.info.backend_pid
        borrowed.execute("")
        sent = "SELECT query FROM pg_stat_activity WHERE pid = %s"
        borrowed.execute("SELECT 'last'")
        borrowed.execute("")
        assert other.execute(sent, [pid]).fetchone() == ("SELECT 'last'",)
        other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    with pytest.raises(psycopg.OperationalError):
        borrowed.execute("")


def test_its_sql_is_made_once_for_each_argument_and_its_rows_are_those_of_now() -> None:
    made = []

    @cached_sql
    def named(name: str) -> QuerySet[Any, Any]:
        made.append(name)
        return Project.objects.filter(name=name).values_list("name", "pk")

    assert named("100 %s") == named("other") == []
    project = Project.objects.create(name="100 %s")
    assert named("100 %s") == [("100 %s", project.pk)]
    assert named("other") == []
    assert made == ["100 %s", "other"]
