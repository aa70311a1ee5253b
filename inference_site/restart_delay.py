"""How soon a process that has died is started again."""

from __future__ import annotations

_FIRST_S, _LONGEST_S = 0.5, 30.0
_STABLE_S = 30.0
"""After a process has run for this time it is restarted at once, and the delays begin anew."""


class RestartDelay:
    """The delays of one program: each twice the one before, while its processes die soon."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def after(self, ran_s: float) -> float:
        """Return the delay before the next start, in seconds, after a process that ran so long."""
        delay_s = 0.0 if ran_s > _STABLE_S else self._next_s
        self._next_s = min(max(delay_s * 2, _FIRST_S), _LONGEST_S)
        return delay_s
