"""Rows that look older than they are, for a while: roll-ups have the times of before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tests.served_stack import ServedStack, wait_until


@contextmanager
def earlier(
    stack: ServedStack,
    column: Literal["created_at", "finished_at"],
    interval: str,
    of: Literal["public_id", "api_key_id"],
    value: object,
) -> Iterator[None]:
    """Set back a time of the generations with this value, and forward again at the end."""
    table = "generations_generation"
    found = stack.sql(f"SELECT id FROM {table} WHERE {of} = %s", value)  # noqa: S608  # Constants.
    ids = [row[0] for row in found]
    # What is accounted meanwhile would be in roll-ups of times that it does not have in the end.
    wait_until(lambda: _are_accounted(stack, ids), 120, "their usage to be accounted")
    move = f"UPDATE {table} SET {column} = {column} + %s::interval WHERE id = ANY(%s)"  # noqa: S608
    stack.sql(move, f"-{interval}", ids)
    try:
        yield
    finally:
        stack.sql(move, interval, ids)


def _are_accounted(stack: ServedStack, ids: list[int]) -> bool:
    left = "SELECT count(*) FROM generations_generation WHERE id = ANY(%s) AND NOT is_accounted"
    return bool(stack.sql(left, ids)[0][0] == 0)
