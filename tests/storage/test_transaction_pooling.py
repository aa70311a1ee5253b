"""A pooler in front of PostgreSQL that gives each transaction another session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import OperationalError, connection, connections, transaction

from inference_site.accounts.models import Project
from inference_site.core.errors.exceptions import api_error
from inference_site.core.storage.postgresql import execute_prepared
from inference_site.ops.doctor import checks
from tests.transaction_pooler import transaction_pooler

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def pooler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connect to the tests' database through PgBouncer."""
    with transaction_pooler() as port:
        close_all()
        address = {"HOST": "127.0.0.1", "PORT": str(port), "USER": "any"}
        for name, value in address.items():
            monkeypatch.setitem(connection.settings_dict, name, value)
        yield
        close_all()


def close_all() -> None:
    """Close the connections, and forget the pool, which has an address of its own."""
    connections.close_all()
    connection.close_pool()  # type: ignore[attr-defined]  # Missing in Django's stubs.


def open_cursors() -> int:
    """Return how many cursors this session has in PostgreSQL."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_cursors WHERE name LIKE %s", ["_django%"])
        [(found,)] = cursor.fetchall()
    return int(found)


def test_rows_are_read_in_pieces_only_in_a_transaction() -> None:
    """The next piece is in the same session only there."""
    Project.objects.create(name="one")
    for _ in Project.objects.iterator(1):
        assert open_cursors() == 0
    with transaction.atomic():
        for _ in Project.objects.iterator(1):
            assert open_cursors() == 1


@pytest.mark.usefixtures("pooler")
def test_the_rows_of_a_query_are_read_through_a_pooler() -> None:
    Project.objects.create(name="one")
    for _ in range(5):
        assert [one.name for one in Project.objects.iterator()] == ["one"]


@pytest.mark.usefixtures("pooler")
def test_a_pooler_that_keeps_no_prepared_statements_is_named() -> None:

    def execute_in_turns() -> None:
        for _ in range(5):
            execute_prepared("SELECT %(n)s::bigint", {"n": 7})

    with pytest.raises(OperationalError, match="PREPARED_STATEMENTS") as caught:
        execute_in_turns()
    assert api_error(caught.value).code == "database_unavailable"
    (finding,) = checks.check_prepared_statements()
    assert finding.level == "fail"
    assert "PREPARED_STATEMENTS=false" in finding.fix


def test_a_server_keeps_prepared_statements() -> None:
    (finding,) = checks.check_prepared_statements()
    assert finding.level == "ok"


@pytest.mark.usefixtures("pooler")
def test_without_prepared_statements_such_a_pooler_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "prepare_threshold", None)
    close_all()
    for _ in range(5):
        assert execute_prepared("SELECT %(n)s::bigint", {"n": 7}).fetchone() == (7,)
    assert [finding.level for finding in checks.check_prepared_statements()] == ["ok"]
