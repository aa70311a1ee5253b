"""The runs of a worker: in the slots of its models, and without one while their tools are called.

``Runs`` fills free slots with waiting generations. A run whose answer calls tools of the site
leaves its slot (``ToolLoop``), and then has the next free slot of its model before anything is
claimed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from django.conf import settings
from redis.exceptions import RedisError

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.leases import ModelState, live_view
from inference_site.core.domain.errors import ShuttingDown
from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE
from inference_site.runs.models import Claim, Generation
from inference_site.runs.wake_ups import send_wake_up
from worker.engines.base import Engine, OnEnd
from worker.runtime.publisher import Publisher, StopReason
from worker.runtime.run import Run
from worker.runtime.served_model import Permit, ServedModel

logger = logging.getLogger(__name__)

_THREADS = 32
_POLL_S = 0.02
_LATE_THREADS = 8
_MAX_LATE = 200
"""How many runs without a slot may wait for a lock to store their end; more keep their slots."""


class Runs:
    """The runs of this process. ``accepts_work`` returns whether another one may start.

    An engine that blocks runs a generation on the thread that claimed it. An engine that does not
    block only starts it there; a few threads end its runs. After a run, the thread claims the next
    generation itself if one may wait, so under load no generation waits for a wake-up. ``changed``
    is called when a model has opened or closed for runs.
    """

    def __init__(
        self,
        worker: str,
        publisher: Publisher,
        accepts_work: Callable[[], bool],
        changed: Callable[[], None],
        model_named: Callable[[str], ServedModel | None],
    ) -> None:
        self._worker, self._publisher = worker, publisher
        self.accepts_work, self._changed, self._model_named = accepts_work, changed, model_named
        self._running: dict[Run, tuple[ServedModel, Permit]] = {}
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="runs")
        """For work that must not block the thread of an engine."""
        self._loop = ToolLoop(self)
        self._late: set[Run] = set()
        """The runs that have left their slots and whose ends are not stored yet."""
        self._late_pool = ThreadPoolExecutor(_LATE_THREADS, thread_name_prefix="late-ends")

    @property
    def attempts(self) -> set[tuple[str, int]]:
        """The ids and attempt numbers of all runs."""
        # In this order: a run is added to the next of these before it is removed from the last.
        runs = (*self._running, *self._loop.runs, *self._late.copy())
        return {(run.claim.public_id, run.claim.attempt) for run in runs}

    @property
    def running(self) -> list[tuple[Claim, float]]:
        """The claims of all runs, each with the Unix time at which its run started."""
        return [(run.claim, run.started_at) for run in tuple(self._running)]

    @property
    def awaited_models(self) -> set[str]:
        """The models that runs wait for after their tools were called; some may not be loaded."""
        return self._loop.awaited_models

    @property
    def unsent_tokens(self) -> dict[str, int]:
        """The output tokens so far of the runs that have sent no frame, by id."""
        runs = (*self._loop.runs, *self._running)
        return {run.claim.public_id: tokens for run in runs if (tokens := run.unsent_tokens)}

    def serve(self, model: ServedModel) -> None:
        """Run waiting generations of the model until none waits or no slot is free."""
        model.missed_wake_up = True
        self._fill_slots(model)

    def stop(self, model: ServedModel) -> None:
        """Stop the runs of this model."""
        for run, (runs_on, _) in tuple(self._running.items()):
            if runs_on is model:
                run.stream.stop(StopReason.SHUTDOWN)

    def wait(self, timeout_s: float) -> None:
        """Wait until all runs have ended, or the time is over; then shut the threads down."""
        until = time.monotonic() + timeout_s
        while (self._running or self._late or self._loop.runs) and time.monotonic() < until:
            time.sleep(_POLL_S)
        self._loop.stop()
        self.pool.shutdown(wait=not self._running)
        self._late_pool.shutdown(wait=not self._late, cancel_futures=True)

    def _fill_slots(self, model: ServedModel) -> None:
        """Fill free slots as long as wake-ups are missed."""
        while model.missed_wake_up:
            if not model.take_slot():
                self._forward_wake_up(model.spec.id)
                return
            model.missed_wake_up = False
            if not self._use_slot(model):
                return
            if not self.accepts_work() or not model.isolation.is_open:
                self._forward_wake_up(model.spec.id)
                return

    def _forward_wake_up(self, model: str) -> None:
        """Send a wake-up that this worker cannot serve to the other workers, if there are any."""
        try:
            if any(worker.id != self._worker for worker in live_view.serving(model)):
                send_wake_up(model)
        except RedisError as exc:
            logger.warning("a wake-up for %s is lost; maintenance sends another: %s", model, exc)

    def _use_slot(self, model: ServedModel) -> bool:
        """Run waiting generations in a slot that was taken, then release it.

        Return False if the slot is still in use, by an engine that does not block.
        """
        try:
            while model.may_run:
                if resumable := self._loop_turn(model):
                    run, permit = resumable
                    model.client_slots.resume(run.claim)
                    self._running[run] = model, permit
                    if self._start(model, run, run.resume):
                        return False
                    continue
                if not self.accepts_work() or model.state != ModelState.READY:
                    break
                if (claimed := self._claim(model)) is None:
                    break
                claim, permit = claimed
                model.note_project(claim.project_id)
                run = self._begin(model, claim, permit)
                if self._start(model, run, run.start):
                    return False
                if not self._may_wait(model, run):
                    break
        except BaseException:
            model.release_slot()
            raise
        model.release_slot()
        return True

    def _may_wait(self, model: ServedModel, run: Run) -> bool:
        """Whether, after this run, a generation may wait that has no wake-up and can run.

        A generation that came while a slot was free has a wake-up that is read. While Redis is
        away, nothing can run; wake-ups come when it is back.
        """
        if run.is_cut_off:
            return False
        claim = run.claim
        if claim.others_waited or claim.may_restart or claim.is_isolated or model.missed_wake_up:
            return True
        return not model.is_open

    def _loop_turn(self, model: ServedModel) -> tuple[Run, Permit] | None:
        """Take a run that waits for its next turn and may run beside the active runs."""
        if not self._loop.has_waiting(model.spec.id) or not (permit := model.isolation.enter()):
            return None
        run = self._loop.next(model.spec.id)
        if run is None:
            permit.leave()
        return None if run is None else (run, permit)

    def _claim(self, model: ServedModel) -> tuple[Claim, Permit] | None:
        """Claim a generation that may run beside the active runs; None if there is none."""
        permit = model.isolation.enter()
        if permit is None:
            return None
        claim = None
        may_background = model.client_slots.enter()
        try:
            claim = Generation.objects.claim(
                model.spec.id,
                self._worker,
                model.recent_projects,
                is_idle=permit.is_only_run,
                may_drain=permit.may_drain,
                may_background=may_background,
            )
        finally:
            model.client_slots.claimed(claim, has_entered=may_background)
            if claim is None:
                permit.leave()
        return None if claim is None else (claim, permit)

    def _begin(self, model: ServedModel, claim: Claim, permit: Permit) -> Run:
        """Return the run of a claimed generation, which is counted from now on."""
        stream = self._publisher.open(claim.public_id, claim.attempt)
        run = Run(claim, stream, self._end_later)
        self._running[run] = model, permit
        if not claim.is_isolated:
            return run
        # A suspect run starts with no other beside it; other runs join it after its trial.
        permit.isolate()
        self._changed()

        def watch() -> None:
            if permit.share_after_trial(lambda: run.output_s):
                self._changed()
                send_wake_up(model.spec.id)  # A wake-up may have come during the trial.

        threading.Thread(target=watch, name="trial", daemon=True).start()
        return run

    def _start(self, model: ServedModel, run: Run, start: Start) -> bool:
        """Start the engine for a run; return True if it continues on its own."""
        started_at = time.monotonic()

        def on_end(error: Exception | None) -> None:
            model.record_run_time(time.monotonic() - started_at)
            self.pool.submit(self._end, model, run, error)

        continues = False
        try:
            continues = start(model.engine, on_end)
        finally:
            if not continues:
                self._leave(run)
                model.record_run_time(time.monotonic() - started_at)
        return continues

    def _leave(self, run: Run) -> None:
        """Remove a run that has ended, or calls tools now; if it was isolated, others may start."""
        model, permit = self._running[run]
        calls_tools = run.calls_tools
        if calls_tools:
            self._loop.note(run)
        else:
            self._loop.forget(run)
        del self._running[run]
        model.client_slots.leave(run.claim)
        if permit.leave():
            self._changed()
        if calls_tools:
            looping = LoopingRun(model, run)
            looping.note(1)
            self._loop.call_tools(looping)

    def has_slot(self, model_id: str) -> bool | None:
        """Whether the model has a free slot for a run that comes back from its tools.

        None if this worker has lost the model, and does not load it for such a run.
        """
        model = self._model_named(model_id)
        if model is not None:
            return None if model.has_failed_to_load else model.may_resume
        spec = catalogue().models.get(model_id)
        returns = spec is not None and fleet.is_on_demand(spec) and self.accepts_work()
        return False if returns else None

    def free_elsewhere(self, model_id: str) -> int:
        """Return how many slots of a model are free in other workers; 0 while Redis is away."""
        try:
            workers = live_view.serving(model_id)
        except RedisError:
            return 0
        reports = (worker.model(model_id) for worker in workers if worker.id != self._worker)
        return sum(report.free for report in reports if report)

    def serve_if_open(self, model_id: str) -> None:
        """Fill a free slot of a model as ``serve`` does; without one, the next that is freed.

        It may run an engine: threads that watch something must not call it.
        """
        if model := self._model_named(model_id):
            model.missed_wake_up = True
            try:
                if model.may_resume:
                    self._fill_slots(model)
            except DATABASE_UNAVAILABLE as exc:
                logger.warning("cannot claim for %s: %s", model_id, exc)

    def _end(self, model: ServedModel, run: Run, error: Exception | None) -> None:
        """End a run of an engine that does not block, and use its slot for the next generation."""
        try:
            run.end(error)
        finally:
            self._leave(run)
        try:
            if not self._may_wait(model, run):
                model.release_slot()
            elif not self._use_slot(model):
                return
            self._fill_slots(model)
        except DATABASE_UNAVAILABLE as exc:
            logger.warning("cannot claim for %s: %s", model.spec.id, exc)
        except Exception:
            logger.exception("model %s: a slot could not be filled again", model.spec.id)

    def _end_later(self, run: Run, finish: Callable[[], None]) -> bool:
        """Store an end that waits for a lock on another thread; False if too many wait already."""
        if len(self._late) >= _MAX_LATE:
            return False

        def end() -> None:
            try:
                finish()
            except Exception:
                logger.exception("generation %s: its end is not stored", run.claim.public_id)
            finally:
                self._late.discard(run)

        self._late.add(run)
        try:
            self._late_pool.submit(end)
        except RuntimeError:  # The worker stops; it waits for runs that hold their slots.
            self._late.discard(run)
            return False
        return True


_TOOL_THREADS = 64
"""How many runs have their tools called at once; the others wait, without a slot."""
_WATCH_S = 0.05
_SERVE_S = 1.0
"""How often waiting runs try to get a slot, in case the model has been loaded again."""
_OWN_SLOT_S = 3.0
"""How long a run waits for a slot of this worker while another has one: about the time in which a
long prefix is read again, and longer than a lease is old."""

Start = Callable[[Engine, OnEnd], bool]
"""``Run.start`` or ``Run.resume``."""


@dataclass(eq=False, slots=True)
class LoopingRun:
    """A run that has left a slot of ``model``, which may have been loaded again since."""

    model: ServedModel
    run: Run
    waits_since: float = 0.0

    @property
    def model_id(self) -> str:
        """The id of its model."""
        return self.model.spec.id

    def note(self, change: int) -> None:
        """Have its model count it, by 1 or by -1."""
        self.model.note_tools(change, may_restart=self.run.claim.may_restart)


class ToolLoop:
    """The runs of this process that call tools or wait for their next turn.

    A thread of a pool runs the calls of a run. After that the run waits for a free slot of its
    model in this worker, which has the prefix of its next turn in memory. A run that waits costs no
    thread: one thread watches them all, and ends those that were cancelled. A run in the background
    is given back to the queue if the worker ends or has lost the model, or if it has waited for
    some seconds while another worker has a free slot; another attempt continues after the turns
    that are saved. ``slots`` has the runs that have one.
    """

    def __init__(self, slots: Runs) -> None:
        self._slots = slots
        self._runs: set[Run] = set()
        self._waiting: list[LoopingRun] = []
        self._lock = threading.Lock()
        self._has_waiting = threading.Event()
        self._threads = ThreadPoolExecutor(_TOOL_THREADS, thread_name_prefix="tools")
        self._watch: threading.Thread | None = None

    @property
    def runs(self) -> set[Run]:
        """These runs, from their first call to their end, also while in a slot."""
        with self._lock:
            return set(self._runs)

    @property
    def awaited_models(self) -> set[str]:
        """The models that runs wait for."""
        return {looping.model_id for looping in tuple(self._waiting)}

    def note(self, run: Run) -> None:
        """Record a run that leaves its slot; after that, ``call_tools`` is called."""
        with self._lock:
            self._runs.add(run)

    def call_tools(self, looping: LoopingRun) -> None:
        """Call the tools of a run; then have it wait for a slot, unless it is over."""
        with suppress(RuntimeError):  # The worker has stopped; its death ends the run.
            self._threads.submit(self._call, looping)

    def stop(self) -> None:
        """Start no more calls; the worker ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, looping: LoopingRun) -> None:
        try:
            if not looping.run.call_tools():
                looping.note(-1)
                self.forget(looping.run)
            elif looping.run.claim.may_restart and not self._slots.accepts_work():
                self._end(looping, ShuttingDown())  # Another worker has the next turn.
            else:
                looping.waits_since = time.monotonic()
                with self._lock:
                    self._waiting.append(looping)
                    if self._watch is None:
                        self._watch = threading.Thread(
                            target=self._main, name="tool loop", daemon=True
                        )
                        self._watch.start()
                self._has_waiting.set()
                self._slots.pool.submit(self._slots.serve_if_open, looping.model_id)
        except Exception:
            id_ = looping.run.claim.public_id
            logger.exception("generation %s: its tool loop failed", id_)

    def has_waiting(self, model_id: str) -> bool:
        """Whether a run of a model waits for a slot."""
        return any(one.model_id == model_id for one in tuple(self._waiting))

    def next(self, model_id: str) -> Run | None:
        """Return the run of a model that has waited longest, for the caller's slot."""
        with self._lock:
            found = next((one for one in self._waiting if one.model_id == model_id), None)
            if found is not None:
                self._waiting.remove(found)
        if found is None:
            return None
        found.note(-1)
        return found.run

    def forget(self, run: Run) -> None:
        """Remove a run that has ended; it may never have been here."""
        with self._lock:
            self._runs.discard(run)

    def _end(self, looping: LoopingRun, error: Exception | None) -> None:
        looping.note(-1)
        looping.run.end(error)
        self.forget(looping.run)

    def _main(self) -> None:
        served_at = 0.0
        while True:
            self._has_waiting.wait()
            time.sleep(_WATCH_S)
            with self._lock:
                waiting = list(self._waiting)
                if not waiting:
                    self._has_waiting.clear()
            for looping in waiting:
                is_late = time.monotonic() - looping.waits_since > settings.QUEUE_TIMEOUT_S
                gives_up = is_late or self._slots.has_slot(looping.model_id) is None
                if looping.run.stream.cancelled or gives_up:
                    self._take_out(looping, ShuttingDown() if gives_up else None)
            if time.monotonic() - served_at > _SERVE_S:
                served_at = time.monotonic()
                for model_id in {looping.model_id for looping in waiting}:
                    if self._slots.has_slot(model_id):
                        self._slots.pool.submit(self._slots.serve_if_open, model_id)
                    else:
                        self._hand_over(model_id, waiting)

    def _hand_over(self, model_id: str, waiting: list[LoopingRun]) -> None:
        """Give runs that wait for long back to the queue, as many as others have free slots."""
        late = time.monotonic() - _OWN_SLOT_S
        given = [
            one
            for one in waiting
            if one.model_id == model_id and one.run.claim.may_restart and one.waits_since < late
        ]
        for looping in given[: self._slots.free_elsewhere(model_id) if given else 0]:
            self._take_out(looping, ShuttingDown())

    def _take_out(self, looping: LoopingRun, error: Exception | None) -> None:
        """End a run that waits, unless a slot has taken it."""
        with self._lock:
            if looping not in self._waiting:
                return
            self._waiting.remove(looping)
        self._slots.pool.submit(self._end, looping, error)
