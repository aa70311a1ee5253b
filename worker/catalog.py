"""The model catalogue: which models exist, and how each is loaded.

Read from the YAML file named by ``MODELS_FILE``; without one, the demo model that ships with the
product is the catalogue. Errors name the file and the key.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from pydantic import TypeAdapter, ValidationError

from worker.engines.base import ModelSpec
from worker.engines.registry import ENGINES, engine_options
from worker.generation import Sampling

DEMO_FILE = Path(__file__).parent / "demo" / "demo-q8_0.gguf"

_INTEGERS = ("slots", "context_length", "threads")
_FILES = ("mmproj",)  # Options that name a file.
_sampling = TypeAdapter(Sampling)


def default_threads() -> int:
    """Half the cores: the engine's threads spin at barriers, and one that must wait stalls all."""
    return max(1, (os.cpu_count() or 2) // 2)


def demo_specs() -> list[ModelSpec]:
    """Return the models that ship with the product: one file, for chats and for embeddings."""
    chat = ModelSpec(
        id="demo",
        engine="llama_cpp",
        file=DEMO_FILE,
        threads=default_threads(),
        sampling=site_sampling(),
        # It answers best without thinking first.
        options={"chat_template_kwargs": {"enable_thinking": False}},
    )
    embedding = replace(chat, id="demo-embedding", slots=4, options={"embedding": "mean"})
    return [chat, embedding]


def site_sampling() -> Sampling:
    """Return what requests and models leave out. Raise ImproperlyConfigured for a bad setting."""
    return parse_sampling("SAMPLING", settings.SAMPLING)


@dataclass(frozen=True)
class Catalog:
    """The models by id, in the order of the file."""

    models: dict[str, ModelSpec]

    def find(self, name: str) -> ModelSpec | None:
        """Return the model of this name, or None. The name is trimmed; its case does not matter."""
        wanted = name.strip().lower()
        return next((spec for id_, spec in self.models.items() if id_.lower() == wanted), None)


@cache
def catalog() -> Catalog:
    """Return this process's catalogue. Raise ImproperlyConfigured for a bad file."""
    path: Path | None = settings.MODELS_FILE
    if path is None:
        return Catalog({spec.id: spec for spec in demo_specs()})
    return parse_catalog(path)


def parse_catalog(path: Path) -> Catalog:
    """Read a catalogue file. Raise ImproperlyConfigured naming the file and the key."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ImproperlyConfigured(f"{path}: cannot be read: {exc}") from exc
    entries = document.get("models") if isinstance(document, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise ImproperlyConfigured(f"{path}: 'models' must map model ids to their settings.")
    return Catalog(
        {str(id_): _parse_entry(path, str(id_), entry) for id_, entry in entries.items()}
    )


def _parse_entry(path: Path, id_: str, entry: Any) -> ModelSpec:
    where = f"{path}: models.{id_}"
    if not isinstance(entry, dict):
        raise ImproperlyConfigured(f"{where} must be a mapping.")
    rest = dict(entry)
    engine = rest.pop("engine", "llama_cpp")
    if not isinstance(engine, str) or engine not in ENGINES:
        raise ImproperlyConfigured(
            f"{where}.engine: unknown engine {engine!r}; there are {', '.join(sorted(ENGINES))}."
        )
    file = rest.pop("file", None)
    integers = {"threads": default_threads()}
    for key in _INTEGERS:
        if key in rest:
            integers[key] = _positive_integer(f"{where}.{key}", rest.pop(key))
    adapters = rest.pop("lora_adapters", {})
    if not isinstance(adapters, dict):
        raise ImproperlyConfigured(f"{where}.lora_adapters must map names to files.")
    sampling = parse_sampling(f"{where}.sampling", rest.pop("sampling", {}))
    if unknown := rest.keys() - engine_options(engine):
        raise ImproperlyConfigured(f"{where}: unknown key {min(unknown)!r}.")
    return ModelSpec(
        id=id_,
        engine=engine,
        file=(path.parent / str(file)) if file is not None else None,
        lora_adapters={str(name): path.parent / str(file) for name, file in adapters.items()},
        sampling=sampling.over(site_sampling()),
        options=_with_absolute_files(path.parent, rest),
        **integers,
    )


def _with_absolute_files(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with their file names read from the folder of the models file."""
    files = {key: str(folder / options[key]) for key in _FILES if isinstance(options.get(key), str)}
    return {**options, **files}


def parse_sampling(where: str, values: Any) -> Sampling:
    """Return sampler defaults, which have the names of requests. Raise ImproperlyConfigured."""
    if not isinstance(values, dict):
        raise ImproperlyConfigured(f"{where} must be a mapping.")
    if unknown := values.keys() - {field.name for field in fields(Sampling)}:
        raise ImproperlyConfigured(f"{where}: unknown key {min(unknown, key=str)!r}.")
    try:
        return _sampling.validate_python(values)
    except ValidationError as exc:
        error = exc.errors()[0]
        raise ImproperlyConfigured(f"{where}.{error['loc'][0]}: {error['msg']}.") from exc


def _positive_integer(where: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ImproperlyConfigured(f"{where}: expected a whole number from 1, got {value!r}.")
    return value
