"""Unloads a model that was loaded on demand when nothing has asked for it for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable

from django.db import connection

from inference_site.generations.maintenance import attempt
from inference_site.generations.models import Generation, Status
from worker.runtime.served_model import ServedModel

_LOOK_S = 1.0
_SEEN_S = 3.0
"""After this time all web processes know that the model takes no new work."""


class IdleWatch:
    """Unloads a model that has been idle for ``keep_alive_s`` of its spec.

    ``announce`` is called when the model leaves, or stays after all; ``end`` unloads it.
    """

    def __init__(
        self, model: ServedModel, announce: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._model, self._announce, self._end = model, announce, end
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.is_leaving = False
        """Whether the model takes no new work, because nothing has asked for it for a while."""
        self._is_kept = False

    def start(self) -> None:
        """Begin to look, if the model's entry has ``keep_alive``."""
        if self._model.spec.keep_alive_s is not None:
            threading.Thread(target=self._main, name="idle", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def keep(self) -> bool:
        """Have a model that is leaving stay; return False if it is too late."""
        with self._lock:
            self._is_kept = self.is_leaving and not self._stopped.is_set()
            return self._is_kept

    def _main(self) -> None:
        keep_alive_s = self._model.spec.keep_alive_s or 0.0
        while not self._stopped.wait(_LOOK_S):
            if self._model.idle_s >= keep_alive_s and not self._is_wanted() and self._retires():
                self._end()
                return

    def _retires(self) -> bool:
        """Take no new work, and return whether none has come on the way; take it otherwise."""
        self._is_kept, self.is_leaving = False, True
        self._model.drain(0)
        self._announce()
        self._stopped.wait(_SEEN_S)
        is_wanted = self._is_wanted()
        with self._lock:
            if not (is_wanted or self._is_kept):
                self._stopped.set()
                return True
            self.is_leaving = False
        self._model.resume()
        self._announce()
        return False

    def _is_wanted(self) -> bool:
        """Whether something runs on the model or waits for it; so it is while nobody can tell."""
        waits = True

        def look() -> None:
            nonlocal waits
            rows = Generation.objects.filter(model=self._model.spec.id, status=Status.QUEUED)
            waits = rows.exists()

        attempt("idle model", look)
        connection.close()
        return waits or self._model.idle_s == 0
