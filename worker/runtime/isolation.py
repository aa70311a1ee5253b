"""Isolation: a run that may end its worker begins with no other run beside it.

The third attempt of a run whose worker died during the second is isolated: the run may be the cause
of both deaths, and a third death then takes no other run along. Once it has given output for a
while, others join it.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

APART_S = 5.0
"""Time between two isolated runs for which a busy worker waits until its other runs have ended; an
idle worker begins one at once."""
_DRAIN_S = 5.0
"""How long an isolated run waits for the runs before it to end, which may take minutes more."""
_TRIAL_S = 2.0
"""For how long it gives output before others may run beside it."""
_LOOK_S = 0.2


class Watched(Protocol):
    """A run, as this module sees it."""

    @property
    def output_s(self) -> float:
        """For how long it has given output, in seconds."""


class Isolation:
    """Which runs of one process go on beside each other: many, or one isolated. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.shared = self.isolated = 0
        """How many run beside others, and how many are isolated or wait to be."""
        self.is_taken = False
        """Whether an isolated run has begun; other isolated runs wait for their turn."""
        self.last_isolated_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a run may begin."""
        return not self.isolated

    def enter(self) -> Permit | None:
        """Return a permit for a run, to be held from before its claim; None if none may begin."""
        with self.changed:
            if not self.is_open:
                return None
            self.shared += 1
            return Permit(self)


class Permit:
    """The permission of one run to run in this process. ``leave`` gives it back."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._is_isolated = self._has_left = False

    @property
    def is_only_run(self) -> bool:
        """Whether nothing runs beside it."""
        return self._isolation.shared == 1

    @property
    def may_drain(self) -> bool:
        """Whether the other runs may be waited for: not soon after the last isolated run."""
        return time.monotonic() - self._isolation.last_isolated_at > APART_S

    def isolate(self) -> None:
        """Let no other run begin; return when the others have ended, or have had time to."""
        isolation = self._isolation
        with isolation.changed:
            isolation.shared -= 1
            isolation.isolated += 1
            self._is_isolated = True
            isolation.changed.notify_all()
            isolation.changed.wait_for(
                lambda: not (isolation.is_taken or isolation.shared), _DRAIN_S
            )
            isolation.is_taken = True

    def share_after_trial(self, run: Watched) -> bool:
        """Return when others may run beside it: once it has given output for a while.

        Return False when it has left before.
        """
        while run.output_s < _TRIAL_S:
            with self._isolation.changed:
                if self._isolation.changed.wait_for(lambda: self._has_left, _LOOK_S):
                    return False
        with self._isolation.changed:
            if self._has_left:
                return False
            self._end_isolation()
            self._isolation.shared += 1
            return True

    def leave(self) -> bool:
        """Count the run no more; return whether others had to wait for that."""
        with self._isolation.changed:
            was_isolated, self._has_left = self._is_isolated, True
            if was_isolated:
                self._end_isolation()
            else:
                self._isolation.shared -= 1
            self._isolation.changed.notify_all()
            return was_isolated

    def _end_isolation(self) -> None:
        self._is_isolated = self._isolation.is_taken = False
        self._isolation.isolated -= 1
        self._isolation.last_isolated_at = time.monotonic()
        self._isolation.changed.notify_all()
