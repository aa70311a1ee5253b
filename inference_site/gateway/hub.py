"""The hub: receives the frames of all streams that this web process follows.

Each web process has one channel. Workers send it the frames of the streams that the process
follows; the hub passes them to the followers. It reads the event log for a follower that starts
late, misses a frame, or receives nothing for a second.

A log may expire before a reader reaches its end, or Redis may lose it. If the generation has ended
and its result is stored, the reader gets the rest from the database. If it still runs and its
result will be stored, the reader waits for its end. A reader of a result that was deleted gets a
404. Every other reader gets the error ``stream_lost``.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import redis.asyncio
import redis.exceptions
from channels.layers import get_channel_layer
from django import db
from django.conf import settings
from django.db.models.functions import Now
from django.utils import timezone
from prometheus_client import Counter

from inference_site.core.errors.api_errors import NotFoundError, StreamLostError
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.postgresql import in_database_thread
from inference_site.core.storage.redis import new_async_clients, shard_of
from inference_site.gateway.follower import ENDING_ONLY, Follower, SharedBatches
from inference_site.runs.cancellation import CancelQueue, refresh_reader_deadlines
from inference_site.runs.kinds import kind_of
from inference_site.runs.models import TERMINAL, Generation, Status
from inference_site.runs.streams.batches import Batch, Ending, decode_hint, is_renumbered
from inference_site.runs.streams.event_log import (
    AsyncEventLog,
    LogPosition,
    follow,
    log_position,
    may_have_more,
    send_hint,
)

logger = logging.getLogger(__name__)

_SILENCE_S = 1.0
_RETRY_S = 0.5
_GRACE_INTERVAL_S = 0.5
_PROBE_AFTER_S = 2.0
"""After this long without a message the hub sends itself one, while it has readers."""
_PROBE_S = 1.0
"""How long that message may take."""
_RENEW_S = 5.0
"""How long each step of a new subscription may take."""
_DATABASE_TASKS = 2
"""How many database tasks for readers run at once; other work uses the same threads."""
_VANISHED_S = 10.0
"""After this long without a frame the hub checks whether the stream's log is lost for good."""
_CLOSING_S = 5.0
"""A stream is ended by whoever ended its row, within this time after that."""

_LOG_READS = Counter(
    "inference_log_reads",
    "Reads of the event log for a reader: frames were missing, or nothing came.",
    ["reason"],
)
for _reason in ("gap", "silence"):
    _LOG_READS.labels(_reason)  # Shown at 0 from the start.


