"""Cancelling generations: for a client that left, the API, operators and maintenance alike.

First the cancel flag in Redis, then the row. A worker that claims the row between the two reads the
flag when it begins; with the row first, it could begin and see no flag for a while. The row of one
in the background keeps that it is to stop: it may be begun anew after Redis has lost the flag.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from inference_site.generations.ending_without_worker import end_in_place
from inference_site.generations.kinds import kind_of
from inference_site.generations.models import TERMINAL, Generation, Status
from inference_site.observability.metrics import count_ended
from inference_site.storage.redis import shard_of
from inference_site.streams.event_log import AsyncEventLog, drop_cancel_flag, request_cancel
from inference_site.streams.request_documents import drop_document


def cancel(generation_ids: Collection[str], error: Exception | None = None) -> frozenset[str]:
    """Have these generations stopped; return those that have ended now, because they waited.

    What runs is ended by its worker, within a tick of its publisher and a token of its engine. What
    has ended stays as it is. ``error`` is for the readers of a waiting one whose kind has no words
    of its own for being cancelled; without it nobody may read it. Raise redis' errors when Redis is
    down.
    """
    for generation_id in generation_ids:
        request_cancel(generation_id)
    return cancel_waiting(generation_ids, error)


def flag_writes(
    logs: Sequence[AsyncEventLog], generation_ids: Collection[str]
) -> list[Callable[[], Awaitable[None]]]:
    """Return what sets the flags of these, a call for each server; ``cancel_waiting`` is next.

    ``logs`` are the event logs of all servers, in the order of the settings.
    """
    shards: dict[int, list[str]] = {}
    for generation_id in generation_ids:
        shards.setdefault(shard_of(generation_id), []).append(generation_id)
    return [partial(logs[shard].request_cancel, members) for shard, members in shards.items()]


def cancel_waiting(
    generation_ids: Collection[str], error: Exception | None = None
) -> frozenset[str]:
    """Cancel those that nobody has claimed, their flags being set; return their ids."""
    waiting: dict[str, Generation] = {}
    may_go_on: set[str] = set()
    for generation in Generation.objects.filter(public_id__in=generation_ids):
        if generation.status in TERMINAL:  # Its worker will not see the flag, and so not remove it.
            drop_cancel_flag(generation.public_id)
            continue
        if generation.status == Status.QUEUED:
            waiting[generation.public_id] = generation
        if generation.background:
            may_go_on.add(generation.public_id)
    has_readers = {g.public_id for g in waiting.values() if error or kind_of(g.kind).recover}
    ended = {id_ for id_ in has_readers if _end_one(waiting[id_], error)}
    ended |= _end_many(waiting, waiting.keys() - has_readers)
    if may_go_on - ended:
        Generation.objects.note_cancel(may_go_on - ended)
    return frozenset(ended)


def _end_one(generation: Generation, error: Exception | None) -> bool:
    """Cancel one that somebody may read, and end its stream; False if it waits no more."""
    move = partial(Generation.objects.cancel_queued, [generation.public_id])
    if kind_of(generation.kind).recover is not None:
        error = None
    return end_in_place(generation, Status.CANCELLED, lambda: bool(move()), error)


def _end_many(waiting: dict[str, Generation], generation_ids: Collection[str]) -> set[str]:
    """Cancel those that nobody reads, all in one go."""
    ended = Generation.objects.cancel_queued(generation_ids) if generation_ids else []
    for generation_id in ended:
        generation = waiting[generation_id]
        count_ended(generation.model, generation.kind, Status.CANCELLED)
        drop_document(generation_id)
    return set(ended)
