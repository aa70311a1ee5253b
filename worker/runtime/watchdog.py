"""Watchdog: ends a process whose engine stands still while generations run on it.

An engine that runs in a process serves all its generations in one loop. When that hangs, nothing
runs on and nothing can be stopped; only the end of the process helps. It is started anew, and the
generations end as after a crash.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

_STDERR = 2
_TICK_S = 1.0
_GRACE_S = 10
"""How much later the end comes without this thread, which a library can keep from running."""


class Watchdog:
    """Looks at the steps of engines every second.

    ``steps`` returns a number for each model on which something runs, which changes with each step.
    ``give_up`` is called with a model that has made no step for ``stall_s`` seconds of looking: a
    process that was stopped for a time does not count as one whose engine stands still.
    """

    def __init__(
        self, steps: Callable[[], Mapping[str, int]], give_up: Callable[[str], None], stall_s: int
    ) -> None:
        self._steps, self._give_up, self._stall_s = steps, give_up, stall_s
        self._seen: dict[str, tuple[int, float]] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to look, unless ``stall_s`` is 0."""
        if self._stall_s:
            threading.Thread(target=self._main, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _main(self) -> None:
        while not self._stopped.wait(_TICK_S):
            steps = self._steps()
            if steps:  # A thread of its own, which needs no lock of Python's, ends the process.
                # Celery puts an object without a file into the place of sys.stderr.
                faulthandler.dump_traceback_later(self._stall_s + _GRACE_S, exit=True, file=_STDERR)
            else:
                faulthandler.cancel_dump_traceback_later()
            for model in self._stalled(steps):
                self._give_up(model)

    def _stalled(self, steps: Mapping[str, int]) -> list[str]:
        """Return the models that have stood still for too long."""
        before, self._seen = self._seen, {}
        for model, step in steps.items():
            known, still_s = before.get(model, (step, -_TICK_S))
            self._seen[model] = step, still_s + _TICK_S if known == step else 0.0
        return [model for model, (_, still_s) in self._seen.items() if still_s >= self._stall_s]
