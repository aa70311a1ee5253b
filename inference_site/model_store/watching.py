"""Takes up what becomes of the models while a process runs: in the folder, and in the database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import django.db
from django.core.exceptions import ImproperlyConfigured

from inference_site.catalogue.catalogue import Changes, catalogue, start_specs
from inference_site.domain.model_spec import ModelSpec
from inference_site.model_store.entries import StoredSpecs
from inference_site.storage.postgresql import release_connection_after

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks at the models."""
_stored = StoredSpecs()
_look_lock = threading.Lock()


def look() -> Changes:
    """Take up what has changed since the last look. Raise OSError of the disk."""
    with _look_lock:
        return catalogue().update(_stored_specs())


def _stored_specs() -> list[ModelSpec] | None:
    """Return the models of the database; None while it cannot be asked."""
    try:
        with release_connection_after():
            return _stored.read()
    except django.db.Error as exc:
        logger.warning("models: those of the database cannot be read: %s", exc)
        return None


def wanted_specs(names: Sequence[str], timeout_s: float = 30.0) -> list[ModelSpec]:
    """Return the models of these names as ``start_specs`` does, with those of the database.

    It is asked only for a name that is not known without it. Raise ImproperlyConfigured.
    """
    deadline = time.monotonic() + timeout_s
    stored: list[ModelSpec] | None = None
    while True:
        try:
            return start_specs(names)
        except ImproperlyConfigured:
            if stored is not None or time.monotonic() > deadline:
                raise
        with _look_lock:
            stored = _stored_specs()
            catalogue().update(stored)
        if stored is None:
            time.sleep(LOOK_S / 4)


def watch_models(on_change: Callable[[Changes], None] = lambda _: None) -> None:
    """Look now, and then on a thread of its own, as long as the process lives."""

    def attempt() -> None:
        try:
            if changes := look():
                for spec in changes.new:
                    logger.info("the model %s has appeared: %s", spec.id, spec.file or spec.engine)
                on_change(changes)
        except Exception:  # A disk of the network that does not answer, say.
            logger.exception("models: cannot look for changes")

    def watch() -> None:
        while True:
            time.sleep(LOOK_S)
            attempt()

    attempt()
    threading.Thread(target=watch, name="models", daemon=True).start()
