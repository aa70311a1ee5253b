"""Residents: which models are in the memory of this worker's host, and which has to go next.

A model that does not fit waits for its turn; turns go by waiting time. The models that may go are
those that are not pinned. One that is idle, because nothing runs on it and nothing waits for it,
goes at once, the one that was used least lately first. If none is idle, one that has been there for
the ``min_resident_s`` of its entry takes no new work, and goes when what runs on it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from inference_site.catalogue.model_files import file_facts
from inference_site.domain.device import Device
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec
from inference_site.host import memory_bytes
from worker.engines.own_server import learnt, sizes_of
from worker.model_servers.nvml import gpus

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
