"""LoRA adapters that were added to models while the site runs, and how much of each applies.

They are rows until they are removed. A worker reads those of a model when it loads it; web
processes read all of them once a second. Files are named from ``MODELS_DIR`` on, which each host
has in a place of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from django.conf import settings
from django.db import models, transaction

from inference_site.domain.model_spec import ModelSpec
from inference_site.model_store.models import Adapter
from inference_site.storage.cached_value import CachedValue
from inference_site.storage.postgresql import release_connection_after

_SEEN_S = 1.0

_ADAPTER = tuple[str, str]
"""The id of a model, and a name."""


@dataclass(frozen=True, slots=True)
class Added:
    """What was added: files in the order in which they came, and scales of any adapter."""

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
    """Return what was added. Raise the database's errors."""
    with release_connection_after():
        rows = list(Adapter.objects.order_by("pk"))
    return Added(
        {(row.model_id, row.name): row.file for row in rows if row.file},
        {(row.model_id, row.name): row.scale for row in rows},
    )


def add(model: str, name: str, file: str) -> bool:
    """Add an adapter; return False if the model has an added one of this name."""
    fields = {"file": file, "scale": 0.0}
    return Adapter.objects.get_or_create(model_id=model, name=name, defaults=fields)[1]


def remove(model: str, name: str) -> bool:
    """Remove an added adapter; return False if there is none."""
    return bool(_added(model).filter(name=name).delete()[0])


def remove_newest(model: str) -> str | None:
    """Remove the adapter of the model that was added last; return its name."""
    with release_connection_after():
        newest = _added(model).order_by("-pk").first()
        return newest.name if newest and remove(model, newest.name) else None


def set_scales(model: str, scales: Mapping[str, float]) -> None:
    """Say how much of which adapters applies to requests that name none; of the others nothing."""
    with transaction.atomic():
        rows = Adapter.objects.filter(model_id=model)
        rows.filter(file="").delete()
        rows.update(scale=0.0)
        for name, scale in scales.items():
            rows.update_or_create({"scale": scale}, model_id=model, name=name)


def _added(model: str) -> models.QuerySet[Adapter]:
    return Adapter.objects.filter(model_id=model).exclude(file="")


added_view = CachedValue(read, _SEEN_S)
"""What was added. Every request asks for it."""