class Hub:
    """This process's channel and followers; for the event loop's thread unless a method says so."""

    def __init__(self) -> None:
        self.channel = f"web.{uuid.uuid4().hex}"
        self._followers: dict[str, list[Follower]] = {}
        self._lock = threading.Lock()
        self._logs: list[AsyncEventLog] = []
        self._shared = SharedBatches()
        self._tasks: list[asyncio.Task[None]] = []
        self._cancels = CancelQueue()
        self._in_database: set[Follower] = set()
        self._database_tasks: set[asyncio.Task[None]] = set()
        self._database_turns = asyncio.Semaphore(_DATABASE_TASKS)
        self._received_at = 0.0
        """When the last message came."""
        self._log_outages = [
            OutageLog(logger, f"hub: event log {shard}")
            for shard in range(len(settings.EVENT_LOG_URLS))
        ]
        self._hint_outage = OutageLog(logger, "hub: channel layer")
        self._grace_outage = OutageLog(logger, "hub: disconnect grace")
        self._failed_at = 0.0
        """When an event log could not be read, or took no writes, the last time."""

    def follow(self, generation_id: str, after: int = -1, grace_s: int = 0) -> Follower:
        """Add a reader of the frames with numbers above ``after``. For any thread."""
        follower = Follower(generation_id, after, grace_s)
        follower.has_begun = True
        self._add(follower)
        return follower

    def resume(
        self,
        generation_id: str,
        kind: str,
        after: int = -1,
        grace_s: int = 0,
        *,
        has_ended: bool,
        skips_log: bool = False,
        is_stored: bool = False,
    ) -> Follower | None:
        """Add a reader of a stream that began before; return None if its frames are kept nowhere.

        The reader begins with the event log and goes on live. If the generation ``has_ended`` and
        the log lacks the next frame, will never get its ending, or is not to be used
        (``skips_log``), the stream is rebuilt from what is stored. A gap further on in the log is
        found when it is read. If the result ``is_stored`` and is deleted before the reader has
        begun, its stream ends with an error. For threads of views. Raise RedisError.
        """
        follower = Follower(generation_id, after, grace_s)
        follower.is_stored = is_stored
        number = follower.next_number
        found = LogPosition(is_empty=True, has_ended=False)
        if not skips_log:
            found = log_position(generation_id, number)
        if has_ended and not _has_rest(generation_id, found, number):
            replay = kind_of(kind).replay
            follower.stored = None if replay is None else replay(generation_id, after)
            return None if follower.stored is None else follower
        if found.has_ended and found.next is not None and found.next < number:
            follower.offer(Batch(number, (), Ending((), 200, b"")))  # The reader has all frames.
            return follower
        follower.is_behind = True
        self._add(follower)
        if not found.has_ended:  # The generation may have; its log is closed soon after.
            try:
                follow(generation_id, self.channel)
            except BaseException:
                self.leave(follower)
                raise
        return follower

    def _add(self, follower: Follower) -> None:
        with self._lock:
            self._followers.setdefault(follower.generation_id, []).append(follower)

    def leave(self, follower: Follower) -> None:
        """Remove a reader. For any thread."""
        with self._lock:
            others = self._followers.get(follower.generation_id, [])
            if follower in others:
                others.remove(follower)
            if not others:
                self._followers.pop(follower.generation_id, None)

    def readers(self, generation_id: str) -> list[Follower]:
        """Return the followers of a stream in this process. For any thread."""
        with self._lock:
            return list(self._followers.get(generation_id, ()))

    def followed(self) -> int:
        """Return the number of followers in this process. For any thread."""
        return len(self._all_readers())

    def _all_readers(self) -> list[Follower]:
        with self._lock:
            return [f for followers in self._followers.values() for f in followers]

    async def wait_for_ending(self, generation_id: str, timeout_s: float) -> None:
        """Return when the stream of a generation has ended, or after the timeout."""
        follower = self.follow(generation_id, after=ENDING_ONLY)
        try:
            await self._register([generation_id])
            await self._catch_up([follower])  # It may have ended before this process followed.
            await follower.wait(timeout_s)
        finally:
            self.leave(follower)

    async def read_on(self, follower: Follower) -> None:
        """Read the log for a follower that ``is_behind``, up to what it may hold."""
        async with self._shared.lock(follower.generation_id):
            follower.is_behind = False
            if not self._shared.offer_to(follower):
                number = follower.next_number
                await self._catch_up([follower])
                has_read = follower.has_ended or follower.next_number > number
                if follower.is_stored and not has_read:
                    self._start_database_task(self._end_deleted, [follower])

    def ensure_running(self) -> None:
        """Start the hub's tasks on this event loop, once."""
        if not self._tasks:
            clients = new_async_clients()
            self._logs = [AsyncEventLog(client) for client in clients]
            self._tasks = [
                asyncio.create_task(self._keep_listening()),
                asyncio.create_task(self._watch()),
                asyncio.create_task(self._refresh_graces(clients[0])),
                asyncio.create_task(self._cancels.run(self._logs)),
            ]

    def cancel(self, generation_id: str) -> asyncio.Future[None]:
        """Cancel a generation; the future is done when its worker's cancel flag is stored."""
        return self._cancels.add(generation_id)

    async def _refresh_graces(self, client: redis.asyncio.Redis) -> None:
        """Extend the disconnect grace of generations that have readers here, and start the
        countdown of those that have none any more."""
        known: dict[str, int] = {}
        while True:
            await asyncio.sleep(_GRACE_INTERVAL_S)
            readers = [f for f in self._all_readers() if f.grace_s]
            read = {f.generation_id: f.grace_s for f in readers}
            begun = {f.generation_id for f in readers if f.has_begun}
            left = {id_: grace_s for id_, grace_s in known.items() if id_ not in read}
            known |= read
            if not known:
                continue
            try:
                await refresh_reader_deadlines(client, read, left, begun)
            except redis.exceptions.RedisError as exc:
                self._grace_outage.failed(exc)
            else:
                self._grace_outage.succeeded()
                known = read

    async def _keep_listening(self) -> None:
        """Listen, and subscribe again when the subscription is dead.

        Behind a load balancer a subscription may die without an error: nothing fails or comes.
        """
        listener = asyncio.create_task(self._listen())
        while True:
            await asyncio.sleep(_PROBE_AFTER_S)
            if await self._receives():
                continue
            logger.warning("hub: nothing comes through the subscription; it is renewed")
            listener.cancel()
            await asyncio.wait({listener}, timeout=_RENEW_S)
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                async with asyncio.timeout(_RENEW_S):
                    await get_channel_layer().flush()
            listener = asyncio.create_task(self._listen())

    async def _receives(self) -> bool:
        """Send a message to this channel; return False only if it was sent and does not come."""
        asked_at = time.monotonic()
        if not self._followers or asked_at - self._received_at < _PROBE_AFTER_S:
            return True
        try:
            async with asyncio.timeout(settings.REDIS_TIMEOUT_S):
                await send_hint(self.channel, ())
        except (redis.exceptions.RedisError, OSError) as exc:
            self._hint_outage.failed(exc)
            return True
        await asyncio.sleep(_PROBE_S)
        return self._received_at >= asked_at

    async def _listen(self) -> None:
        layer = get_channel_layer()
        while True:
            try:
                message = await layer.receive(self.channel)
                self._received_at = time.monotonic()
                self._hint_outage.succeeded()
                await self._dispatch(message["streams"])
            except (redis.exceptions.RedisError, OSError) as exc:
                self._hint_outage.failed(exc)
                await asyncio.sleep(_SILENCE_S)
                with contextlib.suppress(redis.exceptions.RedisError, OSError):
                    await layer.flush()  # Else it would keep the failed subscription.
            except Exception:
                logger.exception("hub: a message was dropped; its readers will read the log")
                await asyncio.sleep(_RETRY_S)

    async def _dispatch(self, streams: Iterable[tuple[str, bytes]]) -> None:
        """Offer hints (generation id, packed batch); read the log where a frame is missing."""
        behind = []
        for generation_id, payload in streams:
            followers = self.readers(generation_id)
            if not followers:
                continue
            batch = decode_hint(payload)
            reading = [f for f in followers if not f.waits_for_end]
            behind += [f for f in reading if batch is None or not f.offer(batch)]
        if behind:
            _LOG_READS.labels("gap").inc(len(behind))
            await self._catch_up(behind)

    async def _watch(self) -> None:
        """Read the log for followers that receive nothing."""
        while True:
            await asyncio.sleep(_SILENCE_S / 2)
            now = time.monotonic()
            silent = [
                f
                for f in self._all_readers()
                if now - max(f.received_at, f.checked_at) > _SILENCE_S and not f.is_full
            ]
            if not silent:
                continue
            _LOG_READS.labels("silence").inc(len(silent))
            try:
                before = [f.next_number for f in silent]
                await self._catch_up(silent)
                # Streams that went on without a hint: Redis may have lost their followers.
                await self._register(
                    {
                        f.generation_id
                        for f, number in zip(silent, before, strict=True)
                        if f.next_number > number and not f.has_ended
                    }
                )
            except Exception:
                logger.exception("hub: cannot catch up")
            vanished = [f for f in silent if now - f.received_at > _VANISHED_S]
            self._start_database_task(self._end_vanished, vanished)

    async def _register(self, generation_ids: Iterable[str]) -> None:
        """Have the hints of streams sent to this channel; if Redis fails, silence is noticed."""
        for generation_id in generation_ids:
            with contextlib.suppress(redis.exceptions.RedisError):
                await self._logs[shard_of(generation_id)].follow(generation_id, self.channel)

    async def _catch_up(self, followers: Sequence[Follower]) -> None:
        """Read the log for these followers, in one round trip for each Redis server."""
        now = time.monotonic()
        shards: dict[int, list[Follower]] = {}
        for follower in followers:
            follower.checked_at = now
            shards.setdefault(shard_of(follower.generation_id), []).append(follower)
        for shard, readers in shards.items():
            try:
                await self._read_shard(shard, readers)
            except redis.exceptions.RedisError as exc:  # The other servers may still answer.
                self._failed_at = time.monotonic()
                self._log_outages[shard].failed(exc)
            else:
                self._log_outages[shard].succeeded()

    async def _read_shard(self, shard: int, readers: list[Follower]) -> None:
        positions = [(reader.generation_id, reader.next_number) for reader in readers]
        wanted = list(dict.fromkeys(positions))
        found = dict(zip(wanted, await self._logs[shard].read_many(wanted), strict=True))
        with_gap, renumbered = [], set()
        for reader, position in zip(readers, positions, strict=True):
            batches = found[position]
            self._shared.add(reader.generation_id, batches)
            if not _offer_log(reader, batches):
                with_gap.append(reader)
                if batches and is_renumbered(batches[0].first, position[1]):
                    renumbered.add(reader)
                continue
            reader.waits_for_end = False
            if may_have_more(batches):
                reader.is_behind = True
                reader.wake()
        self._start_database_task(partial(self._end_with_gap, renumbered=renumbered), with_gap)

    def _start_database_task(
        self, act: Callable[[Sequence[Follower]], Awaitable[None]], followers: Sequence[Follower]
    ) -> None:
        """Run what needs the database for these followers, unless a task for them runs already.

        Not where logs are read: rows may be locked, and the readers of other streams go on.
        """
        wanted = [follower for follower in followers if follower not in self._in_database]
        if not wanted:
            return
        self._in_database.update(wanted)

        async def run() -> None:
            try:
                async with self._database_turns:
                    await act(wanted)
            except (redis.exceptions.RedisError, db.Error) as exc:
                logger.warning("hub: cannot catch up: %s", exc)
            except Exception:
                logger.exception("hub: cannot catch up")
            finally:
                self._in_database.difference_update(wanted)

        task = asyncio.create_task(run())
        self._database_tasks.add(task)
        task.add_done_callback(self._database_tasks.discard)

    async def _end_with_gap(
        self, readers: Sequence[Follower], renumbered: Collection[Follower]
    ) -> None:
        """End readers that miss frames, or have them wait for what will be stored.

        For those in ``renumbered`` the log holds a later attempt: the stored result will not
        continue the frames that they have.
        """
        rows = await _rows_of(readers)
        ended = {id_: row for id_, row in rows.items() if row.status in TERMINAL}
        await _replay(readers, ended)
        # The worker may have ended the log of a response that was deleted before.
        await self._end_deleted(_unread(readers))
        lost = [reader for reader in readers if not reader.has_ended]
        if not lost:
            return
        # By the same rows: what has ended since they were read is replayed the next time.
        running = [row for row in rows.values() if row.status not in TERMINAL]
        stored = await in_database_thread(partial(_stored_results, running, are_deleted=False))
        for reader in lost:
            reader.waits_for_end = reader.generation_id in stored and reader not in renumbered
        _end_lost([reader for reader in lost if not reader.waits_for_end], rows)

    async def _end_deleted(self, followers: Sequence[Follower]) -> None:
        """End the readers of results that were deleted, and their logs with them."""
        if not (rows := await _rows_of(followers, status__in=TERMINAL)):
            return
        deleted = await in_database_thread(
            partial(_stored_results, rows.values(), are_deleted=True)
        )
        for follower in followers:
            if follower.generation_id in deleted:
                first = follower.next_number
                kind = kind_of(rows[follower.generation_id].kind)
                ending = kind.failure(NotFoundError(), first=first)
                follower.offer(Batch(first, ending.frames, replace(ending, frames=())))

    async def _end_vanished(self, followers: Sequence[Follower]) -> None:
        """End the readers of generations that have ended and whose log was lost with its Redis."""
        # The row ends before the stream does. Leave time to the worker that is about to write the
        # ending, also if it could not while Redis was away.
        if time.monotonic() - self._failed_at < _CLOSING_S:
            return
        ended_by = Now() - dt.timedelta(seconds=_CLOSING_S)
        rows = await _rows_of(followers, status__in=TERMINAL, finished_at__lt=ended_by)
        ended = [follower for follower in followers if follower.generation_id in rows]
        is_lost = await self._take_writes(rows)
        await self._catch_up(ended)  # The ending may have come since the log was read.
        await _replay(ended, rows)
        await self._end_deleted(_unread(ended))
        if is_lost:
            _end_lost(ended, rows)

    async def _take_writes(self, generation_ids: Iterable[str]) -> bool:
        """Whether the event logs of these take writes: not of a replica, or with a full disk."""
        try:
            for generation_id in generation_ids:
                await self._logs[shard_of(generation_id)].follow(generation_id, self.channel)
        except redis.exceptions.RedisError as exc:
            self._failed_at = time.monotonic()
            logger.warning("hub: an event log takes no writes: %s", exc)
            return False
        return True


