"""Cancelling generations, and ending them in place of a worker.

``cancel`` is the one cancel of clients, the API, operators and maintenance. It first sets the
cancel flag in Redis, then updates the row. A worker that claims the row between the two reads the
flag when it starts the run; in the other order, it could start and see no flag for a while. The row
of a background generation records the cancel, because a later attempt may start after Redis has
lost the flag.

``end_without_worker`` ends a generation whose worker died, never claimed it, or is not needed.

A generation with a disconnect grace continues for that time after its last reader has left. Its
deadline is in Redis. A web process with a reader extends it. When it passes, because the client has
left or the web process died, maintenance cancels the generation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import redis.asyncio
import redis.exceptions
from asgiref.sync import async_to_sync
from django import db

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet.leases import unsent_tokens
from inference_site.core.domain.deltas import Usage
from inference_site.core.domain.errors import StoppedByOperator
from inference_site.core.observability.metrics import count_ended
from inference_site.core.storage.postgresql import in_database_thread, transaction_with_timeouts
from inference_site.core.storage.redis import Deadlines, shard_of
from inference_site.runs.kinds import Assembler, closings, kind_of, recovered
from inference_site.runs.models import TERMINAL, Generation, Status, usage_columns
from inference_site.runs.streams.batches import Ending
from inference_site.runs.streams.event_log import (
    AsyncEventLog,
    close_log,
    drop_cancel_flag,
    request_cancel,
    send_hint,
    take_log,
)
from inference_site.runs.streams.request_documents import drop_document, load_document

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
reader_deadlines = Deadlines("disconnect-grace")
"""The generations that are cancelled at these times, as they have no readers any more."""
_SLACK_S = 5
"""Seconds added to the grace of a generation with readers: a web process or Redis may be slow."""


def cancel(generation_ids: Collection[str], error: Exception | None = None) -> frozenset[str]:
    """Cancel these generations; return those that have ended now, because no worker had them.

    A running generation is ended by its worker, within a tick of its publisher and a token of its
    engine. One that has ended stays as it is. ``error`` is shown to the readers of a waiting one
    whose kind has no ending of its own for a cancel; without it, it must have no readers. Raise
    redis' errors when Redis is down.
    """
    for generation_id in generation_ids:
        request_cancel(generation_id)
    return cancel_waiting(generation_ids, error)


def stop(generation: Generation) -> bool:
    """Cancel a generation for an operator; return False if it has ended already.

    Raise redis' errors when Redis is down.
    """
    if generation.status in TERMINAL:
        return False
    cancel([generation.public_id], StoppedByOperator())
    return True


def cancel_waiting(
    generation_ids: Collection[str], error: Exception | None = None
) -> frozenset[str]:
    """Cancel those that no worker has claimed, whose flags are set; return their ids."""
    waiting: dict[str, Generation] = {}
    may_restart: set[str] = set()
    for generation in Generation.objects.filter(public_id__in=generation_ids):
        if generation.status in TERMINAL:  # No worker will see the flag and remove it.
            drop_cancel_flag(generation.public_id)
            continue
        if generation.status == Status.QUEUED:
            waiting[generation.public_id] = generation
        if generation.background:
            may_restart.add(generation.public_id)
    # Those with readers, and those that have run before: they may have saved turns and calls.
    one_by_one = {
        one.public_id
        for one in waiting.values()
        if error or one.attempt or kind_of(one.kind).recover
    }
    ended = {id_ for id_ in one_by_one if _cancel_and_close(waiting[id_], error)}
    if others := waiting.keys() - one_by_one:
        for id_ in Generation.objects.cancel_queued(others):
            count_ended(waiting[id_].model, waiting[id_].kind, Status.CANCELLED)
            drop_document(id_)
            ended.add(id_)
    if may_restart - ended:
        Generation.objects.note_cancel(may_restart - ended)
    return frozenset(ended)


def _cancel_and_close(generation: Generation, error: Exception | None) -> bool:
    """Cancel a waiting generation and end its stream and calls; False if it no longer waits."""
    if kind_of(generation.kind).recover is not None:
        error = None  # Its assembler has an ending for a cancel.

    def move() -> bool:
        return bool(Generation.objects.cancel_queued([generation.public_id]))

    return end_without_worker(generation, Status.CANCELLED, move, error)


class CancelQueue:
    """The cancels of clients that leave, retried until they are stored. For one event loop.

    A thousand clients may leave in one moment, or while Redis is away: all are stored together. An
    event log server that is away delays only the cancels of its own streams.
    """

    def __init__(self) -> None:
        self._shards: defaultdict[int, _ShardCancels] = defaultdict(_ShardCancels)

    def add(self, generation_id: str) -> asyncio.Future[None]:
        """Cancel a generation; the future is done when its cancel flag is stored."""
        return self._shards[shard_of(generation_id)].add(generation_id)

    async def run(self, logs: Sequence[AsyncEventLog]) -> None:
        """Store cancels forever; ``logs`` are those of all servers, in the settings' order."""
        await asyncio.gather(*(self._shards[n].run(log) for n, log in enumerate(logs)))


