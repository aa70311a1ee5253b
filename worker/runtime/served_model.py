"""A model in this process, its state, its engine and its slots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from inference_site.catalogue.engines.registry import library_of, model_capabilities
from inference_site.catalogue.model_files import FileFacts, file_facts
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet.leases import ModelReport, ModelState
from worker.engines.base import Engine, ServerFacts
from worker.engines.registry import load_engine
from worker.runtime.isolation import Isolation

_LATEST = 0.1
"""The part that the latest run has in the mean of their times."""
_MOST_SERVED = 100
_TAIL_BYTES = 16_384
_THREADS = 32
"""For a model that does not block: each generation needs one only while it begins and ends."""


class ServedModel:
    """An entry of the catalogue, from the beginning of its load until it is dropped.

    ``on_change`` is called when it takes generations again, or takes no more; ``on_fault`` before
    that when this is because its engine can run nothing, or can again. ``reason`` is why it has to
    be loaded again, if it has.
    """

    def __init__(
        self,
        spec: ModelSpec,
        on_change: Callable[[], None] = lambda: None,
        on_fault: Callable[[ServedModel], None] = lambda _: None,
        reason: str = "",
    ) -> None:
        self.spec = spec
        self.progress: float | None = None
        self.missed_wake_up = False
        """Whether a wake-up came while no slot was free; the thread that frees one looks again."""
        self.isolation = Isolation()
        self._on_change, self._on_fault = on_change, on_fault
        self._engine: Engine | None = None
        self._state, self._reason, self._since = ModelState.LOADING, reason, time.time()
        self._library = ""
        self._is_closed = self._is_asleep = self._comes_back = False
        self._away_since = 0.0
        self._facts: FileFacts = {}
        self._busy = self._expected = 0
        self._used_at = self.loaded_at = time.monotonic()
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
    def is_loaded(self) -> bool:
        """Whether it has an engine, be it one that can run nothing now; not while that sleeps."""
        return self._engine is not None and not self._is_asleep

    @property
    def threads(self) -> int:
        """How many threads its generations need at most to begin and, if it blocks, to run."""
        blocks = self._engine is None or self._engine.blocks
        return self.spec.slots if blocks else min(self.spec.slots, _THREADS)

    @property
    def state(self) -> ModelState:
        """How far it is; its engine may be starting still, or be able to run nothing."""
        if self._starting:
            return ModelState.LOADING
        return ModelState.FAILED if self._fault else self._state

    @property
    def _ready_engine(self) -> Engine | None:
        return self._engine if self._state == ModelState.READY else None

    @property
    def _starting(self) -> str:
        return "" if (engine := self._ready_engine) is None else engine.starting

    @property
    def _fault(self) -> str:
        return "" if (engine := self._ready_engine) is None else engine.fault

    @property
    def is_open(self) -> bool:
        """Whether it would take a generation now: not while an isolated one is on trial."""
        taken = self._busy + self._expected
        is_free = self.isolation.is_open and taken < self.spec.slots
        return is_free and self.state == ModelState.READY

    @property
    def busy(self) -> int:
        """How many runs there are on it, or will be in a moment."""
        return self._busy + self._expected

    @property
    def used_at(self) -> float:
        """When a run has ended on it last, or it was loaded, by the monotonic clock."""
        return self._used_at

    @property
    def idle_s(self) -> float:
        """For how many seconds nothing has run; 0 while something does."""
        return 0.0 if self._busy or self._expected else time.monotonic() - self._used_at

    @property
    def report(self) -> ModelReport:
        """What the lease says of this model."""
        return ModelReport(
            self.spec.id,
            self.spec.slots,
            self._busy,
            self.state,
            self.progress if self._state == ModelState.LOADING else None,
            self._starting or self._fault or self._reason,
            self._since,
            self.spec.engine,
            self._library,
            tuple(sorted(model_capabilities(self.spec))) if self._engine else (),
            round(self._run_s, 3),
            (self._engine and self._engine.context_length) or self.spec.context_length,
            away_since=self._away_since if self._state == ModelState.READY else 0.0,
            taken_bytes=self._server.taken_bytes,
            telemetry=dict(self._server.telemetry),
            tools=self._tools,
            **self._facts,
        )

    @property
    def _tools(self) -> Literal["native", "prompt"] | None:
        if self._engine is None or "tools" not in model_capabilities(self.spec):
            return None
        return "native" if self._engine.shows_tools else "prompt"

    @property
    def _server(self) -> ServerFacts:
        return ServerFacts() if (engine := self._engine) is None else engine.server

    @property
    def log_lines(self) -> list[str]:
        """The last lines that its server has written."""
        if (path := self._server.log) is None:
            return []
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                return file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []

    def sleep(self) -> bool:
        """Give the GPU's memory back; False if its engine cannot. Nothing runs when it is called.

        Then ``awake`` announces that it will be loaded again, and ``load`` does so.
        """
        if self._engine is None or not self._engine.sleep():
            return False
        self._is_asleep, self._comes_back, self._away_since = True, False, 0.0
        self._state, self._since = ModelState.SLEEPING, time.time()
        return True

    def awake(self) -> None:
        """Say that it will be loaded again."""
        self._state, self._since = ModelState.LOADING, time.time()

    def load(self) -> None:
        """Build its engine, or wake it. Raise EngineLoadError, after which it counts as failed."""
        if self._is_asleep and self._engine and not self._engine.wake():
            self._engine.close()
            self._engine = None
        try:
            engine = self._engine or load_engine(self.spec)
        except EngineLoadError as exc:
            self.fail(str(exc))
            raise
        with self._changed:
            if not self._is_closed:
                self._engine, self._is_asleep = engine, False
        if self._engine is None:
            engine.close()
            return
        self._facts = file_facts(self.spec)
        self._library, self._reason = library_of(self.spec.engine), ""
        self._state, self._since = ModelState.READY, time.time()
        self._used_at = self.loaded_at = time.monotonic()
        self._comes_back = not self._starting  # The server of others that is down, too.
        self._note_away()
        self._engine.watch(self._note_change)

    def _note_change(self) -> None:
        self._since = time.time()
        self._note_away()
        self._on_fault(self)
        self._on_change()

    def _note_away(self) -> None:
        """Note since when its server is away, which was there once or is another's."""
        if self.state == ModelState.READY:
            self._comes_back, self._away_since = True, 0.0
        elif self._comes_back and not self._away_since:
            self._away_since = time.time()

    def say(self, reason: str) -> None:
        """Say why it is not loaded yet."""
        self._reason = reason

    def fail(self, reason: str) -> None:
        """Say that it could not be loaded, and why."""
        self._state, self._reason = ModelState.FAILED, reason

    def drain(self, timeout_s: float | None, *, comes_again: bool = False) -> bool:
        """Take no new work; return whether what runs has ended within the time.

        ``comes_again``: it will be loaded anew at once, which requests can wait for.
        """
        with self._changed:
            if self._state == ModelState.READY:
                self._state = ModelState.LOADING if comes_again else ModelState.DRAINING
                self._since = time.time()
                self._on_change()
            return self._changed.wait_for(lambda: self._busy == 0, timeout_s)

    def resume(self) -> None:
        """Take work again after a drain."""
        with self._changed:
            if self._state in (ModelState.DRAINING, ModelState.LOADING) and self._engine:
                self._state, self._since = ModelState.READY, time.time()
        self._on_change()

    def close(self) -> None:
        """Free its memory. Nothing runs when this is called."""
        with self._changed:
            self._is_closed = True
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

    def take(self) -> bool:
        """Take a slot; return False if none is free. ``release`` gives it back."""
        with self._changed:
            self._expected = max(0, self._expected - 1)
            if self.state != ModelState.READY or self._busy >= self.spec.slots:
                return False
            self._busy += 1
            return True

    def release(self) -> None:
        """Give a slot back."""
        with self._changed:
            was_open = self.is_open
            self._busy -= 1
            self._used_at = time.monotonic()
            self._changed.notify_all()
        if not was_open:
            self._on_change()
