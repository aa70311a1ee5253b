"""What the form of a model offers and says before it is saved: files, servers, memory.

The page of the model shows what is set beside what is in force.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis.exceptions
from django.conf import settings

from inference_site.catalogue.catalogue import files_in
from inference_site.catalogue.fleet.leases import ModelReport, live_workers
from inference_site.catalogue.gguf_files import parts_of
from inference_site.catalogue.model_files import file_facts
from inference_site.catalogue.model_store.models import StoredModel
from inference_site.catalogue.operator_settings import WEIGHTS
from inference_site.console.model_states import file_condition
from inference_site.core.admin_pages.labels import free_memory, size
from inference_site.core.domain.model_spec import ModelSpec

MAX_OFFERED = 500


def offered_files() -> list[tuple[str, str]]:
    """Return names and sizes of the files of weights in ``MODELS_DIR``, for the form to offer."""
    folder = Path(settings.MODELS_DIR)
    others = (one for one in folder.rglob("*") if one.suffix.lower() in _OTHER_WEIGHTS)
    found = []
    for file in islice((*files_in(folder), *sorted(others)), MAX_OFFERED):
        try:
            taken = sum(part.stat().st_size for part in parts_of(file))
        except OSError:  # It was removed, or a part is not there.
            continue
        found.append((file.relative_to(folder).as_posix(), size(taken)))
    return found


_OTHER_WEIGHTS = tuple(ending for ending in WEIGHTS if ending != ".gguf")


def offered_servers() -> list[tuple[str, str]]:
    """Return addresses of servers for the form to offer, and where each is known from.

    They are those of the models in the database, and hosts that the settings allow.
    """
    known: dict[str, str] = {}
    for id_, entry in StoredModel.objects.values_list("model_id", "entry"):
        address = entry.get("base_url") if isinstance(entry, dict) else None
        if isinstance(address, str) and "@" not in urlsplit(address).netloc:
            known.setdefault(address, f"server of {id_}")
    for host in settings.UPSTREAM_ALLOWED_HOSTS:
        known.setdefault(f"http://{host}/v1", "allowed by the settings")
    return list(islice(known.items(), MAX_OFFERED))


def estimate(spec: ModelSpec) -> str:
    """Return the sizes and the memory that a model will have, as one text, before it is saved."""
    if spec.file is None:
        return "It has no file, so it needs no memory here."
    if (found := file_condition(spec)) is not None:
        return f"{found.reason} on this host, so its memory is unknown."
    facts = file_facts(spec)
    kind = " ".join(filter(None, (facts.get("architecture"), facts.get("quantisation"))))
    sizes = f"{spec.slots} slots of {spec.context_length:,} tokens"
    said = [f"{kind or 'Weights'} of {size(facts.get('size_bytes', 0))}, {sizes}."]
    if needed := facts.get("memory_bytes"):
        said.append(f"It needs about {size(needed)}: {facts['memory_parts']}.")
        said.append(_room(needed))
    return " ".join(said)


def _room(needed: int) -> str:
    """Return how much memory workers have free, and whether one has as much as is needed."""
    try:
        devices = [(worker.host, one) for worker in live_workers() for one in worker.devices]
    except redis.exceptions.RedisError:
        return ""
    free = {f"{host} {device.name} {free_memory(device)}": None for host, device in devices}
    if not free:
        return "No worker is online."
    has_room = any(device.memory_free >= needed for _, device in devices)
    verdict = "" if has_room else "No worker has that much free now. "
    return f"{verdict}Free now: {'; '.join(free)}."


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a model: as it is set, and as it is in force.

    ``is_other``: workers still have another value than the catalogue.
    """

    name: str
    given: str
    in_force: str
    is_other: bool = False


def settings_in_force(
    spec: ModelSpec, entry: Mapping[str, Any] | None, reports: Sequence[ModelReport]
) -> list[Setting]:
    """Return the settings that decide size and speed.

    ``entry`` is the stored entry; None for a model of the models file or of a file, for which only
    values that are in force are known.
    """
    contexts = {one.context_length for one in reports if one.context_length}
    layers = "all that fit" if spec.gpu_layers < 0 else str(spec.gpu_layers)
    return [
        _setting("Slots", entry, "slots", spec.slots, {one.slots for one in reports}),
        _setting("Context length", entry, "context_length", spec.context_length, contexts),
        _setting("Threads", entry, "threads", spec.threads),
        _setting("GPU layers", entry, "gpu_layers", layers),
        _setting("Keep alive (s)", entry, "keep_alive", _or_dash(spec.keep_alive_s)),
        _setting("Replicas", entry, "replicas", _or_dash(spec.replicas)),
    ]


def _setting(
    name: str,
    entry: Mapping[str, Any] | None,
    key: str,
    due: object,
    announced: Collection[int] = (),
) -> Setting:
    given = "—" if entry is None else _number(entry.get(key, "not set"))
    in_force = ", ".join(_number(one) for one in sorted(announced)) or _number(due)
    return Setting(name, given, in_force, is_other=bool(announced) and set(announced) != {due})


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _or_dash(value: object) -> str:
    return "—" if value is None else str(value)
