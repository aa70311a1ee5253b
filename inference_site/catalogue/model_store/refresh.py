"""Keeps a process's catalogue up to date with the folder of models and the database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import django.db
from django.core.exceptions import ImproperlyConfigured

from inference_site.catalogue.catalogue import CatalogueChanges, catalogue, specs_to_load
from inference_site.catalogue.model_store.entries import StoredSpecs
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.storage.postgresql import release_connection_after

logger = logging.getLogger(__name__)

REFRESH_PERIOD_S = 2.0
_stored = StoredSpecs()
_lock = threading.Lock()


def refresh_catalogue() -> CatalogueChanges:
    """Update the catalogue; return what changed since the last call. Raise OSError of the disk."""
    with _lock:
        return catalogue().update(_read_stored_specs())


def _read_stored_specs() -> list[ModelSpec] | None:
    """Return the models of the database; None while it cannot be read."""
    try:
        with release_connection_after():
            return _stored.read()
    except django.db.Error as exc:
        logger.warning("models: those of the database cannot be read: %s", exc)
        return None


def wait_for_specs(names: Sequence[str], timeout_s: float = 30.0) -> list[ModelSpec]:
    """Return the models with these names as ``specs_to_load`` does, also those of the database.

    The database is read only for a name that is unknown without it; wait up to ``timeout_s`` for
    the database. Raise ImproperlyConfigured.
    """
    deadline = time.monotonic() + timeout_s
    stored: list[ModelSpec] | None = None
    while True:
        try:
            return specs_to_load(names)
        except ImproperlyConfigured:
            if stored is not None or time.monotonic() > deadline:
                raise
        with _lock:
            stored = _read_stored_specs()
            catalogue().update(stored)
        if stored is None:
            time.sleep(REFRESH_PERIOD_S / 4)


def watch_models(on_change: Callable[[CatalogueChanges], None] = lambda _: None) -> None:
    """Refresh now, and then periodically on a thread, as long as the process lives."""

    def refresh() -> None:
        try:
            if changes := refresh_catalogue():
                for spec in changes.new:
                    logger.info("the model %s has appeared: %s", spec.id, spec.file or spec.engine)
                on_change(changes)
        except Exception:  # For example a network disk that does not answer.
            logger.exception("models: cannot look for changes")

    def watch() -> None:
        while True:
            time.sleep(REFRESH_PERIOD_S)
            refresh()

    refresh()
    threading.Thread(target=watch, name="models", daemon=True).start()