async def _rows_of(followers: Iterable[Follower], **states: object) -> dict[str, Generation]:
    """Return the rows of the followed generations that match ``states``, by public id."""
    ids = {follower.generation_id for follower in followers}
    if not ids:
        return {}
    columns = ("public_id", "kind", "status", "input_tokens", "output_tokens")
    rows = Generation.objects.filter(public_id__in=ids, **states).only(*columns)
    return {row.public_id: row for row in await in_database_thread(lambda: list(rows))}


def _unread(followers: Iterable[Follower]) -> list[Follower]:
    """Return the readers of stored results that have neither a frame nor an ending yet."""
    return [f for f in followers if f.is_stored and not (f.next_number or f.has_ended)]


def _stored_results(rows: Iterable[Generation], *, are_deleted: bool) -> set[str]:
    """Return the ids of those whose results an app stores, and that are or are not deleted."""
    checks = {row.public_id: kind_of(row.kind).is_deleted for row in rows}
    return {id_ for id_, check in checks.items() if check and check(id_) == are_deleted}


async def _replay(followers: Iterable[Follower], rows: Mapping[str, Generation]) -> None:
    """Offer the rest of ended streams to their readers, where the result is stored.

    The readers of one stream share the rebuilt frames.
    """
    rebuilt: dict[tuple[str, bool], Batch | None] = {}
    for follower in followers:
        id_, is_new = follower.generation_id, follower.next_number == 0
        if follower.has_ended or id_ not in rows:
            continue
        if (id_, is_new) not in rebuilt:
            make = partial(_replayed, rows[id_], may_renumber=is_new)
            rebuilt[id_, is_new] = await in_database_thread(make)
        if (batch := rebuilt[id_, is_new]) is not None:
            follower.offer(batch)


