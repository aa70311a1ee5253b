"""Delivery: what comes to a follower goes to its client, over SSE, as JSON or over a WebSocket."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from inference_site.gateway.hub.follower import Follower
from inference_site.gateway.hub.hub import hub
from inference_site.streams.batches import Batch
from inference_site.streams.ending import Ending

_IDLE_S = 3600.0
_CANCEL_S = 3.0


class ClientGone(Exception):
    """The client has closed the connection."""


class Sink(ABC):
    """How a client is written to."""

    @property
    def quiet_s(self) -> float:
        """For how long the client may be left without a write."""
        return _IDLE_S

    @abstractmethod
    async def write(self, batches: Sequence[Batch], ending: Ending | None) -> None:
        """Send what has come: nothing after ``quiet_s``; ``ending`` is that of the last batch."""


class Delivery:
    """What comes to a follower is written to a sink.

    With ``cancels`` the generation is cancelled when its client leaves before the ending.
    """

    def __init__(self, follower: Follower, sink: Sink, *, cancels: bool) -> None:
        self._follower, self._sink, self._cancels = follower, sink, cancels
        self._is_gone = False

    async def run(self, leaving: Callable[[], Awaitable[object]] | None = None) -> None:
        """Deliver everything, unless the client leaves first: then ``leaving`` returns."""
        watcher = None if leaving is None else asyncio.create_task(self._watch(leaving))
        try:
            await self._deliver()
        except ClientGone:
            if self._cancels:
                hub.cancel(self._follower.generation_id)
        except BaseException:
            # The server stops, or sending failed: wait until the worker's side of it is stored.
            if self._cancels:
                stored = hub.cancel(self._follower.generation_id)
                await asyncio.wait({stored}, timeout=_CANCEL_S)
            raise
        finally:
            if watcher is not None:
                watcher.cancel()
            hub.leave(self._follower)

    async def _watch(self, leaving: Callable[[], Awaitable[object]]) -> None:
        await leaving()
        self._is_gone = True
        self._follower.wake()

    async def _deliver(self) -> None:
        ending = None
        while ending is None:
            if self._follower.is_behind and not self._is_gone:
                await hub.read_on(self._follower)
            if not self._is_gone:  # It may have left during a write, when nothing could be woken.
                await self._follower.wait(self._sink.quiet_s)
            if self._is_gone:
                raise ClientGone
            batches = self._follower.take()
            if not batches and self._follower.is_behind:
                continue
            ending = batches[-1].ending if batches else None
            await self._sink.write(batches, ending)
