"""Database connections that are borrowed from the pool for a short time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection


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