class _ShardCancels:
    """The cancels of the streams of one event log server.

    The workers are asked first; taking queued rows out of the database is a task of its own, so
    that a slow database delays no worker.
    """

    def __init__(self) -> None:
        self._to_flag: set[str] = set()
        self._flag_wanted = asyncio.Event()
        self._stored: asyncio.Future[None] | None = None
        self._to_unqueue: set[str] = set()
        self._unqueue_wanted = asyncio.Event()

    def add(self, generation_id: str) -> asyncio.Future[None]:
        if self._stored is None:
            self._stored = asyncio.get_running_loop().create_future()
        self._to_flag.add(generation_id)
        self._flag_wanted.set()
        return self._stored

    async def run(self, log: AsyncEventLog) -> None:
        await asyncio.gather(self._flag_all(log), self._unqueue_all())

    async def _flag_all(self, log: AsyncEventLog) -> None:
        while True:
            await self._flag_wanted.wait()
            self._flag_wanted.clear()
            ids, stored = self._to_flag, self._stored
            self._to_flag, self._stored = set(), None
            await _retry(partial(log.request_cancel, list(ids)))
            if stored is not None:
                stored.set_result(None)
            self._to_unqueue |= ids
            self._unqueue_wanted.set()

    async def _unqueue_all(self) -> None:
        while True:
            await self._unqueue_wanted.wait()
            self._unqueue_wanted.clear()
            ids, self._to_unqueue = self._to_unqueue, set()
            await _retry(partial(in_database_thread, partial(cancel_waiting, ids)))


async def _retry(act: Callable[[], Awaitable[object]]) -> None:
    """Run it until Redis and PostgreSQL are there."""
    while True:
        try:
            await act()
        except (redis.exceptions.RedisError, db.Error) as exc:
            logger.warning("cannot cancel yet: %s", exc)
            await asyncio.sleep(_RETRY_S)
        except Exception:
            logger.exception("cannot cancel")
            return
        else:
            return


def set_reader_deadline(generation_id: str, grace_s: int) -> None:
    """Have a generation cancelled ``grace_s`` after its last reader has left."""
    reader_deadlines.push(generation_id, grace_s + _SLACK_S)


async def refresh_reader_deadlines(
    client: redis.asyncio.Redis,
    read: Mapping[str, int],
    left: Mapping[str, int],
    begun: Collection[str] = (),
) -> None:
    """Extend the deadlines of generations with readers; start the countdown of the others.

    Both are ids with their grace in seconds. Another process may have a reader of a generation that
    was left here; it extends the deadline again. Redis may have lost the deadlines of those that
    were ``begun`` here with a grace; a reader that came later sets none, as its grace may be newer
    than the generation.
    """
    await reader_deadlines.push_many(client, left, "XX")
    extended = {id_: grace_s + _SLACK_S for id_, grace_s in read.items()}
    await reader_deadlines.push_many(client, extended, "XX")
    own = {id_: after_s for id_, after_s in extended.items() if id_ in begun}
    await reader_deadlines.push_many(client, own, "NX")


def end_without_worker(
    generation: Generation, status: Status, move: Callable[[], bool], error: Exception | None
) -> bool:
    """End a generation and its stream; without an error it counts as cancelled.

    ``move`` is the guarded update of its row. If another process was first, nothing is done and
    False is returned.
    """
    kind = kind_of(generation.kind)
    with transaction_with_timeouts():
        if not move():  # From here to the commit, a worker that still lives waits for the row.
            return False
        unsent = unsent_tokens(generation.worker, generation.public_id) if generation.worker else 0
        usage = Usage()
        for app in closings():
            usage = usage.plus(app.usage_of_saved_turns(generation.public_id))
        usage = replace(usage, output_tokens=max(unsent, usage.output_tokens))
        assembler, usage, ending, first = _ending_of(generation, error, usage)
        if usage != Usage():
            # A piece that was sent is at least one token; of a run that has sent nothing, the lease
            # has the tokens as of its last renewal. The other counts since the last saved turn were
            # lost with the worker.
            columns = usage_columns(usage, catalogue().price_of(generation.model))
            Generation.objects.filter(public_id=generation.public_id).update(**columns)
        if kind.store_result is not None and assembler is not None:
            kind.store_result(generation.public_id, status, assembler, None)
        for app in closings():
            app.close(generation.public_id)
    error_code = "" if ending is None else ending.error_code
    count_ended(generation.model, generation.kind, status, error_code, usage)
    if ending is None:
        drop_document(generation.public_id)
        return True
    followers = close_log(generation.public_id, ending, first)
    if followers is None:  # Its worker, of a release that does not check attempts, has appended.
        followers = close_log(generation.public_id, ending)
    _hint(generation.public_id, followers or ())
    return True


def _ending_of(
    generation: Generation, error: Exception | None, usage: Usage
) -> tuple[Assembler | None, Usage, Ending | None, int | None]:
    """Return the assembler, the usage, the ending, and the number of the first frame of the ending.

    ``usage`` is what is known of it beside the frames. The number is None if the ending does not
    depend on it.
    """
    kind = kind_of(generation.kind)
    # The next attempt's number: a worker that returns after the log has expired cannot restart it.
    sent = take_log(generation.public_id, generation.attempt + 1)
    first = sent.next
    assembler: Assembler | None = None
    if kind.recover is None:
        # Nothing of it is stored: the request document is needed to end its stream.
        document = None
        if sent.frames:
            document = load_document(generation.public_id, kind.assembly).document
        if document is None or error is None:
            return None, usage, None if error is None else kind.failure(error), None
        assembler = kind.assembler(document.assembly)
        assembler.recover(sent)
    else:
        assembler, first = recovered(kind, generation.public_id, sent)
        if assembler is None:
            ending = None if error is None else kind.failure(error, first=first)
            return None, usage, ending, first
    usage = replace(usage, output_tokens=max(assembler.pieces, usage.output_tokens))
    if usage != Usage():
        assembler.feed(usage)
    ending = assembler.cancel() if error is None else assembler.fail(error)
    return assembler, usage, ending, first


def _hint(generation_id: str, followers: Collection[str]) -> None:
    """Have the followers read the log, which has the numbers of the frames."""

    async def send() -> None:
        for channel in followers:
            await send_hint(channel, [(generation_id, b"")])

    if followers:
        # Without a new loop, a loop that has ended might be asked to run it, and never would.
        async_to_sync(send, force_new_loop=True)()
