"""One attempt of one generation, from its claim to its terminal event.

claim → document → engine → assembler → publisher → final row → terminal event

If the answer calls tools of the site, the run leaves its slot after the turn of the model, runs the
calls (``call_tools``), and starts the engine again for the next turn (``resume``).
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

from inference_site.catalogue.catalogue import catalogue
from inference_site.core.domain.deltas import (
    CompactionDelta,
    Delta,
    Finish,
    PromptProgress,
    ReasoningDelta,
    Usage,
    is_output,
)
from inference_site.core.domain.errors import (
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
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.observability.logs import log_fields
from inference_site.core.observability.metrics import Meter
from inference_site.core.observability.outages import OutageLog
from inference_site.core.observability.tracing import Span, start_span
from inference_site.core.storage.postgresql import (
    DATABASE_UNAVAILABLE,
    is_timeout,
    release_connection_after,
    transaction_with_timeouts,
)
from inference_site.runs.kept_content.models import Keeper, keeper_for
from inference_site.runs.kinds import Assembler, GenerationKind, deliveries, kind_of, recovered
from inference_site.runs.models import Claim, Generation, Status, usage_columns
from inference_site.runs.streams.batches import Ending, Sent, sent_so_far
from inference_site.runs.streams.event_log import read_log
from inference_site.runs.streams.request_documents import Document, Loaded, ToStore, load_document
from inference_site.runs.tool_calls.models import SavedTurns
from inference_site.runs.tool_calls.models import close as close_calls
from inference_site.runs.wake_ups import send_wake_up
from worker.engines.base import Engine, OnEnd, start_and_report
from worker.media import has_media, resolve_media, with_judged_images
from worker.runtime.compaction import start_compacting
from worker.runtime.guards import GuardChats
from worker.runtime.hooks import HookContext, Hooks, hooks_for
from worker.runtime.publisher import StopReason, Stream
from worker.runtime.site_calls import SiteCalls, Stopped
from worker.runtime.tool_calls import CustomCalls, TextCallParser, may_have_text_calls

logger = logging.getLogger(__name__)

_SERVER_LOST = (ConnectionLost, ModelServerUnreachable, ModelServerLost)
_RETRY_S = 0.5
_LOCKED_S = 60.0
"""Seconds that the end of a run waits for a locked row or table; after that, the check for orphans
ends the run."""
_FIRST_WAIT_MS = 500
"""How long an end that is stored with its answer waits for a lock while its run has its slot."""
_COMMITS = threading.BoundedSemaphore(8)
"""How many ends are written at once. If a thousand runs end in one moment, more threads would only
wait for a connection, time out and retry, and delay the renewal of the lease."""
_STORING_COMMITS = threading.BoundedSemaphore(4)
"""The same for ends that are stored with their answers, so that a lock on the tables of answers
does not delay the ends of other runs."""

Later = Callable[["Run", Callable[[], None]], bool]
"""Calls a function on another thread, after the run has left its slot. False if it cannot."""


class _LockedTooLong(Exception):
    """A row or table has been locked for ``_LOCKED_S``."""


class _Deferred(Exception):
    """The end will be stored on another thread."""


class Run:
    """One attempt of one generation: drives the engine, and is the sink of its deltas.

    ``later`` stores an end that has to wait for a lock on another thread; without it, the run keeps
    its slot meanwhile.
    """

    def __init__(self, claim: Claim, stream: Stream, later: Later = lambda *_: False) -> None:
        self.claim, self.stream = claim, stream
        self.started_at = time.time()
        """Unix time."""
        self._later, self._is_late = later, False
        self._assembler: Assembler | None = None
        self._store: ToStore | None = None
        self._document: Document[Any] | None = None
        self.calls_tools = False
        """Whether tools must be called now, without a slot; the engine has ended its turn."""
        self._site_calls: SiteCalls | None = None
        self._next: GenerationRequest | None = None
        self._first: GenerationRequest
        """The request of the first turn; the later ones begin with its messages."""
        self._spent = Usage()
        """The usage of the turns that have ended."""
        self._usage = Usage()
        self._pieces = self._reasoning_pieces = 0
        """Pieces of output so far, and of reasoning among them: at least as many tokens, if the
        engine has not counted them."""
        self._is_counted = True
        """Whether the engine has reported its usage after the last piece."""
        self._first_token_at: dt.datetime | None = None
        self._output_since: float | None = None
        self._unfinished = 1
        """Answers of the turn that have not finished; after a cancel, some never do."""
        self._hooks: Hooks | None = None
        self._text_calls: TextCallParser | None = None
        self._custom_calls: CustomCalls | None = None
        self._keeper: Keeper | None = None
        self._meter = Meter(claim.model, claim.attempt, claim.waited_s)
        self._span = Span()

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now (see ``Sink``)."""
        return self.stream.cancelled

    @property
    def is_cut_off(self) -> bool:
        """Whether Redis, which carries its stream, does not answer."""
        return self.stream.is_cut_off

    @property
    def output_s(self) -> float:
        """For how many seconds the engine has produced output."""
        return 0.0 if self._output_since is None else time.monotonic() - self._output_since

    @property
    def unsent_tokens(self) -> int:
        """At least how many output tokens there are, while no frame was sent; 0 after that."""
        return 0 if self.stream.is_begun else max(self._pieces, self._usage.output_tokens)

    def feed(self, delta: Delta) -> None:
        """Convert a delta to frames and hand them to the publisher (see ``Sink``)."""
        if isinstance(delta, Usage):
            self._usage = delta = self._spent.plus(delta).bounded()
            self._is_counted = True
        elif not isinstance(delta, PromptProgress | CompactionDelta):
            if self._first_token_at is None:
                self._first_token_at = self.claim.now()
                self._output_since = time.monotonic()
            if isinstance(delta, Finish):
                self._unfinished -= 1
            else:
                self._meter.tick()
                self._pieces += is_output(delta)
                self._reasoning_pieces += isinstance(delta, ReasoningDelta)
                self._is_counted = False
        for piece in (delta,) if self._text_calls is None else self._text_calls.take(delta):
            self._assemble(piece)

    def spend(self, usage: Usage) -> None:
        """Take the usage of a turn that has ended (see ``TurnSink``)."""
        self._spent = self._spent.plus(usage)
        self._pieces += usage.output_tokens
        self._reasoning_pieces += usage.reasoning_tokens
        self.feed(Usage())

    def _assemble(self, delta: Delta) -> None:
        """Pass a delta on: custom calls → hooks → kept content → assembler → publisher."""
        assert self._assembler is not None
        for piece in (delta,) if self._custom_calls is None else self._custom_calls.take(delta):
            passed = piece if self._hooks is None else self._hooks.filter(piece)
            if passed is None:
                continue
            if self._keeper is not None:
                self._keeper.take(passed)
            if frames := self._assembler.feed(passed):
                self.stream.append(frames)

    @property
    def _kind(self) -> GenerationKind[Any]:
        return kind_of(self.claim.kind)

    def start(self, engine: Engine, ended: OnEnd) -> bool:
        """Start the engine. Return False when the run is over and its terminal state is stored.

        A terminal state that has to wait for a lock is stored ``later``. If ``calls_tools`` is set
        then, the run is not over: ``call_tools`` must be called.

        Return True when the engine continues on its own: it calls ``ended`` (see ``Engine.start``),
        after which the caller calls ``end`` with the same argument. Never raises.
        """
        return self._try_to(partial(self._begin, engine, ended))

    def resume(self, engine: Engine, ended: OnEnd) -> bool:
        """Start the engine for the next turn, after ``call_tools``; otherwise like ``start``."""
        return self._try_to(partial(self._start_turn, engine, ended))

    def _try_to(self, start: Callable[[], bool]) -> bool:
        """Start the engine; return whether it continues on its own. End the run if not."""
        error: Exception | None = None
        with self._logged():
            try:
                if start():
                    return True
            except Exception as exc:  # noqa: BLE001  # The boundary: ``end`` logs and answers it.
                error = exc
        if error is not None or not self.calls_tools:
            self.end(error)
        return False

    def call_tools(self) -> bool:
        """Run the calls of the last turn; return whether the model has another turn.

        Otherwise the run is over, or has been given back. Never raises.
        """
        error: Exception | None = None
        with self._logged():
            try:
                if self._call_tools():
                    return True
            except Exception as exc:  # noqa: BLE001  # The boundary: ``end`` logs and answers it.
                error = exc
        self.calls_tools = False
        self.end(error)
        return False

    def _call_tools(self) -> bool:
        """Run the calls; return whether the model has another turn."""
        assembler, document = self._assembler, self._document
        assert assembler is not None
        assert document is not None
        self._unfinished = 1
        if self._site_calls is None:
            self._first, options = with_judged_images(
                document.request, document.assembly.site_tools, self.claim.project_id
            )
            keeps = self.claim.background
            self._site_calls = SiteCalls(self.claim, self.stream, options, keeps=keeps)
        is_over = False
        while not is_over:
            while calls := assembler.calls():
                results = self._site_calls.run(
                    calls, assembler.save(), self._usage, lambda: assembler.sources
                )
                try:
                    for result in results:
                        self.stream.append(assembler.add_result(result))
                except Stopped:
                    return False
            self._next = assembler.next_request(self._first)
            is_over = self._next is not None or not assembler.calls()
        self.calls_tools = False
        if self._next is None:
            self._unfinished = 0
        return self._next is not None

    def end(self, error: Exception | None) -> None:
        """Store a terminal state; ``error`` is the error of the engine, if it raised one.

        If the answer calls tools of the site, only set ``calls_tools``. Never raises.
        """
        with self._logged():
            try:
                if self._text_calls is not None:
                    for piece in self._text_calls.rest():
                        self._assemble(piece)
                assembler = self._assembler
                if error is None and not self._unfinished and assembler and assembler.calls():
                    if not self.stream.cancelled:
                        self.calls_tools = True
                        return
                    self._unfinished = 1  # It was stopped before its calls.
                is_short = self._pieces > self._usage.output_tokens
                if self._unfinished and is_short and not self._is_counted:
                    # The engine has not counted an unfinished answer; each piece is a token.
                    reasoning = max(self._reasoning_pieces, self._usage.reasoning_tokens)
                    counts = {"output_tokens": self._pieces, "reasoning_tokens": reasoning}
                    self._usage = replace(self._usage, **counts)
                    assert self._assembler is not None
                    self._assembler.feed(self._usage)
                # Losing the model's process is no error of a run that was cancelled.
                is_cancelled = self.stream.stop_reason == StopReason.REQUESTED
                if error is not None and not (is_cancelled and isinstance(error, _SERVER_LOST)):
                    raise error
                assert self._assembler is not None
                status, ending = self._ended(self._assembler)
            except (*_SERVER_LOST, *DATABASE_UNAVAILABLE, ShuttingDown, StreamLost) as exc:
                if self._may_repeat(exc) and self._requeue(exc):
                    self._span.end("given back")
                    return
                status, ending = Status.FAILED, self._failure(exc)
            except Exception as exc:  # The boundary: it is logged and answered.
                if not isinstance(exc, InvalidRequest):  # An error of the client is not logged.
                    traceback = None if isinstance(exc, EngineError) else exc
                    public_id = self.claim.public_id
                    logger.error("generation %s: %s", public_id, exc, exc_info=traceback)
                status, ending = Status.FAILED, self._failure(exc)
            self._finish(status, ending)

    def _may_repeat(self, error: Exception) -> bool:
        """Whether another attempt may follow.

        It may in the background, and if the server was away before the first output.
        """
        if self.claim.may_restart or not isinstance(error, ModelServerUnreachable):
            return self.claim.may_restart
        has_no_output = self._first_token_at is None and settings.SERVER_WAIT_S > 0
        return has_no_output and self.claim.has_attempts_left

    def _logged(self) -> AbstractContextManager[None]:
        claim = self.claim
        ids = {"request_id": claim.request_id, "generation_id": claim.public_id}
        return log_fields({**ids, "model": claim.model, "project": claim.project_id})

    def _requeue(self, error: Exception) -> bool:
        """Put the generation back into the queue; False if it is no longer this worker's.

        The last attempt of a run that may have ended its model's process is isolated. An attempt
        that was ended from outside does not count. If PostgreSQL is unavailable, the check for
        orphans or for dead workers requeues it later.
        """
        self.stream.release()
        claim = self.claim
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
            if is_waiting:
                with suppress(redis.exceptions.RedisError):  # Maintenance sends another.
                    send_wake_up(claim.model)
            return is_waiting
        except DATABASE_UNAVAILABLE as exc:
            logger.warning("generation %s: cannot give it back: %s", claim.public_id, exc)
            return True

    def _begin(self, engine: Engine, ended: OnEnd) -> bool:
        """Start the engine; return whether it continues. Raise the error of the generation."""
        claimed_at_s = time.time()
        saved = None
        if self.claim.attempt > 1:
            with release_connection_after():
                saved = SavedTurns.objects.filter(generation_id=self.claim.public_id).first()
        if saved is not None:  # It counts also if this attempt cannot begin.
            self._usage = saved.usage_so_far
        loaded, document = self._load()
        self._document, self._first = document, document.request
        self._next = self._first
        self._begin_span(document.traceparent, claimed_at_s)
        claim, request = self.claim, document.request
        self._assembler = assembler = self._kind.assembler(document.assembly)
        self._store, self._unfinished = document.store, request.answers
        if document.store is None and not document.assembly.is_stored:
            self._keeper = keeper_for(claim.public_id, request)
        self._hooks = hooks_for(HookContext(claim.public_id, claim.kind, request.model))
        self._send_opening(assembler, loaded, saved)
        if loaded.is_cancelled:
            self.stream.stop(StopReason.REQUESTED)
            return False
        self.calls_tools = bool(assembler.calls())
        return not self.calls_tools and self._start_turn(engine, ended)

    def _start_turn(self, engine: Engine, ended: OnEnd) -> bool:
        """Start the engine for a turn; return whether it continues. Raise its error."""
        request = self._next
        assert request is not None
        self._spent, self._unfinished = self._usage, request.answers
        # A piece of an earlier turn may have been many tokens.
        self._pieces = max(self._pieces, self._usage.output_tokens)
        self._reasoning_pieces = max(self._reasoning_pieces, self._usage.reasoning_tokens)
        self._text_calls = None
        if may_have_text_calls(request):
            parallel = request.parallel_tool_calls
            self._text_calls = TextCallParser(request.tools, parallel=parallel)
        is_custom = any(tool.is_custom for tool in request.tools)
        self._custom_calls = CustomCalls(request.tools) if is_custom else None
        if self._hooks is not None:
            self._hooks.begin_turn()

        def start() -> bool:
            project_id = self.claim.project_id
            if request.guard:
                resolved = resolve_media(request, project_id)
                return GuardChats(engine, resolved, self, ended).start()
            return start_compacting(engine, request, self, ended, project_id)

        if engine.blocks or not (has_media(request) or request.compaction is not None):
            return start()

        def start_and_wait() -> None:
            with self._logged():
                start_and_report(start, ended)

        # Media and summaries take seconds; the few threads that start and end such runs must not
        # wait.
        threading.Thread(target=start_and_wait, daemon=True).start()
        return True

    def _load(self) -> tuple[Loaded[Any], Document[Any]]:
        """Return what is stored of the request; rebuild its document if that was lost.

        Wait while Redis is away, and raise StreamLost after ``EVENT_LOG_PATIENCE_S``.
        """
        claim, kind, began = self.claim, self._kind, time.monotonic()
        outage = OutageLog(logger, f"generation {claim.public_id}: no document yet")
        while True:
            try:
                loaded = load_document(claim.public_id, kind.assembly, claim.attempt)
                break
            except redis.exceptions.RedisError as exc:
                if self.stream.stop_reason == StopReason.SHUTDOWN:
                    raise ShuttingDown from exc
                waited_s = time.monotonic() - began
                if self.stream.cancelled or waited_s > settings.EVENT_LOG_PATIENCE_S:
                    raise StreamLost from exc
                outage.failed(exc)
                time.sleep(_RETRY_S)
        document = loaded.document
        if document is None and kind.rebuild is not None:
            with release_connection_after():
                document = kind.rebuild(claim.public_id)
            if document is not None:  # Whether an app keeps the answer was lost too; it will see.
                document = replace(document, is_delivered=True)
        if document is None:
            raise DocumentLost
        return loaded, document

    def _begin_span(self, parent: str, claimed_at_s: float) -> None:
        """Begin the span of the run, after a span of its wait in the queue."""
        claim = self.claim
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

    def _send_opening(
        self, assembler: Assembler, loaded: Loaded[Any], saved: SavedTurns | None
    ) -> None:
        """Send the frames before the first delta; the stream of a restart continues."""
        opening: list[bytes] = []
        sent = loaded.sent
        # If the log is empty, frames of an earlier attempt may be lost. A generation in the
        # foreground is repeated only if it has sent nothing.
        may_lack = self.claim.background and self.claim.attempt > 1
        if not sent.frames and (sent.next or may_lack):
            sent = sent.beyond()
        if sent.next:
            self.stream.start_at(sent.next, loaded.texts if sent.frames else (), sent.frames)
            opening += assembler.restart(sent, None if saved is None else saved.state)
        opening += assembler.begin()
        if saved is not None:
            assembler.feed(self._usage)
        if opening:
            self.stream.append(opening)

    def _ended(self, assembler: Assembler) -> tuple[Status, Ending]:
        """Return the ending once the engine has ended. Raise if the generation has failed."""
        if not self._unfinished:
            if self._hooks is not None:
                self._hooks.done()
            return Status.COMPLETED, assembler.complete()
        if not self.stream.cancelled:
            raise GenerationFailed("The engine ended without finishing its answer.")
        match self.stream.stop_reason:
            case StopReason.SHUTDOWN:
                raise ShuttingDown
            case StopReason.LOST:
                raise StreamLost
            case _:
                return Status.CANCELLED, assembler.cancel()

    def _failure(self, error: Exception) -> Ending:
        """Return the ending of a failure; a bare one if the assembler fails, too."""
        try:
            kind, first = self._kind, 0  # Inside, because a later release may have new kinds.
            if self._assembler is None and kind.recover is not None:
                try:
                    sent = sent_so_far(read_log(self.claim.public_id))
                except redis.exceptions.RedisError:
                    sent = Sent()
                try:
                    with release_connection_after():
                        self._assembler, first = recovered(kind, self.claim.public_id, sent)
                except DATABASE_UNAVAILABLE:  # Maintenance ends the stored response.
                    first = sent.next
                self.stream.start_at(first)
            if self._assembler is not None:
                return self._assembler.fail(error)
            return kind.failure(error, first=first)
        except Exception:
            logger.exception("generation %s: its error cannot be encoded", self.claim.public_id)
            return Ending((), 500, b"", error_code="server_error")

    def _finish(self, status: Status, ending: Ending) -> None:
        """Commit the final row, then publish the ending: its readers rely on what is stored."""
        try:
            try:
                held = self._committed(status, ending)
            except (_Deferred, _LockedTooLong):
                raise
            except Exception:
                # Maintenance ends the stored response, without what could not be stored.
                logger.exception("generation %s: its end was refused", self.claim.public_id)
                error = GenerationFailed("It cannot be stored.")
                status, ending, self._assembler = Status.FAILED, self._failure(error), None
                held = self._committed(status, ending)
        except _Deferred:
            return
        except Exception:
            # Not even a failure can be stored. The check for orphans ends the run later.
            logger.exception("generation %s: its end is not stored", self.claim.public_id)
            self.stream.release()
            self._span.end("not stored")
            return
        if held:  # Otherwise the process that moved the row counts it and ends its stream.
            self._meter.end(self.claim.kind, status, ending.error_code, self._usage)
            self.stream.close(ending)
        else:
            logger.warning("generation %s: another process moved its row", self.claim.public_id)
            self.stream.release()
        self._log_end(status, ending)  # The client does not wait for this.
        if held and self._keeper is not None:
            self._keeper.save()

    def _committed(self, status: Status, ending: Ending) -> bool:
        """Commit the end; return False if the generation is no longer this worker's.

        Wait while PostgreSQL is down: the client must not see an end that is not stored. Raise
        any error of data that cannot be stored, _Deferred when the row or a table is locked
        and the end is stored later, and _LockedTooLong after ``_LOCKED_S``.
        """
        is_repeated, began = self._is_late, time.monotonic()
        while True:
            try:
                with _STORING_COMMITS if self._stores else _COMMITS:
                    is_committed = self._commit(status, ending)
                return is_committed or (
                    is_repeated and Generation.objects.has_ended(self.claim, status)
                )
            except DATABASE_UNAVAILABLE as exc:
                logger.warning("generation %s: cannot finish: %s", self.claim.public_id, exc)
                if is_timeout(exc):
                    if time.monotonic() - began > _LOCKED_S:
                        raise _LockedTooLong from exc
                    finish = partial(self._finish_late, status, ending)
                    if not self._is_late and self._later(self, finish):
                        raise _Deferred from exc
                is_repeated = True
                time.sleep(_RETRY_S)

    def _commit(self, status: Status, ending: Ending) -> bool:
        """Write the final row, and the answer if it is stored; False if the claim is lost."""
        claim, usage, assembler = self.claim, self._usage, self._assembler
        price = catalogue().price_of(claim.model)
        result: dict[str, Any] = {
            "first_token_at": self._first_token_at,
            **usage_columns(usage, price),
            "finish_reason": ending.finish_reason,
            "error_code": ending.error_code,
        }
        if not (self._stores or self._has_site_tools or self._is_delivered):
            return Generation.objects.finish(claim, status, **result)
        lock_ms = None if self._is_late else _FIRST_WAIT_MS
        with release_connection_after(), transaction_with_timeouts(lock_ms):
            held = Generation.objects.finish(claim, status, **result)
            if held and assembler is not None and (store_result := self._kind.store_result):
                store_result(claim.public_id, status, assembler, self._store)
            cost = result["cost"]
            if held and self._has_site_tools:
                cost += close_calls(claim.public_id)
            if held and self._is_delivered:
                for app in deliveries():
                    app.deliver(claim.public_id, status, ending, cost)
        return held

    @property
    def _is_delivered(self) -> bool:
        return self._document is not None and self._document.is_delivered

    @property
    def _has_site_tools(self) -> bool:
        """Whether there may be calls to close. Without the document, an earlier attempt may have
        some.
        """
        if self._document is None:
            return self.claim.attempt > 1
        return bool(self._document.assembly.site_tools)

    @property
    def _stores(self) -> bool:
        """Whether the end writes more than the row."""
        return self._assembler is not None and bool(self._store or self._kind.recover)

    def _finish_late(self, status: Status, ending: Ending) -> None:
        self._is_late = True
        with self._logged():
            self._finish(status, ending)

    def _log_end(self, status: Status, ending: Ending) -> None:
        """Log and trace the end."""
        usage, claim = self._usage, self.claim
        tokens = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
        facts = {"model": claim.model, "status": status.value, **tokens}
        if ending.error_code:
            facts["error_code"] = ending.error_code
        logger.info("%s ended", claim.kind, extra=facts)
        self._span.set(**facts)
        self._span.end(ending.error_code)
