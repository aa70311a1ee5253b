"""The model catalogue: which models exist, and by which names.

Its sources are the YAML file named by ``MODELS_FILE``, the demo model that ships with the product,
the entries in the database (``inference_site.catalogue.model_store``), and the GGUF files in
``MODELS_DIR``, also those that appear there later. An earlier source wins a name that two sources
use; a file that an entry uses is no model of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from inference_site.catalogue.gguf_files import is_later_part, model_context, parts_of
from inference_site.catalogue.memory import fitting_sizes
from inference_site.catalogue.model_files import architecture_of, file_error, files_of, is_special
from inference_site.catalogue.models_file import (
    Route,
    default_sampling,
    default_threads,
    read_models_and_routes,
)
from inference_site.core.domain.model_spec import MAX_ID, ModelSpec, Price, is_model_id

logger = logging.getLogger(__name__)

DEMO_FILE = Path(__file__).resolve().parents[2] / "worker" / "demo" / "demo-q8_0.gguf"
REAL_MODEL = "smollm2"
"""The id of the small real model that ``serve`` fetches (``ops.serve.real_model``)."""
DEFAULT_ALIAS = "default"
"""The name that stands for the site's default model."""

_FileState = tuple[tuple[int, int], ...]
"""Modification time and size of each part of a file."""


def discover(folder: Path) -> list[ModelSpec]:
    """Return a spec for each model file, in order of their names; the id is the file's name.

    Projectors, adapters, later parts of split files and unreadable files are left out.
    """
    return list(_discovered(files_in(folder)))


def id_of(file: Path) -> str:
    """Return the id of the model in a file."""
    return file.stem.lower()


class ModelsFolder:
    """Finds files that appear in a folder while the site runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = {path: _file_state(path) for path in files_in(path)}
        self._changing: dict[Path, _FileState] = {}

    def new_models(self) -> list[ModelSpec]:
        """Return the models of complete files that are new, or have changed, since the last call.

        A file counts as written once it has not changed between two calls.
        """
        states = {path: _file_state(path) for path in files_in(self._path)}
        changed = {path: state for path, state in states.items() if self._known.get(path) != state}
        stable = [path for path, state in changed.items() if self._changing.get(path) == state]
        self._changing = changed
        self._known |= {path: changed[path] for path in stable}
        complete = []
        for path in stable:
            error = next((error for part in parts_of(path) if (error := file_error(part))), "")
            if error:
                logger.warning("%s is left out: %s", path, error)
            else:
                complete.append(path)
        return list(_discovered(complete))


def files_in(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder, of a split file the first part."""
    found = (path for path in folder.rglob("*.gguf") if not is_later_part(path))
    return sorted(path for path in found if not is_special(path))


def _file_state(path: Path) -> _FileState:
    def state(part: Path) -> tuple[int, int]:
        try:
            status = part.stat()
        except OSError:  # It was removed, or is not there yet.
            return 0, 0
        return status.st_mtime_ns, status.st_size

    return tuple(state(part) for part in parts_of(path))


def _discovered(files: list[Path]) -> Iterator[ModelSpec]:
    ids = set()
    for path in files:
        try:
            is_model = model_context(path) is not None
        except (OSError, ValueError) as exc:
            logger.warning("%s is left out: %s", path, exc)
            continue
        id_ = id_of(path)
        if is_model and not is_model_id(id_):
            logger.warning("%r is left out: an id has 1 to %d printable characters", path, MAX_ID)
        elif is_model and id_ not in ids:
            ids.add(id_)
            slots, context_length = fitting_sizes(path, None, None, {})
            yield ModelSpec(
                id=id_,
                engine="llama_cpp",
                file=path,
                slots=slots,
                context_length=context_length,
                threads=default_threads("llama_cpp"),
                sampling=default_sampling(),
            )


@dataclass(frozen=True, slots=True)
class CatalogueChanges:
    """The difference between two states of the catalogue; false if there is none.

    ``changed`` has the old and the new spec of each model.
    """

    new: Sequence[ModelSpec] = ()
    changed: Sequence[tuple[ModelSpec, ModelSpec]] = ()
    removed: Sequence[ModelSpec] = ()

    def __bool__(self) -> bool:
        return bool(self.new or self.changed or self.removed)


