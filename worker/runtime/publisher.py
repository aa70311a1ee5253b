"""The publisher: takes frames from the engine's threads and appends them to the event log in ticks.

One thread with an asyncio loop serves all streams of the process, with one shard for each event log
server. The first and the last frames of a stream are flushed at once, without the other waiting
streams; the frames between are flushed in ticks. A tick is one append for any number of streams,
then one channel-layer message for each web process that follows any of them. The append also
returns the cancel flags, so a cancel needs no channel of its own and cannot be lost.

A stream keeps the frames that it has sent. If Redis loses its log, the stream sends all of them
again: its readers continue, and recovery finds its text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from enum import Enum

import redis.exceptions
from django.conf import settings

from inference_site.core.observability.metrics import EVENT_LOG_LAG
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.redis import new_async_clients, shard_of
from inference_site.runs.streams.batches import Batch, Ending
from inference_site.runs.streams.event_log import (
    Appended,
    AsyncEventLog,
    LogState,
    Write,
    send_hint,
)

logger = logging.getLogger(__name__)

TICK_S = 0.03
"""The shortest time from one tick to the next. A tick interrupts the threads of models that compute
on this host's processors."""
_LONGEST_TICK_S = 0.1
_LATE_S = 0.02
"""How long after a tick is due the timer starts it; before that, the next frame does. The event
loop of the upstreams brings frames every 20 ms, and those that start a tick do not wait for it."""
_PAUSE_FACTOR = 9
"""The pause after a tick is this many times as long as the tick: ticks use a tenth of the time."""
_POLL_S = 0.1
"""How often a stream without new frames reads whether it was cancelled."""
_RETRY_S = 0.2
_SEND_TIMEOUT_S = 2.0
_MAX_BATCH_BYTES = 256 * 1024
"""Bytes of a batch of several frames, because readers hold whole batches in memory."""
_MAX_KEPT_BYTES = 2 * 1024 * 1024
_MAX_KEPT_BYTES_OF_ALL = 32 * 1024 * 1024
"""Bytes of sent frames that one stream, and all streams of a shard, keep to send again."""


class StopReason(Enum):
    """Why a run is stopped."""

    REQUESTED = "requested"  # The client left, or the generation was cancelled.
    SHUTDOWN = "shutdown"  # The worker drains, and the time for that is over.
    LOST = "lost"  # Another process ended the stream, or its log is unreachable.


