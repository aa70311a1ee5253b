"""The pace of a connection: no more is read than is taken, nor written than the client reads."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from django.conf import settings

logger = logging.getLogger(__name__)

_MOST_UNTAKEN = 256 * 1024
"""Bytes that may wait for the application before the connection is read no further."""


class Paced:
    """What a connection's protocol adds up; Twisted tells it when the buffer of writes is full.

    The transport takes 64 KiB and what one write goes beyond that, then calls ``pauseProducing``.
    """

    transport: Any
    untaken = 0
    _is_paused = False
    _drained: asyncio.Future[None] | None = None

    def has_come(self, size: int) -> None:
        """Count bytes that were passed to the application; stop reading when it has too many."""
        self.untaken += size
        if self.untaken > _MOST_UNTAKEN and not self._is_paused:
            self._is_paused = True
            self.transport.pauseProducing()

    def was_taken(self, size: int) -> None:
        """Count bytes that the application has taken; go on reading when few are left."""
        self.untaken -= size
        if self._is_paused and self.untaken <= _MOST_UNTAKEN // 2:
            self._is_paused = False
            self.transport.resumeProducing()

    def pauseProducing(self) -> None:  # Twisted's name, as the next two.
        """Note that the client does not read what was written."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()

    def resumeProducing(self) -> None:
        """Note that all is written."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def stopProducing(self) -> None:
        """Note that nothing can be written any more."""
        self.resumeProducing()

    async def drained(self) -> None:
        """Return when there is room to write; drop a client that reads nothing for too long."""
        if self._drained is None:
            return
        done, _ = await asyncio.wait({self._drained}, timeout=settings.READER_TIMEOUT_S)
        if not done:
            logger.info("a client that reads nothing is dropped")
            self.transport.abortConnection()