def _replayed(row: Generation, *, may_renumber: bool) -> Batch | None:
    replay = kind_of(row.kind).replay
    stored = replay(row.public_id, may_renumber=may_renumber) if replay else None
    return None if stored is None else stored.make()


def _end_lost(followers: Iterable[Follower], rows: Mapping[str, Generation]) -> None:
    """End the readers of lost streams with an error, in the wire format of their kind.

    If the generation has ended, the error carries the usage: it was computed and charged.
    """
    for follower in followers:
        row, first = rows.get(follower.generation_id), follower.next_number
        if row is None:
            continue
        error = StreamLostError()
        if row.status in TERMINAL:
            usage = (row.input_tokens, row.output_tokens)
            error = StreamLostError(usage, has_completed=row.status == Status.COMPLETED)
        ending = kind_of(row.kind).failure(error, first=first)
        follower.offer(Batch(first, ending.frames, replace(ending, frames=(), is_early=False)))


def _has_rest(generation_id: str, found: LogPosition, number: int) -> bool:
    """Whether the log of an ended generation has frame ``number`` and will have the ending."""
    if found.is_empty or (found.first is not None and found.first > number):
        return False
    if found.has_ended:
        return True
    # If it is not closed soon, the worker died before, or Redis was away for too long.
    closed_by = settings.EVENT_LOG_PATIENCE_S + _CLOSING_S
    limit = timezone.now() - dt.timedelta(seconds=closed_by)
    ended = Generation.objects.filter(public_id=generation_id, finished_at__lt=limit)
    return not ended.exists()


def _offer_log(reader: Follower, batches: Sequence[Batch]) -> bool:
    """Offer what was read from the log.

    Return False if frames before it are missing, or if the log was lost and then ended with
    numbers from 0 again.
    """
    ending = batches[-1].ending if batches else None
    if ending is not None and 0 < reader.next_number < ENDING_ONLY:
        is_renewed = ending.begins_log or batches[-1].next < reader.next_number
        if is_renewed:
            return False
    return all(map(reader.offer, batches))


hub = Hub()
"""The hub of this process."""
