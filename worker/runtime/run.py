"""One attempt of one generation, from its claim to its terminal event.

claim → document → engine → assembler → publisher → final row → terminal event
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import redis.exceptions
from django.conf import settings
from django.db import DatabaseError
from django.utils import timezone

from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.deltas import Delta, Finish, PromptProgress, Usage, is_output
from inference_site.domain.errors import (
    ConnectionLost,
    DocumentLost,
    EngineError,
    GenerationFailed,
    InvalidRequest,
    ModelServerLost,
    ModelServerUnreachable,
    ShuttingDown,
    StreamLost,
)
from inference_site.domain.model_spec import Price
from inference_site.domain.request import GenerationRequest
from inference_site.generations.kinds import Assembler, Kind, kind_of, recovered
from inference_site.generations.models import Claim, Generation, Status
from inference_site.generations.wake_ups import send_wake_up
from inference_site.kept_content.keeping import Keeper, keeper_for
from inference_site.observability.logs import log_fields
from inference_site.observability.metrics import Meter
from inference_site.observability.tracing import Span, start_span
from inference_site.storage.postgresql import (
    DATABASE_UNAVAILABLE,
    is_timeout,
    release_connection_after,
    transaction_with_timeouts,
)
from inference_site.streams.batches import Sent, sent_so_far
from inference_site.streams.ending import Ending
from inference_site.streams.event_log import read_log
from inference_site.streams.request_documents import Document, Loaded, ToStore, load_document
from worker.engines.base import Engine
from worker.media.resolve import has_images, resolve_media
from worker.runtime.custom_calls import CustomCalls
from worker.runtime.hooks import HookContext, Hooks, hooks_for
from worker.runtime.publisher import StopReason, Stream
from worker.runtime.truncation import start_truncating
from worker.runtime.written_calls import WrittenCalls, may_write_calls

logger = logging.getLogger(__name__)

_SERVER_LOST = (ConnectionLost, ModelServerUnreachable, ModelServerLost)
_RETRY_S = 0.5
_HELD_UP_S = 60.0
"""Seconds that the end of a run waits for a locked row or table; after that, the check for orphans
ends the run."""
_FIRST_WAIT_MS = 500
"""How long an end that is stored with its answer waits for a lock while its run has its slot."""
_COMMITS = threading.BoundedSemaphore(8)
"""How many ends are written at once: of a thousand runs that end in one moment, the others would
only wait for a connection, give up and ask again, and leave no time for the lease."""
_STORING_COMMITS = threading.BoundedSemaphore(4)
"""The same for ends that are stored with their answers: while the tables of these are locked, the
ends of other runs need not wait."""

Later = Callable[[Callable[[], None]], bool]
"""Runs a function on another thread, after the run has left its slot. False if it does not."""


def never_later(_: Callable[[], None]) -> bool:
    """Run nothing later: an end that has to wait keeps its slot."""
    return False


class _HeldUp(Exception):
    """A row or table is locked, and has been for too long."""


class _Deferred(Exception):
    """The end will be stored on another thread."""


class Run:
    """Drives the engine; the sink of its deltas."""

    def __init__(self, claim: Claim, stream: Stream, later: Later = never_later) -> None:
        self._claim, self._stream = claim, stream
        self._later, self._is_late = later, False
        self._assembler: Assembler | None = None
        self._store: ToStore | None = None
        self._usage, self._pieces = Usage(), 0
        self._first_token_at: dt.datetime | None = None
        self._output_since: float | None = None
        self._unfinished = 1
        self._hooks: Hooks | None = None
        self._written_calls: WrittenCalls | None = None
        self._custom_calls: CustomCalls | None = None
        self._keeper: Keeper | None = None
        self._meter = Meter(claim.model, claim.attempt, claim.waited_s)
        self._span = Span()

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now (see ``Sink``)."""
        return self._stream.cancelled

    @property
    def output_s(self) -> float:
        """For how long the engine has given output, in seconds."""
        return 0.0 if self._output_since is None else time.monotonic() - self._output_since

    def feed(self, delta: Delta) -> None:
        """Turn a delta into frames and hand them to the publisher (see ``Sink``)."""
        if isinstance(delta, Usage):
            self._usage = delta
        elif not isinstance(delta, PromptProgress):
            self._note(delta)
        for piece in (delta,) if self._written_calls is None else self._written_calls.take(delta):
            self._take(piece)

    def _take(self, delta: Delta) -> None:
        for piece in (delta,) if self._custom_calls is None else self._custom_calls.take(delta):
            self._pass_on(piece)

    def _note(self, delta: Delta) -> None:
        if self._first_token_at is None:
            self._first_token_at = timezone.now()
            self._output_since = time.monotonic()
        if isinstance(delta, Finish):
            self._unfinished -= 1
        else:
            self._meter.tick()
            self._pieces += is_output(delta)

    def _pass_on(self, delta: Delta) -> None:
        passed = delta if self._hooks is None else self._hooks.pass_on(delta)
        assert self._assembler is not None
        if self._keeper is not None and passed is not None:
            self._keeper.take(passed)
        if passed is not None and (frames := self._assembler.feed(passed)):
            self._stream.append(frames)

    @property
    def _kind(self) -> Kind[Any]:
        return kind_of(self._claim.kind)

    def start(self, engine: Engine, ended: Callable[[Exception | None], None]) -> bool:
        """Have the engine answer. Return False when all is over, and a terminal state is stored.

        A terminal state that has to wait for a lock is stored ``later``.

        Return True when the engine goes on by itself: it calls ``ended`` (see ``Engine.start``),
        and then ``end`` is to be called with the same argument. Never raises.
        """
        error: Exception | None = None
        with self._logged():
            try:
                if self._begin(engine, ended):
                    return True
            except Exception as exc:  # noqa: BLE001  # The boundary: ``end`` logs and answers it.
                error = exc
        self.end(error)
        return False

    def end(self, error: Exception | None) -> None:
        """Leave a terminal state, whatever it is; ``error`` is what the engine raised, if it did.

        Never raises.
        """
        with self._logged():
            try:
                if self._written_calls is not None:
                    for piece in self._written_calls.rest():
                        self._take(piece)
                self._count_pieces()
                if error is not None and not self._was_stopped(error):
                    raise error
                assert self._assembler is not None
                status, ending = self._ended(self._assembler)
            except (*_SERVER_LOST, ShuttingDown, StreamLost) as exc:
                if self._may_be_repeated(exc) and self._give_back(exc):
                    self._span.end("given back")
                    return
                status, ending = Status.FAILED, self._failure(exc)
            except Exception as exc:  # noqa: BLE001  # The boundary: it is logged and answered.
                self._log(exc)
                status, ending = Status.FAILED, self._failure(exc)
            self._finish(status, ending)

    def _count_pieces(self) -> None:
        """Count no less than was made of an answer that has not ended."""
        if self._unfinished and self._pieces > self._usage.output_tokens:
            self._usage = replace(self._usage, output_tokens=self._pieces)
            assert self._assembler is not None
            self._assembler.feed(self._usage)

    def _was_stopped(self, error: Exception) -> bool:
        """Whether somebody has stopped what the end of its model's process has ended."""
        is_asked = self._stream.stop_reason == StopReason.REQUESTED
        return is_asked and isinstance(error, _SERVER_LOST)

    def _may_be_repeated(self, error: Exception) -> bool:
        """Whether it may be begun anew: in the background, and what waits for a server that went
        away before it has said anything."""
        if self._claim.may_restart or not isinstance(error, ModelServerUnreachable):
            return self._claim.may_restart
        is_new = self._first_token_at is None and settings.SERVER_WAIT_S > 0
        return is_new and self._claim.has_attempts_left

    def _logged(self) -> AbstractContextManager[None]:
        claim = self._claim
        return log_fields({"request_id": claim.request_id, "generation_id": claim.public_id})

    def _give_back(self, error: Exception) -> bool:
        """Have a generation in the background begun anew; False if it is ours no more.

        One that may have ended the process of its model is isolated the last time; what somebody
        has stopped does not count as an attempt. If PostgreSQL does not take that, who looks for
        orphans, or for dead workers, does it.
        """
        self._stream.release()
        claim = self._claim
        is_suspect = isinstance(error, _SERVER_LOST) and error.is_suspect
        try:
            with release_connection_after(), transaction_with_timeouts():
                is_waiting = Generation.objects.requeue(
                    claim.public_id,
                    claim.worker,
                    claim.attempt,
                    isolated=is_suspect and claim.is_last_but_one,
                    spared=not is_suspect,
                )
            if is_waiting and isinstance(error, _SERVER_LOST):
                with suppress(redis.exceptions.RedisError):  # Maintenance sends another.
                    send_wake_up(claim.model)
            return is_waiting
        except DATABASE_UNAVAILABLE as exc:
            logger.warning("generation %s: cannot give it back: %s", claim.public_id, exc)
            return True

    def _begin(self, engine: Engine, ended: Callable[[Exception | None], None]) -> bool:
        """Start the engine; return whether it goes on. Raise what the generation fails with."""
        claimed_at_s = time.time()
        found, document = self._load()
        self._begin_span(document.traceparent, claimed_at_s)
        self._send_opening(self._prepare(document), found)
        if found.is_cancelled:
            self._stream.stop(StopReason.REQUESTED)
            return False
        if engine.blocks or not has_images(document.request):
            return start_truncating(engine, resolve_media(document.request), self, ended)
        # To fetch takes seconds, which the few threads that begin and end such runs do not have.
        arguments = (engine, document.request, ended)
        threading.Thread(target=self._begin_with_media, args=arguments, daemon=True).start()
        return True

    def _begin_with_media(
        self,
        engine: Engine,
        request: GenerationRequest,
        ended: Callable[[Exception | None], None],
    ) -> None:
        with self._logged():
            try:
                goes_on = start_truncating(engine, resolve_media(request), self, ended)
            except Exception as exc:  # noqa: BLE001  # The boundary: ``end`` logs and answers it.
                ended(exc)
            else:
                if not goes_on:
                    ended(None)

    def _load(self) -> tuple[Loaded[Any], Document[Any]]:
        """Return what is kept of the request, its document made anew if that is lost and can be."""
        claim, kind = self._claim, self._kind
        found = self._found()
        document = found.document
        if document is None and kind.rebuild is not None:
            with release_connection_after():
                document = kind.rebuild(claim.public_id)
        if document is None:
            raise DocumentLost
        return found, document

    def _found(self) -> Loaded[Any]:
        """Return what Redis has of the request. Raise StreamLost when that is away for too long."""
        claim, began = self._claim, time.monotonic()
        while True:
            try:
                return load_document(claim.public_id, self._kind.assembly, claim.attempt)
            except redis.exceptions.RedisError as exc:
                if self._stream.stop_reason == StopReason.SHUTDOWN:
                    raise ShuttingDown from exc
                waited_s = time.monotonic() - began
                if self._stream.cancelled or waited_s > settings.EVENT_LOG_PATIENCE_S:
                    raise StreamLost from exc
                logger.warning("generation %s: no document yet: %s", claim.public_id, exc)
                time.sleep(_RETRY_S)

    def _begin_span(self, parent: str, claimed_at_s: float) -> None:
        """Begin the span of the run, after one that shows how long it has waited."""
        claim = self._claim
        wait = start_span("queue wait", "internal", parent, claimed_at_s - claim.waited_s)
        wait.end(at_s=claimed_at_s)
        self._span = start_span(
            f"run {claim.kind}",
            "consumer",
            parent,
            claimed_at_s,
            model=claim.model,
            generation_id=claim.public_id,
            request_id=claim.request_id,
            attempt=claim.attempt,
            worker=claim.worker,
        )

    def _prepare(self, document: Document[Any]) -> Assembler:
        """Set up what the deltas go through; return the assembler, which is the last of it."""
        claim, request = self._claim, document.request
        self._assembler = assembler = self._kind.assembler(document.assembly)
        self._store, self._unfinished = document.store, request.answers
        if document.store is None and not document.assembly.is_stored:
            self._keeper = keeper_for(claim.public_id, request)
        self._hooks = hooks_for(HookContext(claim.public_id, claim.kind, request.model))
        if may_write_calls(request):
            parallel = request.parallel_tool_calls
            self._written_calls = WrittenCalls(request.tools, parallel=parallel)
        if any(tool.is_custom for tool in request.tools):
            self._custom_calls = CustomCalls(request.tools)
        return assembler

    def _send_opening(self, assembler: Assembler, found: Loaded[Any]) -> None:
        """Send what comes before the first delta, after the frames that were sent before."""
        opening: list[bytes] = []
        sent = found.sent
        # One in the foreground is only begun anew when nothing was sent.
        may_lack = self._claim.background and self._claim.attempt > 1
        if not sent.frames and (sent.next or may_lack):
            sent = sent.beyond()
        if sent.next:
            self._stream.start_at(sent.next, found.texts if sent.frames else (), sent.frames)
            opening += assembler.restart(sent)
        opening += assembler.begin()
        if opening:
            self._stream.append(opening)

    def _ended(self, assembler: Assembler) -> tuple[Status, Ending]:
        """Return the end of an answer, once the engine has returned. Raise if it is a failure."""
        if not self._unfinished:
            if self._hooks is not None:
                self._hooks.done()
            return Status.COMPLETED, assembler.complete()
        if not self._stream.cancelled:
            raise GenerationFailed("The engine ended without finishing its answer.")
        match self._stream.stop_reason:
            case StopReason.SHUTDOWN:
                raise ShuttingDown
            case StopReason.LOST:
                raise StreamLost
            case _:
                return Status.CANCELLED, assembler.cancel()

    def _failure(self, error: Exception) -> Ending:
        """Return the ending of a failure, whatever goes wrong while it is put into words."""
        try:
            return self._failed(error)
        except Exception:
            logger.exception("generation %s: no words for its failure", self._claim.public_id)
            return Ending((), 500, b"", error_code="server_error")

    def _failed(self, error: Exception) -> Ending:
        kind, first = self._kind, 0
        if self._assembler is None and kind.recover is not None:
            sent = self._sent()
            with release_connection_after():
                self._assembler, first = recovered(kind, self._claim.public_id, sent)
            self._stream.start_at(first)
        if self._assembler is not None:
            return self._assembler.fail(error)
        return kind.failure(error, first=first)

    def _sent(self) -> Sent:
        """Return what was sent before this attempt; nothing while Redis is away."""
        try:
            return sent_so_far(read_log(self._claim.public_id))
        except redis.exceptions.RedisError:
            return Sent()

    def _log(self, error: Exception) -> None:
        """Log what is not the client's fault; the traceback only of what nobody foresaw."""
        if isinstance(error, InvalidRequest):
            return
        traceback = None if isinstance(error, EngineError) else error
        logger.error("generation %s: %s", self._claim.public_id, error, exc_info=traceback)

    def _finish(self, status: Status, ending: Ending) -> None:
        """Commit the final row, then send the end: who sees it may rely on what is stored."""
        try:
            held = self._committed(status, ending)
        except _Deferred:
            return
        except _HeldUp:
            # Not even a failure can be stored. Who looks for orphans ends it, when it can.
            logger.exception("generation %s: its row is locked; it is left", self._claim.public_id)
            self._stream.release()
            self._span.end("left")
            return
        except DatabaseError:
            # The stored response is ended by maintenance, without what was refused.
            logger.exception("generation %s: its end was refused", self._claim.public_id)
            status, ending = Status.FAILED, self._failure(GenerationFailed("It cannot be stored."))
            self._assembler = None
            held = self._committed(status, ending)
        if held:  # What was taken away is counted by who took it, who also ends its stream.
            self._meter.end(self._claim.kind, status, ending.error_code, self._usage)
            self._stream.close(ending)
        else:
            logger.warning("generation %s was taken away meanwhile", self._claim.public_id)
            self._stream.release()
        self._tell(status, ending)  # The client does not wait for this.
        if held and self._keeper is not None:
            self._keeper.save()

    def _committed(self, status: Status, ending: Ending) -> bool:
        """Commit the end; return False if the generation is not this worker's any more.

        While PostgreSQL is down this waits: a client that waits is better than one that has seen an
        end that is not stored. Raise DatabaseError when it refuses what is to be stored, _Deferred
        when somebody has locked the row or a table and the end is stored later, and _HeldUp when
        that has gone on for ``_HELD_UP_S``.
        """
        is_repeated, began = self._is_late, time.monotonic()
        while True:
            try:
                with _STORING_COMMITS if self._stores else _COMMITS:
                    is_committed = self._commit(status, ending)
                return is_committed or (
                    is_repeated and Generation.objects.has_ended(self._claim, status)
                )
            except DATABASE_UNAVAILABLE as exc:
                logger.warning("generation %s: cannot finish: %s", self._claim.public_id, exc)
                if is_timeout(exc):
                    if time.monotonic() - began > _HELD_UP_S:
                        raise _HeldUp from exc
                    finish = partial(self._finish_late, status, ending)
                    if not self._is_late and self._later(finish):
                        raise _Deferred from exc
                is_repeated = True
                time.sleep(_RETRY_S)

    def _commit(self, status: Status, ending: Ending) -> bool:
        """Write the final row, and with it what is to be kept; False if it was taken away."""
        result, assembler = self._result(ending), self._assembler
        if assembler is None or not self._stores:
            return Generation.objects.finish(self._claim, status, **result)
        lock_ms = None if self._is_late else _FIRST_WAIT_MS
        with release_connection_after(), transaction_with_timeouts(lock_ms):
            held = Generation.objects.finish(self._claim, status, **result)
            if held and (store_result := self._kind.store_result):
                store_result(self._claim.public_id, status, assembler, self._store)
        return held

    @property
    def _stores(self) -> bool:
        """Whether more than the row is written at the end."""
        return self._assembler is not None and bool(self._store or self._kind.recover)

    def _finish_late(self, status: Status, ending: Ending) -> None:
        self._is_late = True
        with self._logged():
            self._finish(status, ending)

    def _tell(self, status: Status, ending: Ending) -> None:
        """Log and trace the end."""
        usage, claim = self._usage, self._claim
        tokens = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
        facts = {"model": claim.model, "status": status.value, **tokens}
        if ending.error_code:
            facts["error_code"] = ending.error_code
        logger.info("%s ended", claim.kind, extra=facts)
        self._span.set(**facts)
        self._span.end(ending.error_code)

    def _result(self, ending: Ending) -> dict[str, Any]:
        usage, spec = self._usage, catalogue().models.get(self._claim.model)
        price = Price() if spec is None else spec.price
        cached_tokens = min(usage.cached_tokens, usage.input_tokens)
        return {
            "first_token_at": self._first_token_at,
            "input_tokens": usage.input_tokens,
            "cached_tokens": cached_tokens,
            "output_tokens": usage.output_tokens,
            "reasoning_tokens": min(usage.reasoning_tokens, usage.output_tokens),
            "prefill_ms": usage.prefill_ms,
            "decode_ms": usage.decode_ms,
            "cost": price.cost(usage.input_tokens, cached_tokens, usage.output_tokens),
            "finish_reason": ending.finish_reason,
            "error_code": ending.error_code,
        }
