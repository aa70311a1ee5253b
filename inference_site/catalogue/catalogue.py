"""The model catalogue: which models exist, and by which names.

The entries of the YAML file named by ``MODELS_FILE``, if there is one, the demo model that ships
with the product, and the files that lie in ``MODELS_DIR`` or appear there. An entry goes before
what has its name, and before what else is found of its file.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from inference_site.catalogue.architectures import architecture_of
from inference_site.catalogue.discovery import Folder, discover
from inference_site.catalogue.entry import default_threads
from inference_site.catalogue.model_files import files_of
from inference_site.catalogue.models_file import read_models_file, site_sampling
from inference_site.domain.model_spec import ModelSpec

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks into the folder of models."""
DEMO_FILE = Path(__file__).resolve().parents[2] / "worker" / "demo" / "demo-q8_0.gguf"
DEFAULT = "default"
"""The name that stands for the site's default model."""


class Catalogue:
    """The models by id, in order, and the names by which they are found.

    ``found`` are models that nobody has named: they are left out where one of ``specs``, the
    entries, has their name or their file. ``optional`` are the ids of those that a site is ready
    without: what has come since it was made, and what was found beside entries. Raise
    ImproperlyConfigured for two models of one name.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        found: Iterable[ModelSpec] = (),
        folder: Folder | None = None,
    ) -> None:
        self.models = {spec.id: spec for spec in specs}
        self._by_name = _names(self.models.values())
        self._entries = tuple(self.models.values())
        self._folder = folder
        for spec in found:
            self._add(spec)
        entries = {spec.id for spec in self._entries}
        self.optional = self.models.keys() - entries if entries else frozenset()

    def look(self) -> list[ModelSpec]:
        """Add the models whose files have appeared in the folder of models; return them.

        Entries whose file has appeared are returned, too. Models whose files have gone stay until
        the process is started anew. One thread calls this.
        """
        new: list[ModelSpec] = []
        for spec in self._folder.appeared() if self._folder else ():
            if entries := self._entries_of(spec):
                new += entries
            elif self._add(spec):
                self.optional |= {spec.id}
                logger.info("the model %s has appeared: %s", spec.id, spec.file)
                new.append(spec)
        return new

    def _entries_of(self, found: ModelSpec) -> list[ModelSpec]:
        return [spec for spec in self._entries if not files_of(spec).isdisjoint(files_of(found))]

    def _add(self, spec: ModelSpec) -> bool:
        """Add a model, unless an entry has its file or another model its name."""
        if spec.id in self.models or (spec.file != DEMO_FILE and self._entries_of(spec)):
            return False
        try:
            names = _names([*self.models.values(), spec])
        except ImproperlyConfigured as exc:
            logger.warning("%s is left out: %s", spec.file, exc)
            return False
        # Other threads read the old mappings until they have the new ones.
        self.models, self._by_name = {**self.models, spec.id: spec}, names
        return True

    def find(self, name: str, project: str | None = None) -> ModelSpec | None:
        """Return the model of this name, or None; with a project, only one that it may use.

        The name is trimmed and its case does not matter. It is looked for among the ids and
        aliases, then by what is before its ``:``, then as ``default``, then as an architecture, if
        one model has it.
        """
        candidates = self._candidates(_folded(name))
        found = (self._by_name[name] for name in candidates if name in self._by_name)
        named = next((spec for spec in found if project is None or spec.is_for(project)), None)
        return named or self._only_one_of(_folded(name), project)

    def _only_one_of(self, architecture: str, project: str | None) -> ModelSpec | None:
        mine = (spec for spec in self.models.values() if project is None or spec.is_for(project))
        known = [(spec, architecture_of(spec)) for spec in mine]
        found = [spec for spec, name in known if name and _folded(name) == architecture]
        return found[0] if len(found) == 1 else None

    def listed(self, project: str) -> list[ModelSpec]:
        """Return what the list of models shows to a project."""
        return [spec for spec in self.models.values() if spec.is_listed and spec.is_for(project)]

    def _candidates(self, wanted: str) -> Iterator[str]:
        yield wanted
        yield _folded(wanted.partition(":")[0])
        if wanted == DEFAULT and settings.DEFAULT_MODEL:
            yield _folded(settings.DEFAULT_MODEL)


def _names(specs: Iterable[ModelSpec]) -> dict[str, ModelSpec]:
    """Return the models by their names. Raise ImproperlyConfigured for a name that two have."""
    by_name: dict[str, ModelSpec] = {}
    for spec in specs:
        for name in (spec.id, *spec.aliases):
            other = by_name.setdefault(_folded(name), spec)
            if other is not spec:
                raise ImproperlyConfigured(
                    f"The models '{other.id}' and '{spec.id}' have one name, '{name}'."
                )
    return by_name


def watch_folder(on_new: Callable[[ModelSpec], None] = lambda _: None) -> None:
    """Look for new models on a thread of its own, as long as the process lives."""

    def watch() -> None:
        while True:
            time.sleep(LOOK_S)
            try:
                for spec in catalogue().look():
                    on_new(spec)
            except Exception:  # A disk of the network that does not answer, say.
                logger.exception("models: cannot look for new files")

    threading.Thread(target=watch, name="models", daemon=True).start()


def _folded(name: str) -> str:
    return name.strip().casefold()


@cache
def catalogue() -> Catalogue:
    """Return this process's catalogue. Raise ImproperlyConfigured for a bad file."""
    path: Path | None = settings.MODELS_FILE
    entries = read_models_file(path) if path is not None else []
    demo = demo_specs() if settings.DEMO_MODEL else []
    folder = Path(settings.MODELS_DIR)
    return Catalogue(entries, [*demo, *discover(folder)], Folder(folder))


def start_specs(names: Sequence[str]) -> list[ModelSpec]:
    """Return the models of these names; without any, all of the catalogue; for "none", none.

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
    return [spec for spec in found.values() if spec] or list(known.models.values())


def demo_specs() -> list[ModelSpec]:
    """Return the models that ship with the product.

    One file, for chats and for embeddings, and a script that recalls what the user said: the file
    is too small for that.
    """
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
    recall = {"script": [{"recall": "You said: "}]}
    memory = ModelSpec("demo-memory", "scripted", context_length=8192, options=recall)
    return [chat, embedding, memory]
