"""The memory of models' servers: measured while they run, estimated from their files before that.

The maximum of a model's measurements is kept in a file, for the next load of the model.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from inference_site.catalogue.model_files import file_facts
from inference_site.core.domain.model_spec import ModelSpec
from worker.model_servers.process import ServerProcess, server_settings

_INTERVAL_S, _MOST_SHARE = 15.0, 0.0005
"""Interval of the measurements, and the share of the time that they may take: the kernel counts
each page of the server."""
_OTHERS_KEPT = 7
"""Measurements of one model with other sizes that are kept beside the latest."""


@dataclass(frozen=True)
class ServerMemory:
    """Memory of a server in bytes: the host's, and each GPU's by its number."""

    host: int = 0
    gpus: dict[int, int] = field(default_factory=dict)

    def at_least(self, other: ServerMemory) -> ServerMemory:
        """Return the maximum of each."""
        larger = {index: max(n, self.gpus.get(index, 0)) for index, n in other.gpus.items()}
        return ServerMemory(max(self.host, other.host), self.gpus | larger)


class MemoryMeter:
    """Measures the memory of the server of one model every few seconds."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._most = ServerMemory()
        self._next_at = 0.0
        self.host_bytes = 0
        """The host's memory at the last measurement."""

    def measure(self, process: ServerProcess, *, keeps: bool) -> None:
        """Measure if it is time to; with ``keeps``, keep the maximum for the next load."""
        if (begun := time.monotonic()) < self._next_at:
            return
        self.host_bytes = process.memory_bytes
        ended = time.monotonic()
        self._next_at = ended + max(_INTERVAL_S, (ended - begun) / _MOST_SHARE)
        most = self._most.at_least(ServerMemory(self.host_bytes, process.gpu_bytes))
        if most != self._most and keeps:
            self._most = most
            keep_maximum(self._spec, most)


def measured(spec: ModelSpec) -> ServerMemory:
    """Return the measured maximum of the memory of a model's server; 0 without measurements.

    Measurements of another file, or with other sizes, do not count.
    """
    return _all_measured(spec.id).get(_sizes_of(spec), ServerMemory())


_BY_SIZES = TypeAdapter(dict[str, ServerMemory])


def _all_measured(model: str) -> dict[str, ServerMemory]:
    try:
        return _BY_SIZES.validate_json(server_settings.file_of(model, ".memory").read_bytes())
    except (OSError, ValueError):
        return {}


def keep_maximum(spec: ModelSpec, memory: ServerMemory) -> None:
    """Store the maximum of this and the earlier measurements for ``measured``."""
    known, sizes = _all_measured(spec.id), _sizes_of(spec)
    most = known.pop(sizes, ServerMemory()).at_least(memory)
    latest = {**dict(list(known.items())[-_OTHERS_KEPT:]), sizes: most}
    with contextlib.suppress(OSError):
        server_settings.file_of(spec.id, ".memory").write_bytes(_BY_SIZES.dump_json(latest))


def _sizes_of(spec: ModelSpec) -> str:
    """Return a key of all that a model's memory depends on."""
    size = spec.file.stat().st_size if spec.file and spec.file.is_file() else 0
    adapters = sorted(spec.lora_adapters)
    sizes = (spec.engine, size, spec.slots, spec.context_length, spec.gpu_layers, adapters)
    return json.dumps([*sizes, spec.options], sort_keys=True, default=str)


_estimates: dict[tuple[str, str], int] = {}
"""Estimates by id and sizes. Reading a file's header takes up to 0.4 s, and a model that waits for
room asks again and again."""


def needed_bytes(spec: ModelSpec) -> int:
    """Return the memory of a model: as measured on its server before, else an estimate."""
    if host_bytes := measured(spec).host:
        return host_bytes
    key = spec.id, _sizes_of(spec)
    if key not in _estimates:
        facts = file_facts(spec)
        _estimates[key] = facts.get("memory_bytes", facts.get("size_bytes", 0))
    return _estimates[key]
