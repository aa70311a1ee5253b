"""The hub: one channel for each web process, and the followers that wait on it.

Workers send the frames of every stream that this process follows to its channel. For a follower
that starts late, sees a gap, or receives nothing for a second, the event log is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import timedelta
from functools import partial

import redis.exceptions
from asgiref.sync import sync_to_async
from channels.layers import get_channel_layer
from django import db
from django.conf import settings
from django.db.models.functions import Now
from prometheus_client import Counter

from inference_site.gateway.hub.follower import ENDING_ONLY, Follower
from inference_site.gateway.hub.grace import keep_from_cancelling
from inference_site.gateway.hub.lost_streams import end_lost, replay_to, runs_of, stored_among
from inference_site.gateway.hub.shared_batches import SharedBatches
from inference_site.generations.cancel import cancel_waiting, flag_writes
from inference_site.generations.models import TERMINAL
from inference_site.storage.postgresql import release_connection_after
from inference_site.storage.redis import new_async_clients, shard_of
from inference_site.streams.batches import Batch, hinted, is_beyond
from inference_site.streams.event_log import AsyncEventLog, channel_message, is_part

logger = logging.getLogger(__name__)

_SILENCE_S = 1.0
_RETRY_S = 0.5
_LISTENS_S = 2.0
"""After this long without a message the hub sends itself one, while it has readers."""
_HEARS_S = 1.0
"""How long that message may take."""
_RENEW_S = 5.0
"""How long each step of a new subscription may take."""
_LOG_READS = Counter(
    "inference_log_reads",
    "Looks of a reader into the event log, because frames were missing or nothing came.",
    ["reason"],
)
for _reason in ("gap", "silence"):
    _LOG_READS.labels(_reason)  # Shown at 0 from the start.
_APART = 2
"""How many looks into the database for readers run at once; others use the same threads."""
_VANISHED_S = 10.0
"""After this long without a frame it is checked whether the stream's log is gone for good."""
_CLOSING_S = 5.0
"""Within this time of the end of its row a stream is ended by who ended the row."""


