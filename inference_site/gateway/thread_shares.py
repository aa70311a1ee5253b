"""Who gets the next thread for a view: no project more than its share, and each in its turn."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from inference_site.errors.api_errors import UnavailableError

_MOST_WAITING = 2_000


@dataclass(frozen=True, slots=True)
class Share:
    """Whose view it is: a project's, or of nobody who is known.

    Large bodies are for one thread of their project: while they are decoded and checked, Python
    runs nothing else for tens of milliseconds at a time.
    """

    project_id: int | None = None
    is_large: bool = False


NOBODY = Share()


class ThreadShares:
    """The threads that are free, and who waits for one. For the event loop's thread only."""

    def __init__(self, threads: int, most: int) -> None:
        self._free, self._most = threads, most
        self._taken: Counter[Share] = Counter()
        self._lines: dict[Share, deque[asyncio.Future[None]]] = {}
        self._waiting = 0

    def take(self, share: Share) -> asyncio.Future[None] | None:
        """Take a thread, or return what is done when one is given. Raise UnavailableError."""
        if share not in self._lines and self._may_take(share):
            self._note(share, 1)
            return None
        line = self._lines.get(share, ())
        # Who has no more than a fair part of the line is let in even when it is full.
        if self._waiting >= _MOST_WAITING and len(line) * len(self._lines) >= self._waiting:
            raise UnavailableError
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(share, deque()).append(turn)
        self._waiting += 1
        return turn

    def give_back(self, share: Share) -> None:
        """Give a thread back, which goes to who has the fewest."""
        self._note(share, -1)
        self._give()

    def forgo(self, share: Share, turn: asyncio.Future[None]) -> None:
        """Leave the line; give back what was given meanwhile."""
        if turn.done() and not turn.cancelled():
            self.give_back(share)
        else:
            self._leave(share, turn)

    def _give(self) -> None:
        while waiting := [share for share in self._lines if self._may_take(share)]:
            share = min(waiting, key=self._taken.__getitem__)
            turn = self._lines[share][0]
            self._leave(share, turn)
            if self._lines.get(share):  # Behind the others that have as few.
                self._lines[share] = self._lines.pop(share)
            self._note(share, 1)
            turn.set_result(None)

    def _may_take(self, share: Share) -> bool:
        return self._free > 0 and self._taken[share] < (1 if share.is_large else self._most)

    def _note(self, share: Share, threads: int) -> None:
        self._free -= threads
        self._taken[share] += threads
        if not self._taken[share]:
            del self._taken[share]

    def _leave(self, share: Share, turn: asyncio.Future[None]) -> None:
        self._lines[share].remove(turn)
        self._waiting -= 1
        if not self._lines[share]:
            del self._lines[share]