class Stream:
    """The outgoing frames of one generation. The engine's thread calls ``append`` and ``close``.

    ``cancelled`` becomes true when the engine must stop; ``stop_reason`` is the reason.
    """

    def __init__(self, generation_id: str, shard: _Shard, attempt: int = 1) -> None:
        self.id, self.attempt = generation_id, attempt
        self.cancelled = False
        self.stop_reason: StopReason | None = None
        self.opened_at = time.monotonic()
        self.asked_at = self.opened_at
        """When the publisher last wrote to the log, and so read whether the stream is cancelled."""
        self._shard = shard
        self._pending: list[bytes] = []
        self._ending: Ending | None = None
        self._unacknowledged: Batch | None = None
        self._has_more = self._is_closing = False
        self._next = 0
        self.texts: Sequence[bytes] = ()
        """The texts in the log that frames refer to (see ``runs.streams.batches``)."""
        self._started = self._is_released = False
        self._sent: list[bytes] | None = []
        """All frames in the log; None if they are not kept."""
        self.sent_bytes = 0
        self.is_urgent = False
        """Whether the first frames or the end are to be sent, which do not wait for the tick."""
        self.waiting_since: float | None = None
        """When the oldest frame that is not in the log was appended; for the metrics."""

    def stop(self, reason: StopReason) -> None:
        """Stop the engine; the first reason counts."""
        if not self.cancelled:
            self.stop_reason = reason
            self.cancelled = True

    def start_at(
        self, number: int, texts: Sequence[bytes] = (), sent: Sequence[bytes] = ()
    ) -> None:
        """Continue a stream: the frames before ``number``, and these texts, are in the log.

        ``sent`` are these frames, if they are known.
        """
        self._next, self.texts = number, texts
        if len(sent) == number:
            self._keep(sent)
        else:
            self._keep_nothing()

    @property
    def is_cut_off(self) -> bool:
        """Whether the server of its log does not answer."""
        return self._shard.is_down

    @property
    def is_begun(self) -> bool:
        """Whether it has frames, its own or those of an earlier attempt."""
        return self._started or bool(self._next)

    @property
    def can_resend(self) -> bool:
        """Whether its log has frames, and all of them are kept."""
        return bool(self._sent)

    def _keep(self, frames: Sequence[bytes]) -> None:
        if self._sent is None:
            return
        size = sum(map(len, frames))
        self._sent.extend(frames)
        self.sent_bytes += size
        is_over_limit = self.sent_bytes > _MAX_KEPT_BYTES
        if is_over_limit or self._shard.sent_bytes > _MAX_KEPT_BYTES_OF_ALL:
            self._keep_nothing()

    def _keep_nothing(self) -> None:
        self._sent, self.sent_bytes = None, 0

    def send_again(self) -> None:
        """Send all frames again, because the log is lost, and its texts with it."""
        unacknowledged = self._unacknowledged.frames if self._unacknowledged else ()
        self._pending[:0] = [*(self._sent or ()), *unacknowledged]
        self._sent, self.sent_bytes = [], 0
        self._unacknowledged, self._next, self.texts = None, 0, ()
        self._hurry()

    def release(self) -> None:
        """Leave the stream open for another attempt; the appended frames are still sent."""
        self._is_released = True
        self._hurry()

    def append(self, frames: Sequence[bytes]) -> None:
        """Send frames with the next tick, the very first ones at once."""
        self._note_waiting()  # First, because the publisher may take them before the next line.
        self._pending.extend(frames)
        if not self._started:
            self._started = True
            self._hurry()
        elif self._shard.is_due:
            self._shard.wake()

    @property
    def is_pending(self) -> bool:
        """Whether it has frames that are not in the log."""
        return bool(self._pending) or self._unacknowledged is not None

    def close(self, ending: Ending) -> None:
        """Send the end at once. Nothing may be appended afterwards."""
        self._note_waiting()
        self._ending = ending
        self._hurry()

    def _hurry(self) -> None:
        self.is_urgent = True
        self._shard.wake()

    def _note_waiting(self) -> None:
        if self.waiting_since is None:
            self.waiting_since = time.monotonic()

    def take(self) -> Batch | None:
        """Return the next batch, the same one until ``acknowledge``; None if there is none."""
        if self._unacknowledged is not None:
            return self._unacknowledged
        ending = self._ending  # Read first, because nothing is appended once it is set.
        if ending is not None and not self._is_closing:
            self._is_closing = True
            self._pending.extend(ending.frames)
        # Each step is atomic under the GIL, so the engine's thread may append between them.
        frames = self._pending[:]
        if not frames and ending is None:
            return None
        count = len(frames)
        # An error that becomes an HTTP status must arrive as one batch.
        if ending is None or not ending.is_early:
            size = 0
            for number, frame in enumerate(frames):
                size += len(frame)
                if size > _MAX_BATCH_BYTES and number:
                    count = number
                    break
        del self._pending[:count]
        self._has_more = count < len(frames)
        batch = Batch(self._next, frames[:count], None if self._has_more else ending)
        self._next, self._unacknowledged = batch.next, batch
        return batch

    def acknowledge(self) -> None:
        """Record that the batch that ``take`` returned is in the log."""
        if self._unacknowledged is not None:
            self._keep(self._unacknowledged.frames)
            if self._has_more:
                self._shard.wake()
        self._unacknowledged = None
        self.waiting_since = time.monotonic() if self._pending else None

    @property
    def is_drained(self) -> bool:
        """Whether it was released and all of its frames are in the log."""
        return self._is_released and not self.is_pending


