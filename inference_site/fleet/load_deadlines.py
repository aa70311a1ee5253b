"""Generations that were accepted while their model was loading, and until when they wait for it."""

from __future__ import annotations

from collections.abc import Collection

from inference_site.storage.redis import Deadlines

_deadlines = Deadlines("load-deadlines")


def wait_for_load(generation_id: str, wait_s: int) -> None:
    """Have a generation given up when its model is not served after so long."""
    _deadlines.push(generation_id, wait_s)


def overdue() -> list[str]:
    """Return the generations whose time has passed, those among them that have ended too."""
    return _deadlines.passed()


def forget_waits(generation_ids: Collection[str]) -> None:
    """Wait no longer for the models of these."""
    _deadlines.forget(generation_ids)
