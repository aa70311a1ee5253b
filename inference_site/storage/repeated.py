"""Statements that are run every second: Django makes the SQL of each once.

To make it takes a processor several times as long as to run the statement, and most of what a site
without work costs is such statements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVarTuple

from django.db import connection
from django.db.models import QuerySet

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