class Publisher:
    """The thread of the publisher, its event loop and its shards."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._shards = [_Shard(self._loop) for _ in settings.EVENT_LOG_URLS]
        self._thread = threading.Thread(target=self._main, name="publisher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Send the remaining frames, then end the thread."""
        for shard in self._shards:
            shard.stop()
        self._thread.join(timeout_s)

    def open(self, generation_id: str, attempt: int = 1) -> Stream:
        """Open the stream of an attempt; stop an earlier attempt of the same generation."""
        return self._shards[shard_of(generation_id)].open(generation_id, attempt)

    @property
    def lag_s(self) -> float:
        """Age of the oldest frame that is not in the log yet, in seconds."""
        since = [s.waiting_since for shard in self._shards for s in shard.streams()]
        return max((time.monotonic() - at for at in since if at is not None), default=0.0)

    def stop_all(self) -> None:
        """Stop all runs of this process, because it shuts down."""
        for shard in self._shards:
            shard.stop_all()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
        finally:
            self._loop.close()

    async def _run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(c) for c in new_async_clients()]
            logs = [AsyncEventLog(client) for client in clients]
            # Connect now, with an empty append and message, so that no first frame waits for it.
            with contextlib.suppress(redis.exceptions.RedisError):
                await asyncio.gather(*(log.append(()) for log in logs))
                await send_hint(f"worker.{uuid.uuid4().hex}", ())
            await asyncio.gather(
                *(shard.run(log) for shard, log in zip(self._shards, logs, strict=True))
            )


