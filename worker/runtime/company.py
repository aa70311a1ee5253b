"""Company: which runs go on beside each other in a worker process.

A run whose last worker has died may be what that died of. It is begun with nothing beside it, so
that a second death takes no other run along; once it has given output for a while, others join it.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

APART_S = 5.0
"""Between two runs that the others have to make room for; an idle worker begins one at once."""
_EMPTY_S = 5.0
"""How long a run waits for those before it to end, which may take minutes more."""
_TRIAL_S = 2.0
"""For how long it gives output before others may run beside it."""
_LOOK_S = 0.2


class Watched(Protocol):
    """A run, as it is seen from here."""

    @property
    def output_s(self) -> float:
        """For how long it has given output, in seconds."""


class Company:
    """The runs of one process: many at a time, or one that is on trial. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running = self.on_trial = 0
        """How many run beside others, and how many have, or wait to have, nothing beside them."""
        self.is_taken = False
        """Whether one is on trial; others wait for their turn."""
        self.last_trial_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a run may begin."""
        return not self.on_trial

    def enter(self) -> Place | None:
        """Return a place for a run, to be held from before its claim; None if none may begin."""
        with self.changed:
            if not self.is_open:
                return None
            self.running += 1
            return Place(self)


class Place:
    """One run's part in the company. ``leave`` gives it back."""

    def __init__(self, company: Company) -> None:
        self._company = company
        self._is_alone = self._has_left = False

    @property
    def is_single(self) -> bool:
        """Whether nothing runs beside it."""
        return self._company.running == 1

    @property
    def may_be_alone(self) -> bool:
        """Whether the others may be asked to make room: not soon after the last time."""
        return time.monotonic() - self._company.last_trial_at > APART_S

    def be_alone(self) -> None:
        """Let nobody else in, and return when the others have ended, or have had time to."""
        company = self._company
        with company.changed:
            company.running -= 1
            company.on_trial += 1
            self._is_alone = True
            company.changed.notify_all()
            company.changed.wait_for(lambda: not (company.is_taken or company.running), _EMPTY_S)
            company.is_taken = True

    def watch(self, run: Watched) -> bool:
        """Return when others may run beside it: once it has given output for a while.

        Return False when it has left before.
        """
        while run.output_s < _TRIAL_S:
            with self._company.changed:
                if self._company.changed.wait_for(lambda: self._has_left, _LOOK_S):
                    return False
        with self._company.changed:
            if self._has_left:
                return False
            self._end_trial()
            self._company.running += 1
            return True

    def leave(self) -> bool:
        """Count the run no more; return whether others had to wait for that."""
        with self._company.changed:
            was_alone, self._has_left = self._is_alone, True
            if was_alone:
                self._end_trial()
            else:
                self._company.running -= 1
            self._company.changed.notify_all()
            return was_alone

    def _end_trial(self) -> None:
        self._is_alone = self._company.is_taken = False
        self._company.on_trial -= 1
        self._company.last_trial_at = time.monotonic()
        self._company.changed.notify_all()
