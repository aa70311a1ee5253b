"""Reading the models file: entries become model specs; errors point at file, line and key.

docs/models.example.yaml shows every key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.entry import Entry, default_threads
from inference_site.catalogue.operator_settings import BadKey, Locate
from inference_site.catalogue.routes import Route, read_route
from inference_site.catalogue.sampler_fields import SamplerDefaults
from inference_site.domain.addresses import AllowedAddresses
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import Sampling

Key = tuple[str, ...]

_LOADER: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C is ten times as fast; not every build of PyYAML has it."""


def site_sampling() -> Sampling:
    """Return what requests and models leave out. Raise ImproperlyConfigured for a bad setting."""
    try:
        return SamplerDefaults.read(settings.SAMPLING).to_defaults()
    except BadKey as exc:
        raise ImproperlyConfigured(f"{'.'.join(('SAMPLING', *exc.path))}: {exc}.") from exc


def read_models_file(path: Path) -> list[ModelSpec]:
    """Return the models, in order. Raise ImproperlyConfigured with file, line and key."""
    return read_models_and_routes(path)[0]


def read_models_and_routes(path: Path) -> tuple[list[ModelSpec], list[Route]]:
    """Return the entries, in order. Raise ImproperlyConfigured with file, line and key."""
    try:
        text = path.read_text(encoding="utf-8")
        lines: dict[Key, int] = {}
        document = yaml.load(text, _LOADER)  # noqa: S506  # Both loaders are safe.
        _note_lines(yaml.compose(text, _LOADER), lines, _above(document))
        return _entries(document, partial(_located, path.parent))
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        raise ImproperlyConfigured(f"{path}:{line}: is not YAML: {exc.problem}.") from exc
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ImproperlyConfigured(f"{path}: cannot be read: {exc}") from exc
    except BadKey as exc:
        prefixes = (exc.path[:length] for length in range(len(exc.path), 0, -1))
        line = next((lines[key] for key in prefixes if key in lines), 1)
        raise ImproperlyConfigured(f"{path}:{line}: {'.'.join(exc.path)}: {exc}.") from exc


def entry_lines(path: Path) -> dict[str, int]:
    """Return the line of each model's file, or else of its entry, in a good models file."""
    text, lines = path.read_text(encoding="utf-8"), dict[Key, int]()
    document = yaml.load(text, _LOADER)  # noqa: S506  # Both loaders are safe.
    _note_lines(yaml.compose(text, _LOADER), lines, _above(document))
    ids = [key[1] for key in lines if len(key) == 2]
    return {id_: lines.get(("models", id_, "file"), lines["models", id_]) for id_ in ids}


def _located(folder: Path, file: str, _endings: Sequence[str]) -> str:
    """Return where a model's file lies: ``hf:owner/name/file`` is where ``manage.py pull`` puts it.

    Other paths are read from the folder of the models file. They may lead anywhere: the owner of
    the host writes the models file.
    """
    if file.startswith("hf:"):
        return str(Path(settings.MODELS_DIR) / file.removeprefix("hf:"))
    return str(folder / file)


def _above(document: Any) -> Key:
    """Return where the keys of a document belong: one of names and files alone is all models."""
    is_short = isinstance(document, dict) and "models" not in document
    return ("models",) if is_short and all(isinstance(v, str) for v in document.values()) else ()


def _note_lines(node: yaml.Node | None, lines: dict[Key, int], parent: Key = ()) -> None:
    """Note the line of each key. Raise BadKey for one that is there twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for name, value in node.value:
        key = (*parent, str(name.value))
        lines[key] = name.start_mark.line + 1
        if key in seen:
            raise BadKey(key, "it is there twice")
        seen.add(key)
        _note_lines(value, lines, key)


def _entries(document: Any, locate: Locate) -> tuple[list[ModelSpec], list[Route]]:
    document = {"models": document} if _above(document) else document
    given = document.get("models") if isinstance(document, dict) else None
    if not isinstance(given, dict) or not given:
        raise BadKey(("models",), "must map model ids to their settings")
    if unknown := document.keys() - {"models"}:
        raise BadKey((str(min(unknown, key=str)),), "unknown key")
    entries: dict[str, dict[str, Any]] = {}
    for id_, value in given.items():
        entry = {"file": value} if isinstance(value, str) else value
        if not isinstance(entry, dict):
            raise BadKey(("models", str(id_)), "must be a mapping, or the name of a file")
        entries[str(id_)] = {str(name): value for name, value in entry.items()}
    specs, routes = {}, []
    for id_, entry in entries.items():
        if "route" not in entry:
            with _below("models", id_):
                specs[id_] = read_entry(id_, entry, locate)
    for id_, entry in entries.items():
        if "route" in entry:
            with _below("models", id_):
                routes.append(read_route(id_, entry, specs, entries))
    return list(specs.values()), routes


@contextmanager
def _below(*key: str) -> Iterator[None]:
    """Have a BadKey say where it is in the file."""
    try:
        yield
    except BadKey as exc:
        raise BadKey((*key, *exc.path), str(exc)) from exc


def read_entry(
    id_: str, entry: dict[str, Any], locate: Locate, allowed: AllowedAddresses | None = None
) -> ModelSpec:
    """Return the spec of an entry; ``locate`` makes paths of names of files.

    ``allowed`` are the addresses at which its servers may be, None for any. Raise BadKey.
    """
    given = dict(entry)
    common = {name: given.pop(name) for name in entry if name in Entry.model_fields}
    known = Entry.read(common, locate)
    options = _options(known.engine, given, locate)
    slots, context_length = known.sizes(options)
    return ModelSpec(
        id=id_,
        engine=known.engine,
        file=Path(known.file) if known.file else None,
        slots=slots,
        context_length=context_length,
        threads=known.threads or default_threads(known.engine),
        gpu_layers=known.gpu_layers,
        aliases=known.aliases,
        is_listed=known.listed,
        projects=known.projects,
        price=known.price.to_price(),
        lora_adapters={name: Path(file) for name, file in known.lora_adapters.items()},
        sampling=known.sampling.to_defaults().over(site_sampling()),
        is_preloaded=known.preload,
        replicas=known.replicas,
        hosts=known.hosts,
        keep_alive_s=known.keep_alive,
        min_resident_s=known.min_resident,
        is_pinned=known.pinned,
        exclusive_with=known.exclusive_with,
        forced_sampling=known.forced_sampling.to_defaults(),
        allowed_addresses=allowed if known.engine == "openai_upstream" else None,
        options=options,
    )


def _options(engine: str, given: dict[str, Any], locate: Locate) -> dict[str, Any]:
    """Return what only the engine understands: checked, and with the paths of files."""
    model = ENGINES[engine].options
    if unknown := given.keys() - model.model_fields.keys():
        _refuse(engine, min(unknown))
    return model.read(given, locate).model_dump(exclude_unset=True)


def _refuse(engine: str, key: str) -> NoReturn:
    """Raise BadKey for an unknown key; for an option of other engines, name them."""
    takers = [name for name in ENGINES if key in ENGINES[name].options.model_fields]
    if not takers:
        raise BadKey((key,), "unknown key")
    raise BadKey((key,), f"{engine} takes no such option; {' and '.join(takers)} would")
