"""One model in this worker: its state, its engine, its slots, and the isolation of suspect runs.

A run is isolated when its worker died during the attempt before its last one: the run may be the
cause, and a further death then ends no other run. An isolated run starts with no other run beside
it. After it has produced output for a while, other runs join it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Literal

from django.conf import settings

from inference_site.catalogue.engines.registry import library_of, model_capabilities
from inference_site.catalogue.fleet.leases import ModelReport, ModelState
from inference_site.catalogue.model_files import FileFacts, file_facts
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.runs.models import Claim, ServiceClass
from worker.engines.base import Engine, ServerFacts, load_engine

_BETWEEN_ISOLATED_S = 5.0
"""After an isolated run, a busy worker drains for the next one only after this time. An idle worker
starts one at once."""
_DRAIN_S = 5.0
"""How long an isolated run waits for the other runs to end; they may take minutes longer."""
_TRIAL_S = 2.0
"""How long an isolated run must produce output before other runs may start."""
_CHECK_S = 0.2

_CLIENTS_S = 10.0
"""For how long slots are kept free for clients after the last request of one."""

_NEWEST_WEIGHT = 0.1
"""Weight of the newest run in the moving average of run times."""
_MAX_RECENT_PROJECTS = 100
_TAIL_BYTES = 16_384
_THREADS = 32
"""For an engine that does not block: a generation needs a thread only at its start and its end."""


class Isolation:
    """Which runs of one model may be active together: many shared runs, or one isolated run.

    Thread-safe.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.shared = self.isolated = 0
        """Number of shared runs, and of isolated runs, started or waiting."""
        self.is_taken = False
        """Whether an isolated run has started; other isolated runs wait for it."""
        self.last_isolated_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a run may start."""
        return not self.isolated

    def enter(self) -> Permit | None:
        """Return a permit for a run, to be held from before its claim; None if none may start."""
        with self.changed:
            if not self.is_open:
                return None
            self.shared += 1
            return Permit(self)


class Permit:
    """The permission of one run to run in this process; ``leave`` returns it."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._is_isolated = self._has_left = False

    @property
    def is_only_run(self) -> bool:
        """Whether no other shared run is active."""
        return self._isolation.shared == 1

    @property
    def may_drain(self) -> bool:
        """Whether this run may wait for the others to end: not soon after an isolated run."""
        return time.monotonic() - self._isolation.last_isolated_at > _BETWEEN_ISOLATED_S

    def isolate(self) -> None:
        """Let no other run start, and wait up to ``_DRAIN_S`` for the active ones to end."""
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

    def share_after_trial(self, output_s: Callable[[], float]) -> bool:
        """Wait until the run has produced output for ``_TRIAL_S``, then let others run beside it.

        ``output_s`` returns for how many seconds it has produced output. Return False if the run
        ends before that.
        """
        while output_s() < _TRIAL_S:
            with self._isolation.changed:
                if self._isolation.changed.wait_for(lambda: self._has_left, _CHECK_S):
                    return False
        with self._isolation.changed:
            if self._has_left:
                return False
            self._end_isolation()
            self._isolation.shared += 1
            return True

    def leave(self) -> bool:
        """Return the permit when the run has ended; return whether it was isolated."""
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


class ClientSlots:
    """Keeps a part of a model's slots free of background work while clients use the model.

    A run is not interrupted for a client, so a client waits for no slot only if one is free. One of
    several slots at least is kept, until clients have sent nothing for ``_CLIENTS_S``. Thread-safe.
    """

    def __init__(self, slots: int) -> None:
        kept = math.ceil(slots * settings.CLIENT_SLOTS_PERCENT / 100) if slots > 1 else 0
        self._most = max(1, slots - kept)
        self._background = 0
        self._client_at = -math.inf
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """Count a background run before its claim; False if no more may run now."""
        with self._lock:
            is_used = time.monotonic() - self._client_at < _CLIENTS_S
            if is_used and self._background >= self._most:
                return False
            self._background += 1
            return True

    def claimed(self, claim: Claim | None, *, has_entered: bool) -> None:
        """Note what was claimed; unless that is a background run, it is counted no more."""
        is_background = claim is not None and claim.service_class >= ServiceClass.BACKGROUND
        with self._lock:
            if has_entered and not is_background:
                self._background -= 1
            if claim is not None and not is_background:
                self._client_at = time.monotonic()

    def resume(self, claim: Claim) -> None:
        """Count a background run that goes on after a call of a tool."""
        if claim.service_class >= ServiceClass.BACKGROUND:
            with self._lock:
                self._background += 1

    def leave(self, claim: Claim) -> None:
        """Count a run no more."""
        if claim.service_class >= ServiceClass.BACKGROUND:
            with self._lock:
                self._background -= 1