class Catalogue:
    """The models by id, in order, and the names that find them.

    ``specs`` are the entries of the models file; they win over ``shipped``, the models of the
    product, those over the models of the database, and those over ``found``, the models of files
    in a folder. ``routes`` are names for several of the specs, with the same precedence.
    ``optional`` has the ids of the models that need not be loaded for the site to be ready: all
    that appear later, and, beside ``specs``, all other models. Raise ImproperlyConfigured for two
    specs or routes with one name.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        folder: ModelsFolder | None = None,
        found: Iterable[ModelSpec] = (),
        shipped: Iterable[ModelSpec] = (),
        routes: Iterable[Route] = (),
    ) -> None:
        self._entries = {spec.id: spec for spec in specs}
        self.routes = {route.id: route for route in routes}
        names = _by_name([*self._entries.values(), *self.routes.values()])
        self._shipped = {spec.id: spec for spec in shipped if _normalized(spec.id) not in names}
        self._fixed = {**self._entries, **self._shipped}
        self._stored: Sequence[ModelSpec] = ()
        self._found = {spec.id: spec for spec in found}
        self._folder = folder
        self._warnings: set[str] = set()
        self._removed_prices: dict[str, Price] = {}
        self.models, self._by_name = self._merged()
        others = self.models.keys() - self._entries.keys()
        self.optional = frozenset(others if self._entries else others & {REAL_MODEL})

    def is_fixed(self, model: str) -> bool:
        """Whether the model with this id comes from the models file or from the product."""
        return model in self._fixed

    def is_shipped(self, model: str) -> bool:
        """Whether the model with this id comes with the product."""
        return model in self._shipped

    def is_stored(self, model: str) -> bool:
        """Whether the model with this id comes from the database."""
        return model not in self._fixed and any(spec.id == model for spec in self._stored)

    def update(self, stored: Sequence[ModelSpec] | None = None) -> CatalogueChanges:
        """Add new files of the folder, and take over the models of the database.

        ``stored`` is None if the database cannot be read; then its earlier models stay. A model
        whose file has appeared or become whole counts as new. Models whose files were deleted stay
        until the process restarts. Callers must not run this in two threads at once.
        """
        files: set[Path] = set()
        for spec in self._folder.new_models() if self._folder else ():
            self._found.setdefault(spec.id, spec)
            files |= files_of(spec)
        self._stored = self._stored if stored is None else stored
        old = self.models
        # Other threads read the mappings: replace them, never change them.
        self.models, self._by_name = self._merged()
        removed = [spec for id_, spec in old.items() if id_ not in self.models]
        self._removed_prices |= {spec.id: spec.price for spec in removed}
        new = [spec for id_, spec in self.models.items() if id_ not in old]
        self.optional |= {spec.id for spec in new}
        known = self.models.values()
        new += [s for s in known if s not in new and not files_of(s).isdisjoint(files)]
        return CatalogueChanges(
            new,
            [(old[id_], s) for id_, s in self.models.items() if id_ in old and old[id_] != s],
            removed,
        )

    @property
    def removed(self) -> frozenset[str]:
        """The ids of the models that were removed since the start of this process."""
        return frozenset(self._removed_prices.keys() - self.models.keys())

    def price_of(self, model: str) -> Price:
        """Return the price of a model; of one that was removed since the start, its last price.

        Runs that have used it may still end. Unknown models cost nothing.
        """
        if (spec := self.models.get(model)) is not None:
            return spec.price
        return self._removed_prices.get(model, Price())

    def _merged(self) -> tuple[dict[str, ModelSpec], dict[str, ModelSpec | Route]]:
        """Return the models by id, and models and routes by name; the first source wins a name."""
        models = dict(self._fixed)
        names = _by_name([*self._fixed.values(), *self.routes.values()])
        used = {f for spec in (*self._entries.values(), *self._stored) for f in files_of(spec)}
        unused = [spec for spec in self._found.values() if used.isdisjoint(files_of(spec))]
        for spec in (*self._stored, *unused):
            if spec.id in models:
                continue
            try:
                names = _by_name([spec], names)
            except ImproperlyConfigured as exc:
                warning = f"{spec.file or spec.id} is left out: {exc}"
                if warning not in self._warnings:
                    self._warnings.add(warning)
                    logger.warning("%s", warning)
            else:
                models[spec.id] = spec
        return models, names

    def find(self, name: str, project: str | None = None) -> ModelSpec | None:
        """Return the model with this name (see ``named``); None for a route."""
        found = self.named(name, project)
        return found if isinstance(found, ModelSpec) else None

    def named(self, name: str, project: str | None = None) -> ModelSpec | Route | None:
        """Return the model or route with this name, or None; with a project, only if it may use it.

        Surrounding spaces and case are ignored. The name is, in this order: an id or alias, one
        before the ``:`` of a tag, ``default``, or an architecture that only one model has, also
        before a ``:``.
        """
        wanted = _normalized(name)
        untagged = _normalized(wanted.partition(":")[0])
        default = _normalized(settings.DEFAULT_MODEL) if wanted == DEFAULT_ALIAS else ""
        for key in (wanted, untagged, default):
            found = self._by_name.get(key)
            if found and (project is None or found.is_for(project)):
                return found
        usable = [s for s in self.models.values() if project is None or s.is_for(project)]
        architectures = [(spec, _normalized(architecture_of(spec) or "")) for spec in usable]
        for key in filter(None, (wanted, untagged)):
            matches = [spec for spec, architecture in architectures if architecture == key]
            if len(matches) == 1:
                return matches[0]
        return None

    def holder_of(self, name: str) -> ModelSpec | Route | None:
        """Return the model or route with this id or alias, or None; ``named`` also reads tags."""
        return self._by_name.get(_normalized(name))

    def listed(self, project: str) -> list[ModelSpec]:
        """Return the models that the list of models shows to a project."""
        return [spec for spec in self.models.values() if spec.is_listed and spec.is_for(project)]

    def listed_routes(self, project: str) -> list[Route]:
        """Return the routes that the list of models shows to a project."""
        return [one for one in self.routes.values() if one.is_listed and one.is_for(project)]


def _by_name(
    specs: Iterable[ModelSpec | Route],
    taken: Mapping[str, ModelSpec | Route] = MappingProxyType({}),
) -> dict[str, ModelSpec | Route]:
    """Return models and routes by id and alias, added to ``taken``.

    Raise ImproperlyConfigured for a name that two have.
    """
    by_name = dict(taken)
    for spec in specs:
        for name in (spec.id, *spec.aliases):
            other = by_name.setdefault(_normalized(name), spec)
            if other is not spec:
                raise ImproperlyConfigured(
                    f"The models '{other.id}' and '{spec.id}' have one name, '{name}'."
                )
    return by_name


def _normalized(name: str) -> str:
    return name.strip().casefold()


@cache
def catalogue() -> Catalogue:
    """Return this process's catalogue. Raise ImproperlyConfigured for a bad file."""
    path: Path | None = settings.MODELS_FILE
    try:
        entries, routes = read_models_and_routes(path) if path is not None else ([], [])
    except ImproperlyConfigured as exc:
        if isinstance(exc.__cause__, OSError):
            raise ImproperlyConfigured(f"MODELS_FILE: {exc}") from exc
        raise
    demo = demo_specs() if settings.DEMO_MODEL else []
    folder = Path(settings.MODELS_DIR)
    if os.path.isfile(folder):  # Whether or not this user may read it.
        raise ImproperlyConfigured(f"MODELS_DIR: {folder} is not a folder.")
    return Catalogue(entries, ModelsFolder(folder), discover(folder), demo, routes)


