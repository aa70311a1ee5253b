"""LoRA adapters that operators add to models at run time, and the scale of each adapter.

They are rows until they are removed. A worker reads the rows of a model when it loads the model;
web processes read all rows once a second. Files are relative to ``MODELS_DIR``, whose path may
differ between hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from django.conf import settings
from django.db import models, transaction

from inference_site.catalogue.gguf_files import Tensor, header, parts_of
from inference_site.catalogue.model_files import architecture_of, file_below, file_error
from inference_site.catalogue.model_store.models import Adapter
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.storage.cached_value import CachedValue
from inference_site.core.storage.postgresql import release_connection_after

_SEEN_S = 1.0

_ADAPTER = tuple[str, str]
"""The id of a model and the name of an adapter."""
_SIDES = {"a": 0, "b": 1}
"""Which side of the model's tensor each half of an adapter's tensor has."""


@dataclass(frozen=True, slots=True)
class AddedAdapters:
    """The files of added adapters, oldest first, and the scales of all adapters."""

    files: Mapping[_ADAPTER, str] = field(default_factory=dict)
    scales: Mapping[_ADAPTER, float] = field(default_factory=dict)

    def to(self, spec: ModelSpec) -> ModelSpec:
        """Return the model with the added adapters, and the scales for requests that set none."""
        if not (self.files or spec.lora_adapters):
            return spec
        folder = Path(settings.MODELS_DIR)
        files = {name: folder / file for (id_, name), file in self.files.items() if id_ == spec.id}
        adapters = {**spec.lora_adapters, **files}
        scales = ((name, self.scales.get((spec.id, name), 0.0)) for name in adapters)
        return replace(
            spec,
            lora_adapters=adapters,
            lora=tuple((name, scale) for name, scale in scales if scale),
        )

    def models_with(self, name: str) -> list[str]:
        """Return the ids of the models to which an adapter with this name was added."""
        return [id_ for id_, added in self.files if added == name]


def read() -> AddedAdapters:
    """Read all rows. Raise the database's errors."""
    with release_connection_after():
        rows = list(Adapter.objects.order_by("pk"))
    return AddedAdapters(
        {(row.model_id, row.name): row.file for row in rows if row.file},
        {(row.model_id, row.name): row.scale for row in rows},
    )


def add(model: str, name: str, file: str) -> bool:
    """Add an adapter; return False if one with this name was already added to the model."""
    fields = {"file": file, "scale": 0.0}
    return Adapter.objects.get_or_create(model_id=model, name=name, defaults=fields)[1]


def remove(model: str, name: str) -> bool:
    """Remove an added adapter; return False if it does not exist."""
    return bool(_added(model).filter(name=name).delete()[0])


def remove_newest(loaded: ModelSpec, entry: ModelSpec | None) -> str | None:
    """Remove the adapter of a loaded model that was added last; return its name.

    None if it has no others than those of its ``entry``. Another worker with this model may have
    removed it already: the adapters that were added before it stay.
    """
    own = {} if entry is None else entry.lora_adapters
    added = [name for name in loaded.lora_adapters if name not in own]
    if not added:
        return None
    with release_connection_after():
        remove(loaded.id, added[-1])
    return added[-1]


def set_scales(model: str, scales: Mapping[str, float]) -> None:
    """Set the scales for requests that set none; all other adapters of the model get 0."""
    with transaction.atomic():
        rows = Adapter.objects.filter(model_id=model)
        rows.filter(file="").delete()
        rows.update(scale=0.0)
        for name, scale in scales.items():
            rows.update_or_create({"scale": scale}, model_id=model, name=name)


def _added(model: str) -> models.QuerySet[Adapter]:
    return Adapter.objects.filter(model_id=model).exclude(file="")


added_view = CachedValue(read, _SEEN_S)
"""A cache of ``read``, because every request needs it."""


def adapter_file(given: str, spec: ModelSpec) -> str:
    """Return the path of an adapter for this model, relative to ``MODELS_DIR``.

    Raise ValueError for a path outside of it, a file that is not a LoRA adapter, or an adapter for
    another architecture or a model of other sizes.
    """
    folder = Path(settings.MODELS_DIR)
    try:
        path = file_below(folder, given, (".gguf",))
    except ValueError as exc:
        raise ValueError(f"{exc}.") from exc
    if not path.is_file():
        raise ValueError(f"there is no file '{given[:200]}' in MODELS_DIR.")
    if error := file_error(path):
        raise ValueError(f"{error.replace(str(path), given)}.")
    try:
        found, tensors = header(path)
    except (OSError, ValueError) as exc:
        raise ValueError(f"{exc}.") from exc
    if found.get("general.type") != "adapter" or found.get("adapter.type") != "lora":
        raise ValueError(f"'{given[:200]}' is not a LoRA adapter.")
    own, expected = found.get("general.architecture"), architecture_of(spec)
    if expected and own != expected:
        raise ValueError(f"it is for models of the architecture {own}, not {expected}.")
    shapes = _shapes_of(spec)
    if shapes and (misfit := _misfit(tensors, shapes)):
        raise ValueError(f"it is for another model: its tensor {misfit} does not fit this one.")
    return path.relative_to(folder).as_posix()


def _shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors; none where its files cannot be read here."""
    try:
        parts = parts_of(spec.file) if spec.file else []
        return {tensor.name: tensor.shape for part in parts for tensor in header(part)[1]}
    except (OSError, ValueError):
        return {}


def _misfit(tensors: Sequence[Tensor], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name of a tensor of an adapter that llama.cpp would refuse for a model.

    Those of embeddings are stored in another order, so only their names are checked.
    """
    ranks: dict[str, int] = {}
    for tensor in tensors:
        name, _, part = tensor.name.rpartition(".lora_")
        if part not in _SIDES:
            continue
        if (shape := shapes.get(name)) is None:
            return tensor.name
        if name.endswith("token_embd.weight"):
            continue
        own = _sides(tensor.shape)
        if own[_SIDES[part]] != _sides(shape)[_SIDES[part]]:
            return tensor.name
        rank = own[1 - _SIDES[part]]
        if ranks.setdefault(name, rank) != rank:  # The two halves do not fit each other.
            return tensor.name
    return ""


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return the lengths of both sides; those of 1 may be missing at the end."""
    first, second, *_ = (*shape, 1, 1)
    return first, second
