"""The runs of a worker process: slots are filled with what waits, and filled again at each end.

An engine that blocks runs a generation on the thread that has claimed it. One that does not is only
begun there; a few threads end its runs. Either thread then looks for the next generation itself if
one may wait, so under load none waits for a wake-up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from redis.exceptions import RedisError

from inference_site.fleet.leases import ModelState, live_view
from inference_site.generations.models import Claim, Generation
from inference_site.generations.wake_ups import send_wake_up
from inference_site.storage.postgresql import DATABASE_UNAVAILABLE
from worker.runtime.isolation import Permit
from worker.runtime.publisher import Publisher, StopReason, Stream
from worker.runtime.run import Run
from worker.runtime.served_model import ServedModel

logger = logging.getLogger(__name__)

_THREADS = 32
_POLL_S = 0.02
_LATE_THREADS = 8
_MOST_LATE = 200
"""How many ends may wait for a lock at once without their slots; more keep theirs."""


class Runs:
    """What runs in this process. ``takes_nothing`` says whether nothing more is to be begun.

    ``changed`` is called when a model is open that was not, or the other way round.
    """

    def __init__(
        self,
        worker: str,
        publisher: Publisher,
        takes_nothing: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        self._changed = changed
        self._worker, self._publisher, self._takes_nothing = worker, publisher, takes_nothing
        self._running: dict[Claim, tuple[ServedModel, Stream, Permit]] = {}
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="runs")
        """For what an engine's own thread must not be blocked by."""
        self._late: set[Claim] = set()
        """What has left its slot, and is not stored yet."""
        self._late_pool = ThreadPoolExecutor(_LATE_THREADS, thread_name_prefix="late-ends")

    @property
    def attempts(self) -> set[tuple[str, int]]:
        """What runs here, by id and attempt."""
        # In this order: an end is added to the late ones before its run is removed.
        claims = (*self._running, *self._late.copy())
        return {(claim.public_id, claim.attempt) for claim in claims}

    def serve(self, model: ServedModel) -> None:
        """Run waiting generations of the model until none waits or no slot is free."""
        model.missed_wake_up = True
        self._serve(model)

    def stop(self, model: ServedModel) -> None:
        """Have what runs on this model stop."""
        for runs_on, stream, _ in list(self._running.values()):
            if runs_on is model:
                stream.stop(StopReason.SHUTDOWN)

    def wait(self, timeout_s: float) -> None:
        """Wait for the ends of what engines run by themselves."""
        until = time.monotonic() + timeout_s
        while (self._running or self._late) and time.monotonic() < until:
            time.sleep(_POLL_S)
        self.pool.shutdown(wait=not self._running)
        self._late_pool.shutdown(wait=not self._late, cancel_futures=True)

    def _serve(self, model: ServedModel) -> None:
        while model.missed_wake_up:
            if not model.take():
                self._pass_on(model.spec.id)
                return
            model.missed_wake_up = False
            if not self._fill(model):
                return
            if self._takes_nothing() or not model.isolation.is_open:
                self._pass_on(model.spec.id)
                return

    def _pass_on(self, model: str) -> None:
        """Leave a wake-up that cannot be answered here any more to the others, if there are."""
        try:
            if any(worker.id != self._worker for worker in live_view.serving(model)):
                send_wake_up(model)
        except RedisError as exc:
            logger.warning("a wake-up for %s is lost; maintenance sends another: %s", model, exc)

    def _fill(self, model: ServedModel) -> bool:
        """Run what waits in the slot that was taken; return whether it was given back.

        If not, an engine goes on by itself, and what waits is run at its end.
        """
        try:
            while model.state == ModelState.READY and not self._takes_nothing():
                if (claimed := self._claimed(model)) is None:
                    break
                claim, permit = claimed
                model.note_served(claim.project_id)
                if self._run(model, claim, permit):
                    return False
                if not self._may_wait(model, claim):
                    break
        except BaseException:
            model.release()
            raise
        model.release()
        return True

    def _may_wait(self, model: ServedModel, claim: Claim) -> bool:
        """Whether something may wait, once this run has ended, of which no wake-up will tell.

        What came while a slot was free has one that is read, or has been.
        """
        if claim.others_waited or claim.may_restart or claim.is_isolated or model.missed_wake_up:
            return True
        return not model.is_open

    def _claimed(self, model: ServedModel) -> tuple[Claim, Permit] | None:
        """Claim what may run now, beside what runs; None when there is nothing."""
        permit = model.isolation.enter()
        if permit is None:
            return None
        claim = None
        try:
            claim = Generation.objects.claim(
                model.spec.id,
                self._worker,
                model.served,
                is_idle=permit.is_only_run,
                may_drain=permit.may_drain,
            )
        finally:
            if claim is None:
                permit.leave()
        return None if claim is None else (claim, permit)

    def _leave(self, claim: Claim) -> None:
        """Let others begin, once a run has ended."""
        _, _, permit = self._running.pop(claim)
        if permit.leave():
            self._changed()

    def _run(self, model: ServedModel, claim: Claim, permit: Permit) -> bool:
        """Run what was claimed; return whether its engine goes on by itself."""
        stream = self._publisher.open(claim.public_id, claim.attempt)
        run = Run(claim, stream, partial(self._end_later, claim))
        self._running[claim] = model, stream, permit
        if claim.is_isolated:
            self._isolate(model, permit, run)
        began_at = time.monotonic()

        def on_end(error: Exception | None) -> None:
            model.note_run(time.monotonic() - began_at)
            self.pool.submit(self._end, model, claim, run, error)

        goes_on = False
        try:
            goes_on = run.start(model.engine, on_end)
        finally:
            if not goes_on:
                self._leave(claim)
                model.note_run(time.monotonic() - began_at)
        return goes_on

    def _isolate(self, model: ServedModel, permit: Permit, run: Run) -> None:
        """Have nothing run beside this one, which may end the process, at its beginning."""
        permit.isolate()
        self._changed()

        def watch() -> None:
            if permit.share_after_trial(run):
                self._changed()
                send_wake_up(model.spec.id)  # One may have come meanwhile, for nothing.

        threading.Thread(target=watch, name="trial", daemon=True).start()

    def _end_later(self, claim: Claim, finish: Callable[[], None]) -> bool:
        """Store an end that waits for a lock on another thread; False if too many wait already."""
        if len(self._late) >= _MOST_LATE:
            return False

        def end() -> None:
            try:
                finish()
            except Exception:
                logger.exception("generation %s: its end is not stored", claim.public_id)
            finally:
                self._late.discard(claim)

        self._late.add(claim)
        try:
            self._late_pool.submit(end)
        except RuntimeError:  # The worker stops, and waits for what has its slot.
            self._late.discard(claim)
            return False
        return True

    def _end(self, model: ServedModel, claim: Claim, run: Run, error: Exception | None) -> None:
        """End what went on by itself, and run in its slot what waits."""
        try:
            run.end(error)
        finally:
            self._leave(claim)
        try:
            if not self._may_wait(model, claim):
                model.release()
            elif not self._fill(model):
                return
            self._serve(model)
        except DATABASE_UNAVAILABLE as exc:
            logger.warning("cannot claim for %s: %s", model.spec.id, exc)
        except Exception:
            logger.exception("model %s: a slot could not be filled again", model.spec.id)