class _Shard:
    """The streams whose logs are on one server. A server that is down delays its own shard only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[str, Stream] = {}
        self._wanted = asyncio.Event()
        self._stopping = False
        self._tick_s, self._tick_at = TICK_S, 0.0
        self._ticks = False
        """Whether the next tick comes by itself; not while no stream has frames."""
        self._had_frames = self._is_woken = False
        self._rests_until = 0.0
        self._is_idle = False
        """Whether the loop may wait without a tick: no stream is open, and ``open`` wakes it."""
        self._down_since: float | None = None
        self._log_outage = OutageLog(logger, "publisher: event log")
        self._hint_outage = OutageLog(logger, "publisher: channel layer")
        self.sent_bytes = 0
        """Bytes of the frames that its streams keep, as of the last tick."""

    def open(self, generation_id: str, attempt: int) -> Stream:
        # A process that was frozen may claim a generation again that it still runs.
        if (earlier := self._streams.get(generation_id)) is not None:
            earlier.stop(StopReason.LOST)
        stream = self._streams[generation_id] = Stream(generation_id, self, attempt)
        if self._is_idle:
            self.wake()
        return stream

    def _forget(self, stream: Stream) -> None:
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id]

    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    @property
    def is_down(self) -> bool:
        """Whether the last command has failed."""
        return self._down_since is not None

    @property
    def is_due(self) -> bool:
        """Whether ``append`` must wake it: the next tick is due, or none comes by itself."""
        if self._is_woken:
            return False
        return not self._ticks or time.monotonic() >= self._tick_at

    def wake(self) -> None:
        """Flush now rather than at the next tick. Thread-safe."""
        self._is_woken = True
        with contextlib.suppress(RuntimeError):  # The publisher has stopped.
            self._loop.call_soon_threadsafe(self._wanted.set)

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    def stop_all(self) -> None:
        for stream in self.streams():
            stream.stop(StopReason.SHUTDOWN)

    async def run(self, log: AsyncEventLog) -> None:
        """Flush until the publisher is stopped and no stream is open."""
        self._log = log
        while self._streams or not self._stopping:
            is_tick = await self._pause()
            try:
                await self._flush(is_tick=is_tick)
            except redis.exceptions.RedisError as exc:
                await self._on_unreachable(exc)
            except Exception:
                logger.exception("publisher: flush failed")
                await asyncio.sleep(_RETRY_S)

    async def _pause(self) -> bool:
        """Wait for the next tick or ``wake``; with no stream open, only for ``wake``.

        Streams whose prompts are read have no frames for seconds: then the next tick is when the
        first of them must read its cancel flag, as ticks take time from the engine's threads.
        Return whether it is time for a tick. After a flush, urgent frames wait as long as that
        flush took, so that under load several requests share a flush.
        """
        tick = None
        # All are set before the streams are read: ``open`` adds a stream, and ``append`` adds
        # frames, and then reads them.
        self._is_idle, self._ticks, self._is_woken = True, False, False
        streams = self.streams()
        self._is_idle = not streams
        if streams:  # Not wait_for, which creates a task.
            self._ticks = self._had_frames or any(stream.is_pending for stream in streams)
            at = self._tick_at + _LATE_S
            if not self._ticks:
                at = max(at, min(stream.asked_at for stream in streams) + _POLL_S)
            tick = self._loop.call_later(at - time.monotonic(), self._wanted.set)
        await self._wanted.wait()
        if tick is not None:
            tick.cancel()
        if (rest_s := self._rests_until - time.monotonic()) > 0:
            await asyncio.sleep(rest_s)
        self._wanted.clear()
        return time.monotonic() >= self._tick_at

    async def _flush(self, *, is_tick: bool) -> None:
        """Send the urgent streams, and at a tick all of them."""
        started = time.monotonic()
        if is_tick:
            self._tick_at = started + self._tick_s
        writes = self._due(started, is_tick=is_tick)
        if is_tick:
            self._had_frames = any(batch is not None for _, batch, _ in writes)
        if not writes:
            return
        answers = await self._log.append(
            [
                Write(
                    stream.id,
                    batch.entry_id if batch else b"",
                    payload,
                    stream.attempt,
                    is_refusal=bool(batch and batch.ending and batch.ending.is_early),
                    goes_on=stream.can_resend,
                )
                for stream, batch, payload in writes
            ]
        )
        self._down_since = None
        self._log_outage.succeeded()
        # One value for each append, for its oldest frame. A frame that came while the batch before
        # it was acknowledged has no time, and has not waited.
        now = time.monotonic()
        since = [stream.waiting_since or now for stream, batch, _ in writes if batch is not None]
        if since:
            EVENT_LOG_LAG.observe(now - min(since))
        messages: dict[str, list[tuple[str, bytes]]] = {}
        for (stream, batch, payload), answer in zip(writes, answers, strict=True):
            self._note_answer(stream, batch, answer)
            if batch is not None and answer.state not in (LogState.CLOSED, LogState.LOST):
                for channel in answer.followers:
                    messages.setdefault(channel, []).append((stream.id, payload))
        if messages:
            await asyncio.gather(*(self._send(*message) for message in messages.items()))
        # Ticks become longer with their work, because many tokens in one append cost less each.
        ended = time.monotonic()
        spent_s = ended - started
        self._rests_until = ended + min(spent_s, TICK_S)
        if is_tick:
            self._tick_s = min(max(TICK_S, _PAUSE_FACTOR * spent_s), _LONGEST_TICK_S)
            self._tick_at = ended + self._tick_s

    def _due(self, now: float, *, is_tick: bool) -> list[tuple[Stream, Batch | None, bytes]]:
        """Return the streams with frames to send, and those that must read their cancel flag."""
        writes: list[tuple[Stream, Batch | None, bytes]] = []
        streams = self.streams()
        if is_tick:
            self.sent_bytes = sum(stream.sent_bytes for stream in streams)
        for stream in streams:
            if not (is_tick or stream.is_urgent):
                continue
            stream.is_urgent = False  # Before its frames are taken: it may become urgent again.
            batch = stream.take()
            if stream.is_drained:
                self._forget(stream)
                continue
            if batch is None and now - stream.asked_at < _POLL_S:
                continue
            stream.asked_at = now
            writes.append((stream, batch, batch.pack(stream.texts) if batch else b""))
        return writes

    def _note_answer(self, stream: Stream, batch: Batch | None, answer: Appended) -> None:
        if answer.state == LogState.LOST:
            logger.warning("publisher: the log of %s is lost; it is sent again", stream.id)
            stream.send_again()
            return
        stream.acknowledge()
        if answer.state == LogState.CLOSED:
            stream.stop(StopReason.LOST)
        elif answer.state == LogState.CANCELLED:
            stream.stop(StopReason.REQUESTED)
        if batch is not None and batch.ending is not None:
            self._forget(stream)

    async def _send(self, channel: str, streams: list[tuple[str, bytes]]) -> None:
        """Send a hint to the followers. If it is lost, they read the log within a second."""
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await send_hint(channel, streams)
        except (redis.exceptions.RedisError, TimeoutError) as exc:
            self._hint_outage.failed(exc)
        else:
            self._hint_outage.succeeded()

    async def _on_unreachable(self, error: redis.exceptions.RedisError) -> None:
        """Keep the frames and retry; give up a stream after ``EVENT_LOG_PATIENCE_S``.

        That counts from when the stream was opened, if the server was away before.
        """
        now = time.monotonic()
        since = self._down_since = self._down_since or now
        self._log_outage.failed(error)
        for stream in self.streams():
            if now - max(since, stream.opened_at) > settings.EVENT_LOG_PATIENCE_S:
                stream.stop(StopReason.LOST)
                self._forget(stream)
        await asyncio.sleep(_RETRY_S)
