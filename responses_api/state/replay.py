"""The stream of a response that has ended, once its event log is gone or was never closed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count, zip_longest

from django.conf import settings
from django.db.models import Func, QuerySet, Sum, TextField
from django.db.models.functions import Cast
from pydantic_core import to_json

from inference_site.streams.batches import Batch, Ending, StoredStream
from responses_api.models import ENDED, StoredResponse
from responses_api.output.events import DONE, encode, error_event, opening, terminal
from responses_api.output.item_events import ItemEvents
from responses_api.state.reading import current_response
from responses_api.wire.events import Event
from responses_api.wire.output import changed
from responses_api.wire.response import ResponseObject

_LEFT_OUT = b": left out\n\n"
_TIMES = 6
"""How often a stream has the output: as deltas, in the events that end its parts, and as body."""
_STATES = 5
"""How often it has the request."""
_DELTA_BYTES = 250
"""Bytes of the event of a delta beside the text."""


def remake_of(stored: StoredResponse, after: int = -1) -> StoredStream:
    """Return how the stream of a response that has ended is made anew (see ``replay``)."""
    output = stored.items.filter(is_output=True)
    text = Cast("data", TextField())
    size = output.aggregate(size=Sum(Func(text, function="octet_length")))["size"] or 0
    deltas = sum(len(item["sizes"]) for item in (stored.deltas or {}).get("items", ()) if item)
    about = _TIMES * size + _STATES * len(str(stored.request)) + _DELTA_BYTES * deltas
    return StoredStream(about, partial(replay, stored, after))


def replay(stored: StoredResponse, after: int = -1) -> list[Batch]:
    """Return the stream of a response that has ended, made from what is stored.

    The items come in the order they had, their texts in the deltas that they were sent in. If these
    are unknown each text is one delta, and a reader who knows the events up to ``after`` may have
    seen more than there are now: it gets the last under the number that it expects. What an attempt
    has sent that was begun anew is left out, and comments stand for its events, so that each event
    has its number.
    """
    response = current_response(stored)
    first, frames = 0, list[bytes]()
    for event in _events(stored, response):
        frames += [_LEFT_OUT] * (event.sequence_number - len(frames))
        frames.append(encode(event))
    if stored.deltas is None and after >= len(frames) - 1:
        first, frames = after + 1, [encode(terminal(response, count(after + 1)))]
    if settings.RESPONSES_SEND_DONE:
        frames.append(DONE)
    return [Batch(first, frames, Ending((), 200, to_json(response)))]


def replay_of(public_id: str, *, is_begun: bool = False) -> StoredStream | None:
    """Return how, by the response's id; None when there is no such response.

    Also None for one that ``is_begun``, and of which it is unknown in what deltas it was sent.
    """
    stored = _kept(public_id).filter(status__in=ENDED)
    found = stored.select_related("previous", "conversation").first()
    if found is None or (is_begun and found.deltas is None):
        return None
    return remake_of(found)


def is_deleted(public_id: str) -> bool:
    """Whether a response that was stored may not be read any more."""
    return not _kept(public_id).exists()


def _kept(public_id: str) -> QuerySet[StoredResponse]:
    return StoredResponse.objects.filter(public_id=public_id, deleted_at=None)


def _events(stored: StoredResponse, response: ResponseObject) -> Iterator[Event]:
    numbers = count()
    deltas = stored.deltas or {"items": [], "end": None}
    unset = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    yield from opening(changed(response, **unset, status="in_progress", output=[]), numbers)
    for (index, item), cut in zip_longest(enumerate(response.output), deltas["items"]):
        if cut is None:
            yield from ItemEvents(item.id, index, numbers).whole(item)
            continue
        numbers = count(cut["first"])
        yield from ItemEvents(item.id, index, numbers).whole(
            item, cut["sizes"], cut["logprob_counts"]
        )
    if deltas["end"] is not None:
        numbers = count(deltas["end"] - (stored.error is not None))
    if stored.error is not None:
        yield error_event(stored.error, numbers)
    yield terminal(response, numbers)
