"""Which models are in the memory of this host."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import redis.exceptions
from django.db import connection

from inference_site.catalogue.file_facts import file_facts
from inference_site.domain.device import Device
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec
from inference_site.generations.maintenance import attempt
from inference_site.generations.models import Generation, Status
from inference_site.host import memory_bytes
from inference_site.storage.redis_clients import site_client
from worker.engines.own_server import learnt, sizes_of
from worker.model_servers.nvml import gpus
from worker.runtime.served_model import ServedModel

_SHARE = 0.85
"""Of the host's memory, for models; the rest is for the platform and the page cache."""
_MIB = 2**20


class Resident(Protocol):
    """A model that is loaded, as it is seen from here. Times are those of the monotonic clock."""

    spec: ModelSpec

    @property
    def loaded_at(self) -> float:
        """When it was loaded."""

    @property
    def used_at(self) -> float:
        """When a run has ended on it last."""

    @property
    def busy(self) -> int:
        """How many runs there are on it."""


@dataclass(frozen=True, slots=True)
class Room:
    """What models may take: so many of them, so many bytes of the host's memory and of each GPU.

    0 models: any number; 0 bytes: ``_SHARE`` of the memory that the host has; 0 ``gpu_bytes``: all
    that is free there.
    """

    models: int = 0
    bytes: int = 0
    gpu_bytes: int = 0

    def lacks(self, wanted: ModelSpec, residents: Sequence[Resident], asleep: int = 0) -> bool:
        """Whether a model cannot be loaded beside these. Raise EngineLoadError if it never can.

        ``asleep`` is what sleeping servers take of the host's memory.
        """
        others = [resident.spec for resident in residents if takes_room(resident.spec)]
        if self.models and len(others) >= self.models:
            return True
        if any(are_exclusive(wanted, other) for other in others):
            return True
        needed = needed_bytes(wanted)
        if used := _gpus_of(wanted, found := gpus()):
            return self._lacks_gpus(wanted, others, {index: found[index] for index in used})
        budget = self.bytes or round(memory_bytes()[0] * _SHARE)
        if needed > budget:
            raise EngineLoadError(
                f"Model '{wanted.id}': it needs about {needed // _MIB} MiB of memory, and models "
                f"may take {budget // _MIB} MiB on this host."
            )
        return needed + sum(_host_bytes(spec, found) for spec in others) + asleep > budget

    def _lacks_gpus(
        self, wanted: ModelSpec, others: Sequence[ModelSpec], used: dict[int, Device]
    ) -> bool:
        """Whether these GPUs, by number, have no room; an estimate is for all of them together."""
        budgets = {i: self.gpu_bytes or device.memory_total for i, device in used.items()}
        needed = learnt(wanted).gpus or {-1: needed_bytes(wanted)}
        for index, bytes_ in needed.items():
            budget = budgets.get(index, sum(budgets.values()))
            if bytes_ > budget:
                where = "its GPUs" if index < 0 else f"GPU {index}"
                raise EngineLoadError(
                    f"Model '{wanted.id}': it needs about {bytes_ // _MIB} MiB of memory, and "
                    f"models may take {budget // _MIB} MiB on {where}."
                )
        taken = {i: sum(learnt(spec).gpus.get(i, 0) for spec in others) for i in used}
        free = {i: min(used[i].memory_free, budgets[i] - taken[i]) for i in used}
        return any(n > free.get(i, sum(free.values())) for i, n in needed.items())


def _gpus_of(spec: ModelSpec, found: Sequence[Device]) -> list[int]:
    """Return the numbers of the GPUs that a model uses, of those of this host."""
    named = spec.options.get("gpus")
    numbers = range(len(found)) if named is None else named
    return [index for index in numbers if index < len(found)] if spec.gpu_layers else []


def _host_bytes(spec: ModelSpec, found: Sequence[Device]) -> int:
    return learnt(spec).host if _gpus_of(spec, found) else needed_bytes(spec)


def takes_room(spec: ModelSpec) -> bool:
    """Whether the model is on this host: not one of servers elsewhere."""
    return spec.engine != "openai_upstream"


def shares_gpu(spec: ModelSpec) -> bool:
    """Whether the model's load may take memory of a GPU: what fits there depends on the others."""
    return spec.gpu_layers != 0 and spec.engine != "scripted" and bool(gpus())


