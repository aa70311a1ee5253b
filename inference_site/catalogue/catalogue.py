"""The model catalogue: which models exist, and by which names.

Read from the YAML file named by ``MODELS_FILE``; without one, the demo model that ships with the
product is the catalogue, and the files that lie in ``MODELS_DIR``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from inference_site.catalogue.architectures import architecture_of
from inference_site.catalogue.discovery import discover
from inference_site.catalogue.entry import default_threads
from inference_site.catalogue.models_file import read_models_file, site_sampling
from inference_site.domain.model_spec import ModelSpec

DEMO_FILE = Path(__file__).resolve().parents[2] / "worker" / "demo" / "demo-q8_0.gguf"
DEFAULT = "default"
"""The name that stands for the site's default model."""


class Catalogue:
    """The models by id, in order, and the names by which they are found.

    Raise ImproperlyConfigured for two models of one name.
    """

    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        self.models = {spec.id: spec for spec in specs}
        self._by_name: dict[str, ModelSpec] = {}
        for spec in self.models.values():
            for name in (spec.id, *spec.aliases):
                other = self._by_name.setdefault(_folded(name), spec)
                if other is not spec:
                    raise ImproperlyConfigured(
                        f"The models '{other.id}' and '{spec.id}' have one name, '{name}'."
                    )

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


def _folded(name: str) -> str:
    return name.strip().casefold()


@cache
def catalogue() -> Catalogue:
    """Return this process's catalogue. Raise ImproperlyConfigured for a bad file."""
    path: Path | None = settings.MODELS_FILE
    if path is not None:
        return Catalogue(read_models_file(path))
    return Catalogue([*demo_specs(), *discover(Path(settings.MODELS_DIR))])


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
