"""What happens to a model, as a stream: its loads and unloads on every worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from completions.wire.models import ModelEvent, ModelWorker
from inference_site.fleet import fleet
from inference_site.fleet.fleet import LiveWorker, ModelReport, ModelState

_LOOK_S = 0.5
_DONE = b"data: [DONE]\n\n"
_UNDER_WAY = (ModelState.LOADING, ModelState.DRAINING)


async def model_events(model: str) -> AsyncIterator[bytes]:
    """Yield how the model is, as SSE: at once, at every change, and until nothing is under way."""
    sent = b""
    while True:
        event, is_last = await asyncio.to_thread(_look, model)
        if event != sent:
            yield event
            sent = event
        if is_last:
            yield _DONE
            return
        await asyncio.sleep(_LOOK_S)


def _look(model: str) -> tuple[bytes, bool]:
    """Return the event that says how the model is, and whether it will stay so by itself."""
    is_pending = fleet.has_pending_command(model)  # Read before the leases, which clear it.
    pairs = [(worker, worker.model(model)) for worker in fleet.workers()]
    having = [(worker, served) for worker, served in pairs if served is not None]
    status = fleet.status_among([worker for worker, _ in having], model)
    event = ModelEvent(model=model, status=status.value, workers=[_wire(*one) for one in having])
    is_under_way = is_pending or any(served.state in _UNDER_WAY for _, served in having)
    return b"data: " + event.model_dump_json().encode() + b"\n\n", not is_under_way


def _wire(worker: LiveWorker, served: ModelReport) -> ModelWorker:
    return ModelWorker(
        id=worker.id,
        host=worker.host,
        state=served.state.value,
        progress=served.progress,
        reason=served.reason or None,
        slots=served.slots,
        busy=served.busy,
    )