def are_exclusive(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether one of them says that it cannot be loaded beside the other."""
    return other.id in one.exclusive_with or one.id in other.exclusive_with


_estimates: dict[tuple[str, str], int] = {}
"""By id and sizes: a header takes up to 0.4 s to read, and who waits for room asks again and again.
"""


def needed_bytes(spec: ModelSpec) -> int:
    """Return what a model takes: what its process was seen to take, else an estimate."""
    if seen := learnt(spec).host:
        return seen
    key = spec.id, sizes_of(spec)
    if key not in _estimates:
        facts = file_facts(spec)
        _estimates[key] = facts.get("memory_bytes", facts.get("size_bytes", 0))
    return _estimates[key]


def longest_stay_s(residents: Sequence[Resident]) -> float:
    """Return after how many seconds one of these has to make room at the latest."""
    now = time.monotonic()
    may_go = [r for r in residents if takes_room(r.spec) and not r.spec.is_pinned]
    stays = (r.spec.min_resident_s - (now - r.loaded_at) for r in may_go)
    return max(0.0, min(stays, default=0.0))


def next_to_go(
    wanted: ModelSpec, residents: Sequence[Resident], waited_for: Collection[str]
) -> Resident | None:
    """Return the resident that goes next to make room for a model; None if none may go now.

    ``waited_for`` are the ids of models that generations wait for.
    """
    now = time.monotonic()
    may_go = [r for r in residents if takes_room(r.spec) and not r.spec.is_pinned]
    may_go.sort(key=lambda r: (not are_exclusive(wanted, r.spec), r.used_at))
    for resident in may_go:
        if not resident.busy and resident.spec.id not in waited_for:
            return resident
    stayed = [r for r in may_go if now - r.loaded_at >= r.spec.min_resident_s]
    return min(stayed, key=lambda r: r.loaded_at, default=None)


_KEPT_S = 30 * 86_400


class Loadable(Protocol):
    """A model that is to be loaded, as it is seen from here."""

    spec: ModelSpec


T = TypeVar("T", bound=Loadable)


class LoadLine(Generic[T]):
    """The models that wait to be loaded, the longest waiting first, and those that are loaded now.

    For any thread.
    """

    def __init__(self) -> None:
        self._waiting: list[T] = []
        self._begun: dict[T, float] = {}
        self._known: dict[str, float] = {}
        self._changed = threading.Condition()

    def put(self, model: T) -> None:
        """Have a model wait for its turn."""
        with self._changed:
            self._waiting.append(model)
            self._changed.notify()

    def first(self, is_alone: Callable[[T], bool]) -> T:
        """Return the model whose turn it is, which stays in the line; wait for one.

        Of those that load alone the turn of one comes when no other of them is being loaded.
        """

        def found() -> T | None:
            is_taken = any(map(is_alone, self._begun))
            return next((m for m in self._waiting if not (is_taken and is_alone(m))), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None)
            model = found()
            assert model is not None
            return model

    def begin(self, model: T) -> None:
        """Note that the load of a model begins."""
        with self._changed:
            self._begun.setdefault(model, time.monotonic())

    def leave(self, model: T) -> None:
        """Take a model out of the line, which is being loaded or will never be."""
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(model)

    def end(self, model: T, *, is_loaded: bool) -> None:
        """Note that the load of a model has ended; learn from it if it was good."""
        with self._changed:
            began = self._begun.pop(model, None)
            self._changed.notify()
        if began is None or not is_loaded:
            return
        seconds = self._known[model.spec.id] = time.monotonic() - began
        with contextlib.suppress(redis.exceptions.RedisError):
            pipeline = site_client().pipeline(transaction=False)
            pipeline.hset(_key(), model.spec.id, round(seconds, 3))
            pipeline.expire(_key(), _KEPT_S)
            pipeline.execute()

    def read(self) -> None:
        """Take up what this host has learnt before."""
        with contextlib.suppress(redis.exceptions.RedisError):
            learnt: Any = site_client().hgetall(_key())
            known = {id_.decode(): float(seconds) for id_, seconds in learnt.items()}
            self._known = {**known, **self._known}

    def expected_s(self, model: T, loading_s: float, stay_s: float | None) -> float | None:
        """Return in how many seconds a model should be ready; None if unknown.

        ``loading_s`` is for how long it has been loading if it is not in the line: its server is
        started again. ``stay_s`` is for how long whoever makes room for the first of the line
        stays, None if it needs none. Then each model before this one stays, too, as its entry says.
        """
        with self._changed:
            began, waiting = self._begun.get(model), list(self._waiting)
        own_s = self._known.get(model.spec.id)
        if own_s is None:
            return None
        if began is not None:
            return max(0.0, own_s - (time.monotonic() - began))
        if model not in waiting:
            return max(0.0, own_s - loading_s)
        before = waiting[: waiting.index(model)]
        loads = [s for other in before if (s := self._known.get(other.spec.id)) is not None]
        if len(loads) < len(before):
            return None
        stays_s = 0.0
        if stay_s is not None:
            stays_s = stay_s + sum(other.spec.min_resident_s for other in before)
        return own_s + stays_s + sum(loads)


def _key() -> str:
    return f"load-seconds:{socket.gethostname()}"


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