class ServedModel:
    """A model of the catalogue in this worker, from the start of its load until it is dropped.

    ``on_change`` is called when the model opens or closes for generations. ``on_fault`` is called
    before that if the cause is a fault of its engine, or the end of one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        on_change: Callable[[], None] = lambda: None,
        on_fault: Callable[[ServedModel], None] = lambda _: None,
    ) -> None:
        self.spec = spec
        self.progress: float | None = None
        self.missed_wake_up = False
        """Whether a wake-up came while no slot was free; the thread that frees one claims again."""
        self.is_leaving = False
        """Whether this worker has given its replica up, and drops it when its runs have ended."""
        self.isolation = Isolation()
        self.client_slots = ClientSlots(spec.slots)
        self.used_at = self.loaded_at = time.monotonic()
        """When a run ended last, and when the model was loaded, by the monotonic clock."""
        self.reason = ""
        """Why the model is not ready, for operators."""
        self._on_change, self._on_fault = on_change, on_fault
        self._engine: Engine | None = None
        self._state, self._since = ModelState.LOADING, time.time()
        self._library = ""
        self._is_closed = self._is_asleep = self._is_expected_back = False
        self._away_since = 0.0
        self._facts: FileFacts = {}
        self._busy = self._reserved = self._calling_tools = self._awaited_loops = 0
        self._lets_loops_end = False
        self._run_s = 0.0
        self._recent_projects: dict[int, None] = {}
        self._changed = threading.Condition()

    @property
    def engine(self) -> Engine:
        """The engine, while a slot is held. Raise RuntimeError if the model is not loaded."""
        if self._engine is None:
            raise RuntimeError(f"{self.spec.id} is not loaded.")
        return self._engine

    @property
    def is_loaded(self) -> bool:
        """Whether it has an engine that does not sleep; the engine may have a fault."""
        return self._engine is not None and not self._is_asleep

    @property
    def threads(self) -> int:
        """The most threads that its generations need at once."""
        blocks = self._engine is None or self._engine.blocks
        return self.spec.slots if blocks else min(self.spec.slots, _THREADS)

    @property
    def state(self) -> ModelState:
        """The state of the model, or of its engine if that is starting or has a fault."""
        if self._starting:
            return ModelState.LOADING
        return ModelState.FAILED if self._fault else self._state

    @property
    def has_failed_to_load(self) -> bool:
        """Whether its load has failed; a loaded model whose engine has a fault has not."""
        return not self.is_loaded and self.state == ModelState.FAILED

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
        """Whether it accepts a generation now: not during the trial of an isolated one."""
        return self.state == ModelState.READY and self._has_room

    @property
    def busy(self) -> int:
        """Number of slots that runs hold or wake-ups have reserved."""
        return self._busy + self._reserved

    @property
    def is_in_use(self) -> bool:
        """Whether a slot is busy, or a run without a slot comes back for its next turn."""
        return bool(self.busy or self._calling_tools)

    @property
    def may_run(self) -> bool:
        """Whether runs may hold its slots; while it drains, those that come back from tools."""
        if self.state == ModelState.READY:
            return True
        return self._lets_loops_end and self._awaited_loops > 0 and self._engine is not None

    @property
    def may_resume(self) -> bool:
        """Whether a run that comes back from its tools may have a slot now."""
        return self.may_run and self._has_room

    @property
    def _has_room(self) -> bool:
        return self.isolation.is_open and self.busy < self.spec.slots

    def note_tools(self, change: int, *, may_restart: bool) -> None:
        """Count the runs that have left their slots while tools are called: by 1 or by -1.

        One that ``may_restart`` goes on elsewhere if the model is dropped; others are awaited.
        """
        with self._changed:
            self._calling_tools += change
            self._awaited_loops += 0 if may_restart else change
            self.used_at = time.monotonic()
            self._changed.notify_all()

    @property
    def idle_s(self) -> float:
        """Seconds since the last run ended; 0 while it is in use."""
        return 0.0 if self.is_in_use else time.monotonic() - self.used_at

    @property
    def report(self) -> ModelReport:
        """The model as the lease describes it."""
        now = time.time()  # A clock that was set back makes no time of the future.
        self._since, self._away_since = min(self._since, now), min(self._away_since, now)
        engine = self._engine
        server = ServerFacts() if engine is None else engine.server
        capabilities = () if engine is None else tuple(sorted(model_capabilities(self.spec)))
        tools: Literal["native", "prompt"] | None = None
        if engine is not None and "tools" in capabilities:
            tools = "native" if engine.shows_tools else "prompt"
        return ModelReport(
            id=self.spec.id,
            slots=self.spec.slots,
            busy=self._busy,
            state=self.state,
            progress=self.progress if self._state == ModelState.LOADING else None,
            reason=self._starting or self._fault or self.reason,
            since=self._since,
            engine=self.spec.engine,
            library=self._library,
            capabilities=capabilities,
            run_s=round(self._run_s, 3),
            context_length=(engine and engine.context_length) or self.spec.context_length,
            away_since=self._away_since if self._state == ModelState.READY else 0.0,
            taken_bytes=server.taken_bytes,
            telemetry=dict(server.telemetry),
            tools=tools,
            **self._facts,
        )

    @property
    def log_lines(self) -> list[str]:
        """The last lines of its server's log."""
        path = None if self._engine is None else self._engine.server.log
        if path is None:
            return []
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                return file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []

    def sleep(self) -> bool:
        """Free the GPU memory of its server; return False if the engine cannot.

        Call it while nothing runs. To load the model again, call ``wake`` and then ``load``.
        """
        if self._engine is None or not self._engine.sleep():
            return False
        self._is_asleep, self._is_expected_back, self._away_since = True, False, 0.0
        self._lets_loops_end = False
        self._state, self._since = ModelState.SLEEPING, time.time()
        return True

    def wake(self) -> None:
        """Report a sleeping model as loading; ``load`` wakes its server."""
        self.is_leaving = False
        self._state, self._since = ModelState.LOADING, time.time()

    def load(self) -> None:
        """Load its engine, or wake it. Raise EngineLoadError, after which the state is failed."""
        if self._is_asleep and self._engine and not self._engine.wake():
            self._engine.close()
            self._engine = None
        try:
            engine = self._engine or load_engine(self.spec)
        except EngineLoadError as exc:
            self.fail(str(exc))
            raise
        facts = file_facts(self.spec)
        with self._changed:  # All at once: from then on it may be evicted.
            if is_wanted := not self._is_closed:
                self._engine, self._is_asleep, self._facts = engine, False, facts
                self._library, self.reason = library_of(self.spec.engine), ""
                self._state, self._since = ModelState.READY, time.time()
                self.used_at = self.loaded_at = time.monotonic()
                # An upstream that is down may come back; a server that the worker starts was
                # never up.
                self._is_expected_back = not self._starting
                self._update_away_since()
        if not is_wanted:
            engine.close()
            return
        engine.watch(self._on_engine_change)

    def _on_engine_change(self) -> None:
        self._since = time.time()
        self._update_away_since()
        self._on_fault(self)
        self._on_change()

    def _update_away_since(self) -> None:
        """Record since when the server is away, if it was ready once or belongs to others."""
        if self.state == ModelState.READY:
            self._is_expected_back, self._away_since = True, 0.0
        elif self._is_expected_back and not self._away_since:
            self._away_since = time.time()

    def fail(self, reason: str) -> None:
        """Record that it could not be loaded, and why."""
        self._state, self.reason, self._since = ModelState.FAILED, reason, time.time()

    def drain(
        self, timeout_s: float | None, *, reloads: bool = False, lets_loops_end: bool = False
    ) -> bool:
        """Accept no new runs; return whether the active ones have ended within the time.

        ``reloads``: report the model as loading, because requests can wait for its next load.
        ``lets_loops_end``: wait for runs without a slot too, unless they may restart, and let them
        have their next turns.
        """
        with self._changed:
            if self._state == ModelState.READY:
                self._state = ModelState.LOADING if reloads else ModelState.DRAINING
                self._since = time.time()
                self._on_change()
            self._lets_loops_end = lets_loops_end
            return self._changed.wait_for(
                lambda: not (self._busy or (lets_loops_end and self._awaited_loops)), timeout_s
            )

    def resume(self) -> None:
        """Accept runs again after a drain."""
        with self._changed:
            if self._state in (ModelState.DRAINING, ModelState.LOADING) and self._engine:
                self._state, self._since = ModelState.READY, time.time()
        self._on_change()

    def close(self) -> None:
        """Free its memory. Call it while nothing runs."""
        with self._changed:
            self._is_closed = True
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def recent_projects(self) -> list[int]:
        """The projects whose generations were claimed last, the latest at the end."""
        with self._changed:
            return list(self._recent_projects)

    def note_project(self, project_id: int) -> None:
        """Record the project of a claimed generation.

        Among projects with equally many running generations, the claim prefers those that are not
        recent, so the length of a project's queue gives it no advantage.
        """
        with self._changed:
            self._recent_projects.pop(project_id, None)
            self._recent_projects[project_id] = None
            if len(self._recent_projects) > _MAX_RECENT_PROJECTS:
                del self._recent_projects[next(iter(self._recent_projects))]

    def record_run_time(self, seconds: float) -> None:
        """Add a run to the moving average of how long runs hold their slots."""
        with self._changed:
            self._run_s += (seconds - self._run_s) * (_NEWEST_WEIGHT if self._run_s else 1)

    def reserve_slot(self) -> None:
        """Reserve a slot for a received wake-up, until its task takes it."""
        with self._changed:
            self._reserved += 1

    def take_slot(self) -> bool:
        """Take a slot; return False if none is free. ``release_slot`` returns it."""
        with self._changed:
            self._reserved = max(0, self._reserved - 1)
            if not self.may_run or self._busy >= self.spec.slots:
                return False
            self._busy += 1
            return True

    def release_slot(self) -> None:
        """Return a slot."""
        with self._changed:
            was_open = self.is_open
            self._busy -= 1
            self.used_at = time.monotonic()
            self._changed.notify_all()
        if not was_open:
            self._on_change()