class Hub:
    """This process's channel and followers. ``follow`` and ``leave`` are for any thread."""

    def __init__(self) -> None:
        self.channel = f"web.{uuid.uuid4().hex}"
        self._followers: dict[str, list[Follower]] = {}
        self._logs: list[AsyncEventLog] = []
        self._shared = SharedBatches()
        self._tasks: list[asyncio.Task[None]] = []
        self._lock = threading.Lock()
        self._to_cancel: set[str] = set()
        self._cancel_wanted = asyncio.Event()
        self._stored: asyncio.Future[None] | None = None
        self._to_unqueue: set[str] = set()
        self._unqueue_wanted = asyncio.Event()
        self._apart_with: set[Follower] = set()
        self._apart_tasks: set[asyncio.Task[None]] = set()
        self._apart_turns = asyncio.Semaphore(_APART)
        self._heard_at = 0.0
        """When a message came the last time."""
        self._failed_at = 0.0
        """When an event log could not be read the last time."""

    def follow(self, generation_id: str, after: int = -1, grace_s: int = 0) -> Follower:
        """Add a reader; it sees the frames with numbers above ``after``. For any thread."""
        follower = Follower(generation_id, after, grace_s)
        with self._lock:
            self._followers.setdefault(generation_id, []).append(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        """Remove a reader. For any thread."""
        with self._lock:
            others = self._followers.get(follower.generation_id, [])
            if follower in others:
                others.remove(follower)
            if not others:
                self._followers.pop(follower.generation_id, None)

    def readers(self, generation_id: str) -> list[Follower]:
        """Return who reads this stream here. For any thread."""
        with self._lock:
            return list(self._followers.get(generation_id, ()))

    def followed(self) -> int:
        """Return how many readers there are here. For any thread."""
        return len(self._all_readers())

    async def wait_for_ending(self, generation_id: str, timeout_s: float) -> None:
        """Return when the stream of a generation has ended, or after the timeout."""
        follower = self.follow(generation_id, after=ENDING_ONLY)
        try:
            with contextlib.suppress(redis.exceptions.RedisError):  # Then silence is noticed.
                await self._logs[shard_of(generation_id)].follow(generation_id, self.channel)
            await self._catch_up([follower])  # It may have ended before this process followed.
            await follower.wait(timeout_s)
        finally:
            self.leave(follower)

    async def read_on(self, follower: Follower) -> None:
        """Read on in the log for a reader that was behind, up to what it may hold."""
        async with self._shared.turn(follower.generation_id):
            follower.is_behind = False
            if not self._shared.give(follower):
                await self._catch_up([follower])

    def _all_readers(self) -> list[Follower]:
        with self._lock:
            return [f for followers in self._followers.values() for f in followers]

    def ensure_running(self) -> None:
        """Start listening, if this loop does not already."""
        if not self._tasks:
            clients = new_async_clients()
            self._logs = [AsyncEventLog(client) for client in clients]
            self._tasks = [
                asyncio.create_task(self._keep_listening()),
                asyncio.create_task(self._watch()),
                asyncio.create_task(keep_from_cancelling(self._all_readers, clients[0])),
                asyncio.create_task(self._cancel_all()),
                asyncio.create_task(self._unqueue_all()),
            ]

    def cancel(self, generation_id: str) -> asyncio.Future[None]:
        """Ask the worker of a generation to stop it, and take it out of the queue if it waits.

        Returns at once; the future is done when the worker's side is stored. That is retried until
        it succeeds: a thousand clients may leave in one moment, or while Redis is away.
        """
        if self._stored is None:
            self._stored = asyncio.get_running_loop().create_future()
        self._to_cancel.add(generation_id)
        self._cancel_wanted.set()
        return self._stored

    async def _cancel_all(self) -> None:
        """Store what ``cancel`` was asked for, all that has come up in one go."""
        while True:
            await self._cancel_wanted.wait()
            self._cancel_wanted.clear()
            ids, stored = self._to_cancel, self._stored
            self._to_cancel, self._stored = set(), None
            # Side by side: a server that is away must not hold up the stops of the others.
            await asyncio.gather(*map(_persist, flag_writes(self._logs, ids)))
            if stored is not None:
                stored.set_result(None)
            self._to_unqueue |= ids
            self._unqueue_wanted.set()

    async def _unqueue_all(self) -> None:
        """Take out of the queue what still waits; apart, so that a slow database delays no stop."""
        while True:
            await self._unqueue_wanted.wait()
            self._unqueue_wanted.clear()
            ids, self._to_unqueue = self._to_unqueue, set()
            unqueue = sync_to_async(_cancel_queued, thread_sensitive=False)
            await _persist(partial(unqueue, ids))

    async def _keep_listening(self) -> None:
        """Listen; subscribe again when the subscription is dead.

        One behind a balancer may be dead without an error: nothing comes, and nothing fails.
        """
        listener = asyncio.create_task(self._listen())
        while True:
            await asyncio.sleep(_LISTENS_S)
            if await self._hears():
                continue
            logger.warning("hub: nothing comes through the subscription; it is renewed")
            listener.cancel()
            await asyncio.wait({listener}, timeout=_RENEW_S)
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                async with asyncio.timeout(_RENEW_S):
                    await get_channel_layer().flush()
            listener = asyncio.create_task(self._listen())

    async def _hears(self) -> bool:
        """Whether a message that is sent to this channel comes; also if none can be sent."""
        asked_at = time.monotonic()
        if not self._followers or asked_at - self._heard_at < _LISTENS_S:
            return True
        try:
            async with asyncio.timeout(settings.REDIS_TIMEOUT_S):
                await get_channel_layer().send(self.channel, channel_message(()))
        except (redis.exceptions.RedisError, OSError) as exc:
            logger.warning("hub: channel layer: %s", exc)
            return True
        await asyncio.sleep(_HEARS_S)
        return self._heard_at >= asked_at

    async def _listen(self) -> None:
        layer = get_channel_layer()
        while True:
            try:
                message = await layer.receive(self.channel)
                self._heard_at = time.monotonic()
                await self._dispatch(message["streams"])
            except (redis.exceptions.RedisError, OSError) as exc:
                logger.warning("hub: channel layer: %s", exc)
                await asyncio.sleep(_SILENCE_S)
                with contextlib.suppress(redis.exceptions.RedisError, OSError):
                    await layer.flush()  # It takes a failed subscription for a good one.
            except Exception:
                logger.exception("hub: a message was dropped; its readers will read the log")
                await asyncio.sleep(_RETRY_S)

    async def _dispatch(self, streams: Iterable[tuple[str, bytes]]) -> None:
        behind = []
        for generation_id, payload in streams:
            followers = self.readers(generation_id)
            if not followers:
                continue
            batch = hinted(payload)
            reading = [f for f in followers if not f.waits_for_end]
            behind += [f for f in reading if batch is None or not f.offer(batch)]
        if behind:
            _LOG_READS.labels("gap").inc(len(behind))
            await self._catch_up(behind)

    async def _watch(self) -> None:
        """Read the log for the followers that receive nothing."""
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
                missed = {
                    f.generation_id
                    for f, number in zip(silent, before, strict=True)
                    if f.next_number > number and not f.has_ended
                }
                await self._follow_again(missed)
            except Exception:
                logger.exception("hub: cannot catch up")
            vanished = [f for f in silent if now - f.received_at > _VANISHED_S]
            self._apart(self._end_vanished, vanished)

    async def _follow_again(self, generation_ids: Iterable[str]) -> None:
        """Have hints sent of streams that went on without: Redis may have lost their followers."""
        for generation_id in generation_ids:
            with contextlib.suppress(redis.exceptions.RedisError):
                await self._logs[shard_of(generation_id)].follow(generation_id, self.channel)

    async def _catch_up(self, followers: Sequence[Follower]) -> None:
        """Read the log for these followers, in one round trip for each server."""
        now = time.monotonic()
        shards: dict[int, list[Follower]] = {}
        for follower in followers:
            follower.checked_at = now
            shards.setdefault(shard_of(follower.generation_id), []).append(follower)
        for shard, readers in shards.items():
            try:
                await self._read_shard(shard, readers)
            except redis.exceptions.RedisError as exc:  # The others go on meanwhile.
                self._failed_at = time.monotonic()
                logger.warning("hub: event log %d: %s", shard, exc)

    async def _read_shard(self, shard: int, readers: list[Follower]) -> None:
        places = [(reader.generation_id, reader.next_number) for reader in readers]
        wanted = list(dict.fromkeys(places))
        found = dict(zip(wanted, await self._logs[shard].read_many(wanted), strict=True))
        torn, begun_anew = [], set()
        for reader, place in zip(readers, places, strict=True):
            batches = found[place]
            self._shared.note(reader.generation_id, batches)
            if not _goes_on(reader, batches):
                torn.append(reader)
                if batches and is_beyond(batches[0].first, place[1]):
                    begun_anew.add(reader)
                continue
            reader.waits_for_end = False
            if is_part(batches):
                reader.is_behind = True
                reader.wake()
        self._apart(partial(self._end_torn, begun_anew=begun_anew), torn)

    def _apart(
        self, act: Callable[[Sequence[Follower]], Awaitable[None]], followers: Sequence[Follower]
    ) -> None:
        """Do something with readers that needs the database, apart from the reading of logs.

        What is stored may be locked, and the readers of other streams do not wait for that.
        """
        wanted = [follower for follower in followers if follower not in self._apart_with]
        if not wanted:
            return
        self._apart_with.update(wanted)
        task = asyncio.create_task(self._act_apart(act, wanted))
        self._apart_tasks.add(task)
        task.add_done_callback(self._apart_tasks.discard)

    async def _act_apart(
        self, act: Callable[[Sequence[Follower]], Awaitable[None]], followers: Sequence[Follower]
    ) -> None:
        try:
            async with self._apart_turns:
                await act(followers)
        except (redis.exceptions.RedisError, db.Error) as exc:
            logger.warning("hub: cannot catch up: %s", exc)
        except Exception:
            logger.exception("hub: cannot catch up")
        finally:
            self._apart_with.difference_update(followers)

    async def _end_torn(self, torn: Sequence[Follower], begun_anew: Collection[Follower]) -> None:
        """End readers that miss frames, or have them wait for what will be stored.

        The log of those in ``begun_anew`` holds a later attempt: what will be stored does not
        continue what they have.
        """
        await replay_to(torn, await runs_of(torn, status__in=TERMINAL))
        lost = [reader for reader in torn if not reader.has_ended]
        runs = await runs_of(lost)
        stored = await stored_among(runs)
        for reader in lost:
            is_stored = reader.generation_id in stored
            reader.waits_for_end = is_stored and reader not in begun_anew
        end_lost([reader for reader in lost if not reader.waits_for_end], runs)

    async def _end_vanished(self, followers: Sequence[Follower]) -> None:
        """End the readers of generations that are over and whose log was lost with its Redis."""
        # The row ends first. The worker that is about to write the ending is not interrupted here,
        # also if it could not while Redis was away.
        if time.monotonic() - self._failed_at < _CLOSING_S:
            return
        ended_by = Now() - timedelta(seconds=_CLOSING_S)
        runs = await runs_of(followers, status__in=TERMINAL, finished_at__lt=ended_by)
        over = [follower for follower in followers if follower.generation_id in runs]
        await self._catch_up(over)  # The end may have come between the two looks.
        await replay_to(over, runs)
        end_lost(over, runs)


def _goes_on(reader: Follower, batches: Sequence[Batch]) -> bool:
    """Offer what was read; False when frames before it are missing, or it ends a stream of which
    the log was lost: who ended it began to number anew."""
    last = batches[-1] if batches else None
    if last is not None and last.ending is not None and 0 < reader.next_number < ENDING_ONLY:
        is_anew = last.ending.begins_log or last.next < reader.next_number
        if is_anew:
            return False
    return all(map(reader.offer, batches))


async def _persist(act: Callable[[], Awaitable[None]]) -> None:
    """Do it, and do it again while a server is away."""
    while True:
        try:
            await act()
        except (redis.exceptions.RedisError, db.Error) as exc:
            logger.warning("hub: cannot cancel yet: %s", exc)
            await asyncio.sleep(_RETRY_S)
        except Exception:
            logger.exception("hub: cannot cancel")
            return
        else:
            return


def _cancel_queued(ids: set[str]) -> None:
    with release_connection_after():
        cancel_waiting(ids)


hub = Hub()
"""The hub of this process."""
