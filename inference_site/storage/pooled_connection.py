"""The connections of the pool: lent without a question to the server, unless it has said something.

The pool asks a connection for nothing before it lends it, to learn whether it is still open. A
server that has closed it, or ended its session, has written to it: so the question is asked only of
a connection from which there is something to read.
"""

from __future__ import annotations

import select
from typing import Any

import psycopg

NEVER_BY_ITSELF = 2**31
"""After so many executions psycopg prepares a statement that does not ask for it."""
_QUESTION = ""
"""What psycopg's pool asks, and Django has no say in."""


class PooledConnection(psycopg.Connection[Any]):
    """A connection that knows without a round trip that its server has closed it."""

    def execute(self, query: Any, *args: Any, **options: Any) -> psycopg.Cursor[Any]:
        """Execute a statement; the pool's question only if there is something to read."""
        if query == _QUESTION and self._is_quiet():
            return self.cursor()
        return super().execute(query, *args, **options)

    def _is_quiet(self) -> bool:
        if self.closed or self.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            return False
        poll = select.poll()  # ``select`` itself takes no descriptors above 1023.
        poll.register(self.fileno(), select.POLLIN)
        return not poll.poll(0)
