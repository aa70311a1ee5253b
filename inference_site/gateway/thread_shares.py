"""Who gets the next thread for a view: no project more than its share, and each in its turn.

Nobody waits long for a thread: who would is refused at once, by how fast threads were given lately,
and who does all the same is refused then. A client that is told so soon can come back.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass

from inference_site.errors.api_errors import UnavailableError

_MOST_WAITING = 2_000
_LONGEST_S = 10.0
_LONGEST_LARGE_S = 30.0
_LATEST = 0.05
"""The part that the latest time between two threads has in their mean, which is known after as
many times as this is a part of."""
_AT_FIRST = 500
"""How many of one project may wait until it is known."""
_REST = 3.0
"""After a large body its project rests so many times the processor time that it took."""
_ALONE_S = 10.0
"""A project after which no other has come for so long need not rest."""


@dataclass(frozen=True, slots=True)
class Share:
    """Whose view it is: a project's, or of nobody who is known.

    Large bodies are for one thread of their project: while they are decoded and checked, Python
    runs nothing else for tens of milliseconds at a time. So that others get on, a project spends
    at most a quarter of the time on them.
    """

    project_id: int | None = None
    is_large: bool = False

    @property
    def longest_s(self) -> float:
        """How long it may wait for a thread."""
        return _LONGEST_LARGE_S if self.is_large else _LONGEST_S


NOBODY = Share()


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request that waits; ``given`` is done when it has a thread, or is refused."""

    given: asyncio.Future[None]
    since: float


@dataclass(slots=True)
class _Pace:
    """How fast threads are given while requests wait: the mean time between two, of the latest."""

    mean_s: float = 0.0
    times: int = 0
    gave_at: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.times >= 1 / _LATEST

    def note(self, now: float) -> None:
        """Note that one is given."""
        if self.gave_at:
            self.times += 1
            latest = max(_LATEST, 1 / self.times)  # Of the first few it is their plain mean.
            self.mean_s += latest * (now - self.gave_at - self.mean_s)
        self.gave_at = now


class ThreadShares:
    """The threads that are free, and who waits for one. For the event loop's thread only."""

    def __init__(self, threads: int, most: int) -> None:
        self._free, self._threads, self._most = threads, threads, most
        self._added = 0
        self._taken: Counter[Share] = Counter()
        self._lines: dict[Share, deque[_Turn]] = {}
        self._waiting = 0
        self._paces = {is_large: _Pace() for is_large in (False, True)}
        self._latest_project: int | None = None
        self._changed_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no view runs, and none waits."""
        return self._free == self._threads + self._added and not self._waiting

    def add(self, threads: int) -> None:
        """Set the number of extra threads, beyond those of the start."""
        self._free += threads - self._added
        self._added = threads
        self._give()

    def take(self, share: Share) -> asyncio.Future[None] | None:
        """Take a thread, or return what is done when one is given. Raise UnavailableError."""
        if share.project_id != self._latest_project:
            self._latest_project, self._changed_at = share.project_id, time.monotonic()
        if share not in self._lines and self._may_take(share):
            self._note(share, 1)
            return None
        self.require_room(share)
        turn = _Turn(asyncio.get_running_loop().create_future(), time.monotonic())
        self._lines.setdefault(share, deque()).append(turn)
        self._waiting += 1
        return turn.given

    def require_room(self, share: Share) -> None:
        """Raise UnavailableError if the line of this share is as long as it may be."""
        length, pace = len(self._lines.get(share, ())), self._paces[share.is_large]
        lines = sum(other.is_large == share.is_large for other in self._lines)
        # Who has no more than a fair part of the line is let in even when it is full.
        is_full = self._waiting >= _MOST_WAITING and length * len(self._lines) >= self._waiting
        late_s = length * lines * pace.mean_s
        if is_full or (late_s > share.longest_s if pace.is_known else length >= _AT_FIRST):
            raise UnavailableError

    def give_back(self, share: Share, used_s: float = 0.0) -> None:
        """Give a thread back, which goes to who has the fewest.

        ``used_s`` is the processor time that its view has used. A share that rests after it counts
        as if it still had the thread.
        """
        is_alone = time.monotonic() - self._changed_at > _ALONE_S
        if share.is_large and used_s and not is_alone:
            self._free += 1
            asyncio.get_running_loop().call_later(used_s * _REST, self._end_rest, share)
        else:
            self._note(share, -1)
        self._give()

    def _end_rest(self, share: Share) -> None:
        self._free -= 1
        self._note(share, -1)
        self._give()

    def forgo(self, share: Share, given: asyncio.Future[None]) -> None:
        """Leave the line; give back what was given meanwhile."""
        if given.cancelled() or not given.done():
            found = next((turn for turn in self._lines.get(share, ()) if turn.given is given), None)
            if found is not None:
                self._leave(share, found)
        elif given.exception() is None:
            self.give_back(share)

    def refuse_late(self, now: float) -> None:
        """Refuse who has waited as long as anybody may."""
        for share in list(self._lines):
            self._refuse(share, now - share.longest_s, UnavailableError())

    def refuse_since(self, before: float, error: UnavailableError) -> None:
        """Refuse who has come before this time."""
        for share in list(self._lines):
            self._refuse(share, before, error)

    def _refuse(self, share: Share, before: float, error: UnavailableError) -> None:
        while (line := self._lines.get(share)) and line[0].since <= before:
            turn = line[0]
            self._leave(share, turn)
            if not turn.given.done():
                turn.given.set_exception(error)

    def _give(self) -> None:
        while waiting := [share for share in self._lines if self._may_take(share)]:
            share = min(waiting, key=self._taken.__getitem__)
            turn = self._lines[share][0]
            self._leave(share, turn)
            if self._lines.get(share):  # Behind the others that have as few.
                self._lines[share] = self._lines.pop(share)
            if not turn.given.done():
                self._note(share, 1)
                self._note_pace(share)
                turn.given.set_result(None)

    def _note_pace(self, share: Share) -> None:
        self._paces[share.is_large].note(time.monotonic())
        if not any(other.is_large == share.is_large for other in self._lines):
            # How it goes under the next load is not known.
            self._paces[share.is_large] = _Pace()

    def _may_take(self, share: Share) -> bool:
        return self._free > 0 and self._taken[share] < (1 if share.is_large else self._most)

    def _note(self, share: Share, threads: int) -> None:
        self._free -= threads
        self._taken[share] += threads
        if not self._taken[share]:
            del self._taken[share]

    def _leave(self, share: Share, turn: _Turn) -> None:
        self._lines[share].remove(turn)
        self._waiting -= 1
        if not self._lines[share]:
            del self._lines[share]
