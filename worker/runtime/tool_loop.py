"""ToolLoop: the runs that have left their slots, because tools of the site are called for them.

A thread of a pool runs the calls of a run. After that the run waits for a free slot of its model in
this worker, which has the prefix of its next turn in memory. A run that waits costs no thread: one
thread watches them all, and ends those that were cancelled. A run in the background is given back
to the queue if the worker ends or has lost the model, or if it has waited for some seconds while
another worker has a free slot; another attempt continues after the turns that are saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from django.conf import settings

from inference_site.core.domain.errors import ShuttingDown
from inference_site.runs.models import Claim
from worker.engines.base import Engine
from worker.runtime.publisher import Stream
from worker.runtime.run import Run
from worker.runtime.served_model import ServedModel

logger = logging.getLogger(__name__)

_THREADS = 64
"""How many runs have their tools called at once; the others wait, without a slot."""
_POLL_S = 0.05
_SERVE_S = 1.0
"""How often waiting runs try to get a slot, in case the model has been loaded again."""
_OWN_SLOT_S = 3.0
"""How long a run waits for a slot of this worker while another has one: about the time in which a
long prefix is read again, and longer than a lease is old."""

Start = Callable[[Engine, Callable[[Exception | None], None]], bool]
"""``Run.start`` or ``Run.resume``."""


@dataclass(eq=False, slots=True)
class LoopingRun:
    """A run that has left a slot of ``model``, which may have been loaded again since."""

    model: ServedModel
    claim: Claim
    stream: Stream
    run: Run
    waits_since: float = 0.0

    @property
    def model_id(self) -> str:
        """The id of its model."""
        return self.model.spec.id


class ToolLoop:
    """The runs of this process that call tools or wait for their next turn.

    ``has_slot`` returns whether the model of this id has a free slot; None if the worker has lost
    the model. ``serve`` fills the free slots of a model; it may run an engine, so it is called on
    threads of ``pool``. ``accepts_work`` returns False once the worker drains. ``free_elsewhere``
    returns how many slots of a model are free in other workers.
    """

    def __init__(
        self,
        has_slot: Callable[[str], bool | None],
        serve: Callable[[str], None],
        accepts_work: Callable[[], bool],
        free_elsewhere: Callable[[str], int],
        pool: Executor,
    ) -> None:
        self._has_slot, self._serve, self._pool = has_slot, serve, pool
        self._accepts_work, self._free_elsewhere = accepts_work, free_elsewhere
        self._runs: set[Claim] = set()
        self._waiting: list[LoopingRun] = []
        self._lock = threading.Lock()
        self._has_waiting = threading.Event()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tools")
        self._watch: threading.Thread | None = None

    @property
    def claims(self) -> set[Claim]:
        """The claims of these runs, from their first call to their end, also while in a slot."""
        with self._lock:
            return set(self._runs)

    def note(self, claim: Claim) -> None:
        """Record a run that leaves its slot; after that, ``call_tools`` is called."""
        with self._lock:
            self._runs.add(claim)

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
                looping.model.note_tools(-1)
                self.forget(looping.claim)
            elif looping.claim.may_restart and not self._accepts_work():
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
                self._pool.submit(self._serve, looping.model_id)
        except Exception:
            logger.exception("generation %s: its tools", looping.claim.public_id)

    def has_waiting(self, model_id: str) -> bool:
        """Whether a run of a model waits for a slot."""
        return any(one.model_id == model_id for one in tuple(self._waiting))

    def next(self, model_id: str) -> LoopingRun | None:
        """Return the run of a model that has waited longest, for the caller's slot."""
        with self._lock:
            found = next((one for one in self._waiting if one.model_id == model_id), None)
            if found is not None:
                self._waiting.remove(found)
        if found is not None:
            found.model.note_tools(-1)
        return found

    def forget(self, claim: Claim) -> None:
        """Remove a run that has ended; it may never have been here."""
        with self._lock:
            self._runs.discard(claim)

    def _end(self, looping: LoopingRun, error: Exception | None) -> None:
        looping.model.note_tools(-1)
        looping.run.end(error)
        self.forget(looping.claim)

    def _main(self) -> None:
        served_at = 0.0
        while True:
            self._has_waiting.wait()
            time.sleep(_POLL_S)
            with self._lock:
                waiting = list(self._waiting)
                if not waiting:
                    self._has_waiting.clear()
            for looping in waiting:
                is_late = time.monotonic() - looping.waits_since > settings.QUEUE_TIMEOUT_S
                is_lost = self._has_slot(looping.model_id) is None or is_late
                if looping.stream.cancelled or is_lost:
                    self._take_out(looping, ShuttingDown() if is_lost else None)
            if time.monotonic() - served_at > _SERVE_S:
                served_at = time.monotonic()
                for model_id in {looping.model_id for looping in waiting}:
                    if self._has_slot(model_id):
                        self._pool.submit(self._serve, model_id)
                    else:
                        self._hand_over(model_id, waiting)

    def _hand_over(self, model_id: str, waiting: list[LoopingRun]) -> None:
        """Give runs that wait for long back to the queue, as many as others have free slots."""
        late = time.monotonic() - _OWN_SLOT_S
        given = [
            one
            for one in waiting
            if one.model_id == model_id and one.claim.may_restart and one.waits_since < late
        ]
        for looping in given[: self._free_elsewhere(model_id) if given else 0]:
            self._take_out(looping, ShuttingDown())

    def _take_out(self, looping: LoopingRun, error: Exception | None) -> None:
        """End a run that waits, unless a slot has taken it."""
        with self._lock:
            if looping not in self._waiting:
                return
            self._waiting.remove(looping)
        self._pool.submit(self._end, looping, error)
