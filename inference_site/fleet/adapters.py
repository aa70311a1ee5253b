"""LoRA adapters that were added to models while the site runs, and how much of each applies.

They are kept in Redis until they are removed. A worker reads those of a model when it loads it; web
processes read all of them once a second. Files are named from ``MODELS_DIR`` on, which each host
has in a place of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson
from django.conf import settings

from inference_site.domain.model_spec import ModelSpec
from inference_site.storage.recent import Recent
from inference_site.storage.redis_clients import site_client

_FILES, _SCALES = "lora:files", "lora:scales"
"""Hashes in Redis: the file and the time of each added adapter, and scales of any adapter."""
_SEEN_S = 1.0

_ADAPTER = tuple[str, str]
"""The id of a model, and a name."""


@dataclass(frozen=True, slots=True)
class Added:
    """What was added: files in the order in which they came, and scales."""

    files: Mapping[_ADAPTER, str] = field(default_factory=dict)
    scales: Mapping[_ADAPTER, float] = field(default_factory=dict)

    def to(self, spec: ModelSpec) -> ModelSpec:
        """Return the model with its adapters, and those that apply where a request names none."""
        if not (self.files or spec.lora_adapters):
            return spec
        folder = Path(settings.MODELS_DIR)
        files = {name: folder / file for (id_, name), file in self.files.items() if id_ == spec.id}
        adapters = {**spec.lora_adapters, **files}
        applied = tuple((name, self.scales.get((spec.id, name), 0.0)) for name in adapters)
        return replace(
            spec,
            lora_adapters=adapters,
            lora=tuple((name, scale) for name, scale in applied if scale),
        )

    def models_with(self, name: str) -> list[str]:
        """Return the ids of the models to which an adapter of this name was added."""
        return [id_ for id_, added in self.files if added == name]


def read() -> Added:
    """Return what was added. Raise redis' errors when Redis is down."""
    pipeline = site_client().pipeline(transaction=False)
    pipeline.hgetall(_FILES)
    pipeline.hgetall(_SCALES)
    files, scales = pipeline.execute()
    entries = {_adapter(key): orjson.loads(value) for key, value in files.items()}
    newest_last = sorted(entries, key=lambda adapter: entries[adapter]["at"])
    return Added(
        {adapter: entries[adapter]["file"] for adapter in newest_last},
        {_adapter(key): float(value) for key, value in scales.items()},
    )


def add(model: str, name: str, file: str) -> bool:
    """Add an adapter; return False if the model has an added one of this name."""
    entry = orjson.dumps({"file": file, "at": time.time()})
    return bool(site_client().hsetnx(_FILES, _key(model, name), entry))


def remove(model: str, name: str) -> bool:
    """Remove an added adapter; return False if there is none."""
    pipeline = site_client().pipeline()
    pipeline.hdel(_FILES, _key(model, name))
    pipeline.hdel(_SCALES, _key(model, name))
    return bool(pipeline.execute()[0])


def remove_newest(model: str) -> str | None:
    """Remove the adapter of the model that was added last; return its name."""
    names = [name for id_, name in read().files if id_ == model]
    return names[-1] if names and remove(model, names[-1]) else None


def set_scales(model: str, scales: Mapping[str, float]) -> None:
    """Say how much of which adapters applies to requests that name none; of the others nothing."""
    pipeline = site_client().pipeline()
    for id_, name in read().scales:
        if id_ == model:
            pipeline.hdel(_SCALES, _key(model, name))
    for name, scale in scales.items():
        pipeline.hset(_SCALES, _key(model, name), scale)
    pipeline.execute()


def _key(model: str, name: str) -> bytes:
    return orjson.dumps([model, name])


def _adapter(key: bytes) -> _ADAPTER:
    model, name = orjson.loads(key)
    return model, name


added_view = Recent(read, _SEEN_S)
"""What was added. Every request asks for it."""
