"""The model catalogue: which models exist, and by which names.

The entries of the YAML file named by ``MODELS_FILE``, if there is one, the demo model that ships
with the product, what operators keep in the database (``inference_site.model_store``), and the
files that lie in ``MODELS_DIR`` or appear there. What comes first goes before what has its name; an
entry also goes before what else is found of its file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from inference_site.catalogue.gguf_files import is_later_part, model_context, parts_of
from inference_site.catalogue.memory import fitting_sizes
from inference_site.catalogue.model_files import architecture_of, file_fault, files_of
from inference_site.catalogue.models_file import (
    default_threads,
    read_models_and_routes,
    site_sampling,
)
from inference_site.catalogue.routes import Route
from inference_site.domain.model_spec import ModelSpec

logger = logging.getLogger(__name__)

DEMO_FILE = Path(__file__).resolve().parents[2] / "worker" / "demo" / "demo-q8_0.gguf"
REAL_MODEL = "smollm2"
"""The id of the small real model that ``serve`` fetches (``supervisor.real_model``)."""
DEFAULT = "default"
"""The name that stands for the site's default model."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What has become of the models between two looks; false when nothing has.

    ``changed`` has the old and the new spec of each model that is described anew.
    """

    new: Sequence[ModelSpec] = ()
    changed: Sequence[tuple[ModelSpec, ModelSpec]] = ()
    gone: Sequence[ModelSpec] = ()

    def __bool__(self) -> bool:
        return bool(self.new or self.changed or self.gone)


class Catalogue:
    """The models by id, in order, and the names by which they are found.

    ``specs``, the entries of the models file, win over ``shipped``, what comes with the product,
    that over what operators keep in the database, and that over ``found``, the models of files in a
    folder. ``optional`` are the ids of those that a site is ready without: what has come since it
    was made, and beside specs all that is none. ``routes`` are names for several of the specs, and
    win as these do. Raise ImproperlyConfigured for two ``specs`` or routes of one name.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        folder: Folder | None = None,
        found: Iterable[ModelSpec] = (),
        shipped: Iterable[ModelSpec] = (),
        routes: Iterable[Route] = (),
    ) -> None:
        self._entries = {spec.id: spec for spec in specs}
        self.routes = {route.id: route for route in routes}
        names = _names([*self._entries.values(), *self.routes.values()])
        more = {spec.id: spec for spec in shipped if _folded(spec.id) not in names}
        self._fixed, self._shipped = {**self._entries, **more}, more
        self._stored: Sequence[ModelSpec] = ()
        self._found = {spec.id: spec for spec in found}
        self._folder = folder
        self._told: set[str] = set()
        self.models, self._by_name = self._joined()
        others = self.models.keys() - self._entries.keys()
        self.optional = frozenset(others if self._entries else others & {REAL_MODEL})

    def is_fixed(self, model: str) -> bool:
        """Whether the model of this id comes from the models file, or with the product."""
        return model in self._fixed

    def is_shipped(self, model: str) -> bool:
        """Whether the model of this id comes with the product."""
        return model in self._shipped

    def is_stored(self, model: str) -> bool:
        """Whether the model of this id comes from the database."""
        return model not in self._fixed and any(spec.id == model for spec in self._stored)

    def update(self, stored: Sequence[ModelSpec] | None = None) -> Changes:
        """Take up new files in the folder of models, and what the database has now.

        An entry whose file has appeared is new, too. ``stored`` is None if that is not known.
        Models whose files have gone stay until the process is started anew. One thread at a time
        calls this.
        """
        files: set[Path] = set()
        for spec in self._folder.appeared() if self._folder else ():
            self._found.setdefault(spec.id, spec)
            files |= files_of(spec)
        self._stored = self._stored if stored is None else stored
        old = self.models
        # Other threads read the old mappings until they have the new ones.
        self.models, self._by_name = self._joined()
        new = [spec for id_, spec in self.models.items() if id_ not in old]
        self.optional |= {spec.id for spec in new}
        entries = (*self._entries.values(), *self._stored)
        late = [s for s in entries if s not in new and not files_of(s).isdisjoint(files)]
        return Changes(
            [*new, *late],
            [(old[id_], s) for id_, s in self.models.items() if id_ in old and old[id_] != s],
            [spec for id_, spec in old.items() if id_ not in self.models],
        )

    def _joined(self) -> tuple[dict[str, ModelSpec], dict[str, ModelSpec | Route]]:
        """Return the models by id, and all by name; of two, the first has the name."""
        models, names = dict(self._fixed), _names([*self._fixed.values(), *self.routes.values()])
        taken = {f for spec in (*self._entries.values(), *self._stored) for f in files_of(spec)}
        free = [spec for spec in self._found.values() if taken.isdisjoint(files_of(spec))]
        for spec in (*self._stored, *free):
            if spec.id in models:
                continue
            try:
                names = _names([spec], names)
            except ImproperlyConfigured as exc:
                self._tell(f"{spec.file or spec.id} is left out: {exc}")
            else:
                models[spec.id] = spec
        return models, names

    def _tell(self, fault: str) -> None:
        if fault not in self._told:
            self._told.add(fault)
            logger.warning("%s", fault)

    def find(self, name: str, project: str | None = None) -> ModelSpec | None:
        """Return the model of this name (see ``named``); None for a route, too."""
        found = self.named(name, project)
        return found if isinstance(found, ModelSpec) else None

    def named(self, name: str, project: str | None = None) -> ModelSpec | Route | None:
        """Return what has this name, or None; with a project, only what it may use.

        The name is trimmed and its case does not matter. It is looked for among the ids and
        aliases, then by what is before its ``:``, then as ``default``, then as an architecture, if
        one model has it, also by what is before its ``:``.
        """
        wanted = _folded(name)
        untagged = _folded(wanted.partition(":")[0])
        default = _folded(settings.DEFAULT_MODEL) if wanted == DEFAULT else ""
        found = (self._by_name.get(name) for name in (wanted, untagged, default))
        allowed = (one for one in found if one and (project is None or one.is_for(project)))
        named = next(allowed, None)
        return named or self._only_one_of(wanted, project) or self._only_one_of(untagged, project)

    def _only_one_of(self, architecture: str, project: str | None) -> ModelSpec | None:
        mine = (spec for spec in self.models.values() if project is None or spec.is_for(project))
        known = [(spec, architecture_of(spec)) for spec in mine]
        found = [spec for spec, name in known if name and _folded(name) == architecture]
        return found[0] if len(found) == 1 else None

    def listed(self, project: str) -> list[ModelSpec]:
        """Return what the list of models shows to a project."""
        return [spec for spec in self.models.values() if spec.is_listed and spec.is_for(project)]

    def listed_routes(self, project: str) -> list[Route]:
        """Return the routes that the list of models shows to a project."""
        return [one for one in self.routes.values() if one.is_listed and one.is_for(project)]


