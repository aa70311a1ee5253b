"""Entries in the database: read and checked as those of the models file are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from django.conf import settings

from inference_site.catalogue.models_file import read_entry
from inference_site.catalogue.operator_settings import BadKey
from inference_site.domain.model_spec import ModelSpec
from inference_site.model_store.models import StoredModel
from inference_site.model_store.sealed_entries import opened

logger = logging.getLogger(__name__)

_ONLY_IN_THE_FILE = ("api_key_env", "api_key_file")
"""With these, who may add a model could send any secret of the workers to a server of their own."""


def read_stored_entry(id_: str, entry: dict[str, Any]) -> ModelSpec:
    """Return the spec of an entry, whose secrets may be sealed.

    Raise BadKey, also for a file outside of ``MODELS_DIR``.
    """
    for key in _ONLY_IN_THE_FILE:
        if key in entry:
            raise BadKey((key,), "only the models file may have it")
    return read_entry(id_, opened(entry), _located)


def _located(file: str) -> str:
    """Return where a file lies: names are read from ``MODELS_DIR``. Raise ValueError."""
    folder = Path(settings.MODELS_DIR)
    path = folder / file.removeprefix("hf:")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError("it is not in the directory of models")
    return str(path)


class StoredSpecs:
    """The specs of the entries; each is read anew when it has changed."""

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}
        self._specs: dict[str, ModelSpec] = {}

    def read(self) -> list[ModelSpec]:
        """Return the specs; entries that are wrong are left out. Raise the database's errors."""
        found = dict(StoredModel.objects.order_by("pk").values_list("model_id", "entry"))
        if found != self._entries:
            old, self._entries = self._entries, found
            changed = {id_: entry for id_, entry in found.items() if old.get(id_) != entry}
            kept = {id_: spec for id_, spec in self._specs.items() if id_ in found}
            self._specs = {id_: s for id_, s in kept.items() if id_ not in changed}
            for id_, entry in changed.items():
                self._add(id_, entry)
        return [self._specs[id_] for id_ in found if id_ in self._specs]

    def _add(self, id_: str, entry: Any) -> None:
        try:
            self._specs[id_] = read_stored_entry(id_, dict(entry))
        except (BadKey, ValueError, TypeError) as exc:
            path = ".".join(getattr(exc, "path", ()))
            logger.warning("the model %s of the database is left out: %s: %s", id_, path, exc)