def specs_to_load(names: Sequence[str]) -> list[ModelSpec]:
    """Return the models with these names, without names all preloaded ones; none for ``["none"]``.

    Raise ImproperlyConfigured for an unknown name.
    """
    known = catalogue()
    if list(names) == ["none"]:
        return []
    found = {name: known.find(name) for name in names}
    if unknown := [name for name, spec in found.items() if spec is None]:
        raise ImproperlyConfigured(
            f"Unknown model {unknown[0]!r}; there are {', '.join(known.models)}."
        )
    preloaded = [spec for spec in known.models.values() if spec.is_preloaded]
    return [spec for spec in found.values() if spec] or preloaded


def demo_specs() -> list[ModelSpec]:
    """Return the models that ship with the product.

    Chats and embeddings use one file. ``demo-memory`` is a script that repeats what the user said,
    because the file is too small a model to remember it.
    """
    chat = ModelSpec(
        id="demo",
        engine="llama_cpp",
        file=DEMO_FILE,
        slots=4,  # As a file has by default; each takes 9 MiB for its context.
        threads=1,  # A second thread costs this small model more than it gains.
        sampling=default_sampling(),
        # It answers best without reasoning first.
        options={"chat_template_kwargs": {"enable_thinking": False}},
    )
    # An input takes milliseconds.
    embedding = replace(chat, id="demo-embedding", slots=1, options={"embedding": "mean"})
    recall = {"script": [{"recall": "You said: "}]}
    memory = ModelSpec("demo-memory", "scripted", context_length=8192, options=recall)
    return [chat, embedding, memory]
