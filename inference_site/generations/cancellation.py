"""Cancelling generations, and ending those that no worker ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import redis.asyncio
from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer

from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.deltas import Usage
from inference_site.domain.errors import StoppedByOperator
from inference_site.domain.model_spec import Price
from inference_site.generations.kinds import Assembler, Kind, kind_of, recovered
from inference_site.generations.models import TERMINAL, Generation, Status
from inference_site.observability.metrics import count_ended
from inference_site.storage.connections import impatient_transaction
from inference_site.storage.deadlines import Deadlines
from inference_site.storage.redis_clients import shard_of
from inference_site.streams.batches import Sent
from inference_site.streams.ending import Ending
from inference_site.streams.event_log import (
    AsyncEventLog,
    channel_message,
    close_log,
    drop_cancel_flag,
    request_cancel,
    take_log,
)
from inference_site.streams.log_scripts import Appended
from inference_site.streams.request_documents import drop_document, load_document

_graces = Deadlines("disconnect-grace")
_SLACK_S = 5
"""How much longer than the grace one waits that is read: a web process or Redis may be slow."""


def attend(generation_id: str, grace_s: int) -> None:
    """Have a generation stopped once nobody has read it for so long."""
    _graces.push(generation_id, grace_s + _SLACK_S)


async def tell_attended(
    client: redis.asyncio.Redis, read: Mapping[str, int], left: Mapping[str, int]
) -> None:
    """Push on those that are read, and let the time run for those that were left.

    Both are ids with their grace in seconds; another process may still read what was left here, and
    pushes it on again.
    """
    await _graces.push_known(client, left)
    pushed_on = {id_: grace_s + _SLACK_S for id_, grace_s in read.items()}
    await _graces.push_known(client, pushed_on)


def unattended() -> list[str]:
    """Return the generations whose time has passed, those among them that have ended too."""
    return _graces.passed()


def forget(generation_ids: Collection[str]) -> None:
    """Wait no longer for the clients of these."""
    _graces.forget(generation_ids)


def end_in_place(
    generation: Generation, status: Status, move: Callable[[], bool], error: Exception | None
) -> bool:
    """End a generation and its stream; without an error it counts as cancelled.

    ``move`` is the guarded update of its row: when that finds that somebody else was first,
    nothing is done and False is returned.
    """
    kind = kind_of(generation.kind)
    with impatient_transaction():
        if not move():  # From here to the commit a worker that lives after all waits with its own.
            return False
        assembler, ending, first = _ended(kind, generation, error)
        if assembler is not None and assembler.pieces:
            _account(generation, assembler.pieces)
        if kind.store_result is not None and assembler is not None:
            kind.store_result(generation.public_id, status, assembler, None)
    error_code = "" if ending is None else ending.error_code
    count_ended(generation.model, generation.kind, status, error_code)
    if ending is None:
        drop_document(generation.public_id)
        return True
    # Its worker appends nothing any more, unless it is of a release that does not ask.
    answer = close_log(generation.public_id, ending, first)
    if answer is None:
        answer = close_log(generation.public_id, ending)
    assert answer is not None
    _tell(generation.public_id, answer)
    return True


def _ended(
    kind: Kind[Any], generation: Generation, error: Exception | None
) -> tuple[Assembler | None, Ending | None, int | None]:
    """Return the ending, what made it, and the number of its first frame, if they depend on it."""
    # A worker that comes back much later, when the log has expired, may not begin it anew.
    sent = take_log(generation.public_id, generation.attempt + 1)
    if kind.recover is None:
        assembler, first = _of_document(kind, generation.public_id, sent), sent.next
        if assembler is None or error is None:
            return None, None if error is None else kind.failure(error), None
    else:
        assembler, first = recovered(kind, generation.public_id, sent)
    if assembler is None:
        return None, None if error is None else kind.failure(error, first=first), first
    if assembler.pieces:
        assembler.feed(Usage(output_tokens=assembler.pieces))
    return assembler, assembler.cancel() if error is None else assembler.fail(error), first


def _of_document(kind: Kind[Any], generation_id: str, sent: Sent) -> Assembler | None:
    """Return what ends a stream of which nothing is stored; None if it has nothing to go by."""
    document = load_document(generation_id, kind.assembly).document if sent.frames else None
    if document is None:
        return None
    assembler = kind.assembler(document.assembly)
    assembler.recover(sent)
    return assembler


def _account(generation: Generation, output_tokens: int) -> None:
    """Count what was sent: a piece is a token at least. The worker took the other counts along."""
    spec = catalogue().models.get(generation.model)
    price = Price() if spec is None else spec.price
    rows = Generation.objects.filter(public_id=generation.public_id)
    rows.update(output_tokens=output_tokens, cost=price.cost(0, 0, output_tokens))


def _tell(generation_id: str, answer: Appended) -> None:
    """Tell who follows; they read the log, which knows the numbers of the frames."""

    async def send() -> None:
        for channel in answer.followers:
            await get_channel_layer().send(channel, channel_message([(generation_id, b"")]))

    if answer.followers:
        # The loop that had this done in a thread may have ended, and would never do it.
        async_to_sync(send, force_new_loop=True)()


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


def stop(generation: Generation) -> bool:
    """Have a generation stopped, whoever waits for it; return False when it has ended already.

    What waits ends now; what runs, within a tick of the publisher and a token of its engine. Raise
    redis' errors when Redis is down.
    """
    if generation.status in TERMINAL:
        return False
    cancel([generation.public_id], StoppedByOperator())
    return True
