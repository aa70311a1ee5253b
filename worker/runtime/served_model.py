"""A model in this process: its state, its engine and its slots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inference_site.catalogue.engines.registry import library_of, model_capabilities
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet.leases import ModelReport, ModelState
from worker.engines.base import Engine
from worker.engines.registry import load_engine

_LATEST = 0.1
"""The part that the latest run has in the mean of their times."""
_MOST_SERVED = 100


class ServedModel:
    """An entry of the catalogue, from the beginning of its load until it is dropped.

    ``on_change`` is called when it takes generations again, or takes no more.
    """

    def __init__(self, spec: ModelSpec, on_change: Callable[[], None] = lambda: None) -> None:
        self.spec = spec
        self.progress: float | None = None
        self.missed_wake_up = False
        """Whether a wake-up came while no slot was free; the thread that frees one looks again."""
        self._on_change = on_change
        self._engine: Engine | None = None
        self._state, self._reason, self._since = ModelState.LOADING, "", time.time()
        self._library = ""
        self._busy = self._expected = 0
        self._run_s = 0.0
        self._served: dict[int, None] = {}
        self._changed = threading.Condition()

    @property
    def engine(self) -> Engine:
        """The engine, while a slot is held. Raise RuntimeError when it is not loaded."""
        if self._engine is None:
            raise RuntimeError(f"{self.spec.id} is not loaded.")
        return self._engine

    @property
    def steps(self) -> int | None:
        """The steps of its engine (see ``Engine.steps``)."""
        return None if self._engine is None else self._engine.steps

    @property
    def state(self) -> ModelState:
        """How far it is."""
        return self._state

    @property
    def is_open(self) -> bool:
        """Whether it would take a generation now."""
        taken = self._busy + self._expected
        return self._state == ModelState.READY and taken < self.spec.slots

    @property
    def report(self) -> ModelReport:
        """What the lease says of this model."""
        return ModelReport(
            self.spec.id,
            self.spec.slots,
            self._busy,
            self._state,
            self.progress if self._state == ModelState.LOADING else None,
            self._reason,
            self._since,
            self.spec.engine,
            self._library,
            tuple(sorted(model_capabilities(self.spec))) if self._engine else (),
            round(self._run_s, 3),
        )

    def load(self) -> None:
        """Build its engine. Raise EngineLoadError, after which it counts as failed."""
        try:
            self._engine = load_engine(self.spec)
        except EngineLoadError as exc:
            self.fail(str(exc))
            raise
        self._library = library_of(self.spec.engine)
        self._state, self._since = ModelState.READY, time.time()

    def fail(self, reason: str) -> None:
        """Say that it could not be loaded, and why."""
        self._state, self._reason = ModelState.FAILED, reason

    def drain(self, timeout_s: float) -> bool:
        """Take no new work; return whether what runs has ended within the time."""
        with self._changed:
            if self._state == ModelState.READY:
                self._state, self._since = ModelState.DRAINING, time.time()
                self._on_change()
            return self._changed.wait_for(lambda: self._busy == 0, timeout_s)

    def close(self) -> None:
        """Free its memory. Nothing runs when this is called."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def expect(self) -> None:
        """Hold a slot for a wake-up that was received, until its task asks for one."""
        with self._changed:
            self._expected += 1

    @property
    def served(self) -> list[int]:
        """The projects whose generations were taken last, the latest at the end."""
        with self._changed:
            return list(self._served)

    def note_served(self, project_id: int) -> None:
        """Note whose generation was taken: of projects that have as many running, the others come
        first, however long the line of this one is."""
        with self._changed:
            self._served.pop(project_id, None)
            self._served[project_id] = None
            if len(self._served) > _MOST_SERVED:
                del self._served[next(iter(self._served))]

    def note_run(self, seconds: float) -> None:
        """Note how long a run has held its slot."""
        with self._changed:
            self._run_s += (seconds - self._run_s) * (_LATEST if self._run_s else 1)

    @contextmanager
    def slot(self) -> Iterator[bool]:
        """Hold a slot if one is free; yield whether one is."""
        if not self._take():
            yield False
            return
        try:
            yield True
        finally:
            with self._changed:
                was_open = self.is_open
                self._busy -= 1
                self._changed.notify_all()
            if not was_open:
                self._on_change()

    def _take(self) -> bool:
        with self._changed:
            self._expected = max(0, self._expected - 1)
            if self._state != ModelState.READY or self._busy >= self.spec.slots:
                return False
            self._busy += 1
            return True
