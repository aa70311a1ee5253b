"""What a client is told while its request waits for its model to be loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from inference_site.fleet import fleet
from inference_site.fleet.fleet import ModelStatus
from inference_site.fleet.leases import LiveWorker, ModelState, live_view
from inference_site.generations.queue_position import position_of_waiting


@dataclass(frozen=True, slots=True)
class Loading:
    """A model on its way, in the worker that should have it first.

    ``expected_s`` is None where no load of it has been seen; ``progress``, from 0 to 1, where it is
    not known. ``reason`` says what it waits for, if it does.
    """

    expected_s: int | None = None
    progress: float | None = None
    reason: str = ""


def loading_of(model: str, live: Iterable[LiveWorker]) -> Loading:
    """Return how far these workers are with a model that is loading."""
    reports = [served for worker in live if (served := worker.model(model)) is not None]
    reports = [served for served in reports if served.state == ModelState.LOADING]
    first = min(
        reports,
        key=lambda r: math.inf if r.expected_s is None else r.expected_s,
        default=None,
    )
    if first is None:
        return Loading()
    expected_s = None if first.expected_s is None else math.ceil(first.expected_s)
    return Loading(expected_s, first.progress, first.reason)


def loading_comment(model: str, public_id: str) -> bytes:
    """Return what a stream says while it waits for its model; nothing if it waits for no load."""
    live = live_view.workers()
    if any(worker.serves(model) for worker in live):
        return b""
    if fleet.status_among(live, model) != ModelStatus.LOADING:
        return b""
    if (place := position_of_waiting(public_id)) is None:
        return b""
    said = [f"position={max(1, place.position)}"]
    if (expected_s := loading_of(model, live).expected_s) is not None:
        said.append(f"expected_s={expected_s}")
    return f": loading {' '.join(said)}\n\n".encode()
