"""Database connections, borrowed from the pool for one moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection


@contextmanager
def lent_connection() -> Iterator[None]:
    """Give the connection back to the pool at the end, unless a transaction goes on around it.

    A worker's threads run for as long as a generation does; holding a connection meanwhile would
    take as many as there are slots.
    """
    try:
        yield
    finally:
        if not connection.in_atomic_block:
            connection.close()