def _names(
    specs: Iterable[ModelSpec | Route],
    taken: Mapping[str, ModelSpec | Route] = MappingProxyType({}),
) -> dict[str, ModelSpec | Route]:
    """Return models and routes by their names, with those of ``taken``.

    Raise ImproperlyConfigured for a name that two have.
    """
    by_name = dict(taken)
    for spec in specs:
        for name in (spec.id, *spec.aliases):
            other = by_name.setdefault(_folded(name), spec)
            if other is not spec:
                raise ImproperlyConfigured(
                    f"The models '{other.id}' and '{spec.id}' have one name, '{name}'."
                )
    return by_name


def _folded(name: str) -> str:
    return name.strip().casefold()


@cache
def catalogue() -> Catalogue:
    """Return this process's catalogue. Raise ImproperlyConfigured for a bad file."""
    path: Path | None = settings.MODELS_FILE
    entries, routes = read_models_and_routes(path) if path is not None else ([], [])
    demo = demo_specs() if settings.DEMO_MODEL else []
    folder = Path(settings.MODELS_DIR)
    return Catalogue(entries, Folder(folder), discover(folder), demo, routes)


def start_specs(names: Sequence[str]) -> list[ModelSpec]:
    """Return the models of these names; without any, all that are preloaded; for "none", none.

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

    One file, for chats and for embeddings, and a script that recalls what the user said: the file
    is too small for that.
    """
    chat = ModelSpec(
        id="demo",
        engine="llama_cpp",
        file=DEMO_FILE,
        threads=1,  # A second one costs this small model more than it gives.
        sampling=site_sampling(),
        # It answers best without thinking first.
        options={"chat_template_kwargs": {"enable_thinking": False}},
    )
    embedding = replace(chat, id="demo-embedding", slots=4, options={"embedding": "mean"})
    recall = {"script": [{"recall": "You said: "}]}
    memory = ModelSpec("demo-memory", "scripted", context_length=8192, options=recall)
    return [chat, embedding, memory]


_Seen = tuple[tuple[int, int], ...]


def discover(folder: Path) -> list[ModelSpec]:
    """Return a spec for each model file, in order of their names; the id is the file's name.

    Projectors, adapters, later parts of split files and what cannot be read are left out.
    """
    return list(_specs(_files(folder)))


def id_of(file: Path) -> str:
    """Return the id of the model in a file."""
    return file.stem.lower()


class Folder:
    """A folder in which files appear while the site runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[Path, _Seen] = {path: _seen(path) for path in _files(path)}
        self._growing: dict[Path, _Seen] = {}

    def appeared(self) -> list[ModelSpec]:
        """Return the models of files that are new since the last call, and whole.

        A file that is still being written is looked at again once it has stayed the same from one
        call to the next.
        """
        found = {path: _seen(path) for path in _files(self._path)}
        new = {path: seen for path, seen in found.items() if self._known.get(path) != seen}
        still = [path for path, seen in new.items() if self._growing.get(path) == seen]
        self._growing = new
        self._known |= {path: new[path] for path in still}
        return list(_specs([path for path in still if _is_whole(path)]))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.gguf") if not is_later_part(path))


def _seen(path: Path) -> _Seen:
    """Return what changes when a file, or a part of it, is written."""
    return tuple(_time_and_size(part) for part in parts_of(path))


def _time_and_size(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:  # It is gone, or not there yet.
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _is_whole(path: Path) -> bool:
    fault = next((fault for part in parts_of(path) if (fault := file_fault(part))), "")
    if fault:
        logger.warning("%s is left out: %s", path, fault)
    return not fault


def _specs(files: list[Path]) -> Iterator[ModelSpec]:
    ids = set()
    for path in files:
        try:
            is_model = model_context(path) is not None
        except (OSError, ValueError) as exc:
            logger.warning("%s is left out: %s", path, exc)
            continue
        if is_model and id_of(path) not in ids:
            ids.add(id_of(path))
            yield _spec(path)


def _spec(path: Path) -> ModelSpec:
    slots, context_length = fitting_sizes(path, None, None, {})
    return ModelSpec(
        id=id_of(path),
        engine="llama_cpp",
        file=path,
        slots=slots,
        context_length=context_length,
        threads=default_threads("llama_cpp"),
        sampling=site_sampling(),
    )
