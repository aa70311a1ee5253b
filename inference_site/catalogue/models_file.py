"""Reading the models file: entries become model specs; errors point at file, line and key.

docs/models.example.yaml shows every key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from pydantic import ValidationError

from inference_site.catalogue.engines.registry import ENGINES, engine_options
from inference_site.catalogue.sampler_fields import read_defaults
from inference_site.domain.model_spec import ModelSpec, Price
from inference_site.domain.sampling import Sampling

_INTEGERS = {"slots": 1, "context_length": 1, "threads": 1, "gpu_layers": -1}
"""Keys that hold whole numbers, and the least of each."""
_FILES = ("api_key_file", "mmproj")  # Options that name a file.

Key = tuple[str, ...]


def default_threads() -> int:
    """Half the cores: the engine's threads spin at barriers, and one that must wait stalls all."""
    return max(1, (os.cpu_count() or 2) // 2)


def site_sampling() -> Sampling:
    """Return what requests and models leave out. Raise ImproperlyConfigured for a bad setting."""
    try:
        return _parse_sampling(settings.SAMPLING)
    except _BadValue as exc:
        raise ImproperlyConfigured(f"{'.'.join(('SAMPLING', *exc.key))}{exc}") from exc


def read_models_file(path: Path) -> list[ModelSpec]:
    """Return the entries, in order. Raise ImproperlyConfigured with file, line and key."""
    try:
        text = path.read_text(encoding="utf-8")
        lines = dict(_lines(yaml.compose(text, yaml.SafeLoader)))
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ImproperlyConfigured(f"{path}: cannot be read: {exc}") from exc
    except _BadValue as exc:
        raise ImproperlyConfigured(f"{path}:{exc.line}: {exc}") from exc
    try:
        return _parse(document, path.parent)
    except _BadValue as exc:
        line = next(
            (lines[exc.key[:n]] for n in range(len(exc.key), 0, -1) if exc.key[:n] in lines), 1
        )
        where = ".".join(exc.key)
        raise ImproperlyConfigured(f"{path}:{line}: {where}{exc}") from exc


class _BadValue(Exception):
    """A value that cannot be; ``key`` leads to it. The message follows the key."""

    def __init__(self, message: str, key: Key = (), line: int = 0) -> None:
        super().__init__(message)
        self.key, self.line = key, line


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is left to read of one entry."""

    id: str
    rest: dict[str, Any]

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value, and read it only once. Raise _BadValue for a key without one."""
        if key not in self.rest:
            return default
        value = self.rest.pop(key)
        if value is None:
            raise self.bad(key, "it is empty; leave it out or give it a value.")
        return value

    def bad(self, key: str, message: str) -> _BadValue:
        return _BadValue(f": {message}", ("models", self.id, key))


def _lines(node: yaml.Node | None, key: Key = ()) -> Iterator[tuple[Key, int]]:
    """Yield the line of each key. Raise _BadValue for one that is there twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for name, value in node.value:
        line = name.start_mark.line + 1
        if name.value in seen:
            raise _BadValue(f"{'.'.join((*key, name.value))}: it is there twice.", line=line)
        seen.add(name.value)
        yield (*key, str(name.value)), line
        yield from _lines(value, (*key, str(name.value)))


def _parse(document: Any, folder: Path) -> list[ModelSpec]:
    entries = document.get("models") if isinstance(document, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise _BadValue(" must map model ids to their settings.", ("models",))
    if unknown := document.keys() - {"models"}:
        raise _BadValue(": unknown key.", (str(min(unknown, key=str)),))
    return [_spec(str(id_), entry, folder) for id_, entry in entries.items()]


def _spec(id_: str, given: Any, folder: Path) -> ModelSpec:
    if not isinstance(given, dict):
        raise _BadValue(" must be a mapping.", ("models", id_))
    entry = _Entry(id_, {str(key): value for key, value in given.items()})
    engine = entry.take("engine", "llama_cpp")
    if not isinstance(engine, str) or engine not in ENGINES:
        there_are = ", ".join(sorted(ENGINES))
        raise entry.bad("engine", f"unknown engine {engine!r}; there are {there_are}.")
    file = entry.take("file")
    spec = ModelSpec(
        id=id_,
        engine=engine,
        file=None if file is None else model_path(str(file), folder),
        **{"threads": default_threads(), **_integers(entry)},
        lora_adapters=_adapters(entry, folder),
        sampling=_entry_sampling(entry).over(site_sampling()),
        aliases=_names(entry, "aliases"),
        is_listed=_boolean(entry, "listed", default=True),
        projects=_projects(entry),
        price=_price(entry),
        options=_options(entry, engine, folder),
    )
    if entry.rest:
        raise _unknown_key(entry, min(entry.rest), engine)
    return spec


def _unknown_key(entry: _Entry, key: str, engine: str) -> _BadValue:
    """Return the error; an option of other engines is told as theirs."""
    theirs = [name for name in sorted(ENGINES) if key in engine_options(name)]
    if not theirs:
        return entry.bad(key, "unknown key.")
    return entry.bad(key, f"{engine} takes no such option; {' and '.join(theirs)} would.")


def model_path(file: str, folder: Path) -> Path:
    """Return where a model's file lies: ``hf:owner/name/file`` is where ``manage.py pull`` puts it.

    Other paths are read from the folder of the models file.
    """
    if file.startswith("hf:"):
        return Path(settings.MODELS_DIR) / file.removeprefix("hf:")
    return folder / file


def _integers(entry: _Entry) -> dict[str, int]:
    found = {}
    for key, least in _INTEGERS.items():
        value = entry.take(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise entry.bad(key, f"expected a whole number from {least}, got {value!r}.")
        found[key] = value
    return found


def _boolean(entry: _Entry, key: str, *, default: bool) -> bool:
    value = entry.take(key, default)
    if not isinstance(value, bool):
        raise entry.bad(key, f"expected true or false, got {value!r}.")
    return value


def _adapters(entry: _Entry, folder: Path) -> dict[str, Path]:
    adapters = entry.take("lora_adapters", {})
    if not isinstance(adapters, dict):
        raise entry.bad("lora_adapters", "must map names to files.")
    return {str(name): model_path(str(file), folder) for name, file in adapters.items()}


def _names(entry: _Entry, key: str) -> tuple[str, ...]:
    names = entry.take(key, [])
    if not isinstance(names, list) or not all(isinstance(n, str) and n.strip() for n in names):
        raise entry.bad(key, "must be a list of names.")
    return tuple(names)


def _projects(entry: _Entry) -> tuple[str, ...]:
    """Return the projects that may use the model, none for all; an empty list is a mistake."""
    if entry.rest.get("projects") == []:
        raise entry.bad("projects", "it is empty; leave it out for all projects.")
    return _names(entry, "projects")


def _price(entry: _Entry) -> Price:
    """Return the price of a million tokens; cached ones cost as much as others if not told."""
    given = entry.take("price", {})
    kinds = {field.name for field in fields(Price)}
    is_known = isinstance(given, dict) and given.keys() <= kinds
    if not is_known or not all(_is_amount(value) for value in given.values()):
        raise entry.bad("price", f"must map some of {', '.join(sorted(kinds))} to amounts from 0.")
    return Price(**{"cached": given.get("input", 0.0), **given})


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _entry_sampling(entry: _Entry) -> Sampling:
    return _parse_sampling(entry.take("sampling", {}), ("models", entry.id, "sampling"))


def _parse_sampling(values: Any, key: Key = ()) -> Sampling:
    if not isinstance(values, dict):
        raise _BadValue(" must be a mapping.", key)
    try:
        return read_defaults(values)
    except ValidationError as exc:
        error = exc.errors()[0]
        *path, name = error["loc"]
        if error["type"] == "extra_forbidden":
            raise _BadValue(f": unknown key {name!r}.", key) from exc
        wrong = (*key, *(str(part) for part in (*path, name)))
        told = f": {error['msg']}, got {str(error['input'])[:100]}."
        raise _BadValue(told, wrong) from exc


def _options(entry: _Entry, engine: str, folder: Path) -> dict[str, Any]:
    """Return what only the engine understands, with files read from the folder."""
    known = engine_options(engine)
    options = {key: entry.rest.pop(key) for key in list(entry.rest) if key in known}
    for key in _FILES:
        if isinstance(options.get(key), str):
            options[key] = str(model_path(options[key], folder))
    if str(template := options.get("chat_template", "")).endswith(".jinja"):
        options["chat_template"] = str(model_path(template, folder))  # Others are families' names.
    return options
