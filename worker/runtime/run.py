"""One attempt of one generation, from its claim to its terminal event.

claim → document → engine → assembler → publisher → final row → terminal event
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from typing import Any

import redis.exceptions
from django.db import DatabaseError, InterfaceError, OperationalError, transaction
from django.utils import timezone

from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.deltas import Delta, Finish, Usage
from inference_site.domain.errors import (
    DocumentLost,
    EngineError,
    GenerationFailed,
    InvalidRequest,
    ShuttingDown,
    StreamLost,
    WorkerLost,
)
from inference_site.domain.model_spec import Price
from inference_site.domain.request import GenerationRequest
from inference_site.generations.kinds import Assembler, kind_of
from inference_site.generations.models import Claim, Generation, Status
from inference_site.observability.log_context import logged_with
from inference_site.observability.metrics import Meter
from inference_site.observability.tracing import Span, begin
from inference_site.storage.connections import lent_connection
from inference_site.streams.ending import Ending
from inference_site.streams.event_log import frames_of, read_log
from inference_site.streams.request_documents import Document, load_document
from worker.engines.base import Engine
from worker.media.resolve import resolve_media
from worker.runtime.custom_calls import CustomCalls
from worker.runtime.hooks import HookContext, Hooks, hooks_for
from worker.runtime.publisher import StopReason, Stream
from worker.runtime.truncation import run_truncating

logger = logging.getLogger(__name__)

_FINISH_RETRY_S = 0.5


class Run:
    """Drives the engine; the sink of its deltas."""

    def __init__(self, claim: Claim, stream: Stream) -> None:
        self._claim, self._stream = claim, stream
        self._assembler: Assembler | None = None
        self._document_store: dict[str, Any] | None = None
        self._usage = Usage()
        self._first_token_at: dt.datetime | None = None
        self._unfinished = 1
        self._hooks: Hooks | None = None
        self._custom_calls: CustomCalls | None = None
        self._meter = Meter(claim.model, claim.attempt, claim.waited_s)
        self._span = Span()

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now (see ``Sink``)."""
        return self._stream.cancelled

    def feed(self, delta: Delta) -> None:
        """Turn a delta into frames and hand them to the publisher (see ``Sink``)."""
        if isinstance(delta, Usage):
            self._usage = delta
        else:
            self._note(delta)
        for piece in (delta,) if self._custom_calls is None else self._custom_calls.take(delta):
            self._pass_on(piece)

    def _note(self, delta: Delta) -> None:
        if self._first_token_at is None:
            self._first_token_at = timezone.now()
        if isinstance(delta, Finish):
            self._unfinished -= 1
        else:
            self._meter.tick()

    def _pass_on(self, delta: Delta) -> None:
        passed = delta if self._hooks is None else self._hooks.pass_on(delta)
        assert self._assembler is not None
        if passed is not None and (frames := self._assembler.feed(passed)):
            self._stream.append(frames)

    def drive(self, engine: Engine) -> None:
        """Run to the end, whatever it is: never raises, and leaves a terminal state."""
        claim = self._claim
        with logged_with({"request_id": claim.request_id, "generation_id": claim.public_id}):
            self._drive(engine)

    def _drive(self, engine: Engine) -> None:
        try:
            status, ending = self._generate(engine)
        except ShuttingDown as exc:
            if self._claim.may_restart and self._give_back():
                self._span.end("given back")
                return
            status, ending = Status.FAILED, self._told(exc)
        except Exception as exc:  # noqa: BLE001  # The boundary: it is logged and told.
            self._log(exc)
            status, ending = Status.FAILED, self._told(exc)
        self._finish(status, ending)

    def _give_back(self) -> bool:
        """Leave a generation in the background to another worker; False if it is ours no more."""
        self._stream.release()
        return Generation.objects.requeue(self._claim.public_id, self._claim.worker)

    def _told(self, error: Exception) -> Ending:
        """Return the ending of a failure, whatever goes wrong while it is put into words."""
        try:
            return self._failure(error)
        except Exception:
            logger.exception("generation %s: no words for its failure", self._claim.public_id)
            return Ending((), 500, b"", error_code="server_error")

    def _generate(self, engine: Engine) -> tuple[Status, Ending]:
        claimed_at_s = time.time()
        document, cancelled, frames = self._load()
        self._trace(document.traceparent, claimed_at_s)
        self._assembler = kind_of(self._claim.kind).assembler(document.assembly)
        self._prepare(document.request)
        self._begin(self._assembler, frames)
        self._document_store = document.store
        self._unfinished = document.request.answers
        if cancelled:
            self._stream.stop(StopReason.REQUESTED)
        else:
            run_truncating(engine, resolve_media(document.request), self)
        if not self._unfinished:
            if self._hooks is not None:
                self._hooks.done()
            return Status.COMPLETED, self._assembler.complete()
        if not self._stream.cancelled:
            raise GenerationFailed("The engine ended without finishing its answer.")
        match self._stream.stop_reason:
            case StopReason.SHUTDOWN:
                raise ShuttingDown
            case StopReason.LOST:
                raise StreamLost
            case _:
                return Status.CANCELLED, self._assembler.cancel()

    def _prepare(self, request: GenerationRequest) -> None:
        """Set up what the deltas go through on their way to the assembler."""
        self._hooks = hooks_for(HookContext(self._claim.public_id, self._claim.kind, request.model))
        if any(tool.is_custom for tool in request.tools):
            self._custom_calls = CustomCalls(request.tools)

    def _trace(self, parent: str, claimed_at_s: float) -> None:
        """Begin the span of the run, after one that tells how long it has waited."""
        claim = self._claim
        wait = begin("queue wait", "internal", parent, claimed_at_s - claim.waited_s)
        wait.end(at_s=claimed_at_s)
        self._span = begin(
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

    def _begin(self, assembler: Assembler, frames: list[bytes]) -> None:
        """Go on after what was sent before."""
        opening: list[bytes] = []
        if frames:
            self._stream.start_at(len(frames))
            opening += assembler.restart(frames)
        opening += assembler.begin()
        if opening:
            self._stream.append(opening)

    def _load(self) -> tuple[Document, bool, list[bytes]]:
        try:
            found = load_document(self._claim.public_id)
        except redis.exceptions.RedisError as exc:
            raise DocumentLost from exc
        document, rebuild = found.document, kind_of(self._claim.kind).rebuild
        if document is None and rebuild is not None:
            with lent_connection():
                document = rebuild(self._claim.public_id)
        if document is None:
            raise DocumentLost
        return document, found.is_cancelled, found.frames

    def _failure(self, error: Exception) -> Ending:
        kind, first = kind_of(self._claim.kind), 0
        if self._assembler is None and kind.recover is not None:
            frames = frames_of(read_log(self._claim.public_id))
            with lent_connection():
                self._assembler = kind.recover(self._claim.public_id, frames)
            first = len(frames)
            self._stream.start_at(first)
        if self._assembler is not None:
            return self._assembler.fail(error)
        return kind.failure(error, first=first)

    def _log(self, error: Exception) -> None:
        """Log what is not the client's fault; the traceback only of what nobody foresaw."""
        if isinstance(error, InvalidRequest):
            return
        traceback = None if isinstance(error, EngineError) else error
        logger.error("generation %s: %s", self._claim.public_id, error, exc_info=traceback)

    def _finish(self, status: Status, ending: Ending) -> None:
        """Commit the final row, then send the end: who sees it may rely on what is stored.

        While PostgreSQL is down this waits: the client is kept waiting rather than told of an end
        that is not stored.
        """
        while True:
            try:
                held = self._commit(status, ending) or Generation.objects.has_ended(
                    self._claim, status
                )
            except (OperationalError, InterfaceError) as exc:
                logger.warning("generation %s: cannot finish: %s", self._claim.public_id, exc)
                time.sleep(_FINISH_RETRY_S)
                continue
            except DatabaseError:
                logger.exception("generation %s: its end was refused", self._claim.public_id)
                held = False  # Not stored, so not told; the row is soon given up as an orphan.
            break
        if not held:
            logger.warning("generation %s was taken away meanwhile", self._claim.public_id)
            ending = self._told(WorkerLost())
        self._account(status, ending, held)
        self._stream.close(ending)

    def _account(self, status: Status, ending: Ending, held: bool) -> None:
        """Count, log and trace the end; one that was taken away is counted by who took it."""
        usage, claim = self._usage, self._claim
        tokens = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
        if held:
            self._meter.end(claim.kind, status, ending.error_code, usage)
        facts = {"model": claim.model, "status": status.value, **tokens}
        if ending.error_code:
            facts["error_code"] = ending.error_code
        logger.info("%s ended", claim.kind, extra=facts)
        self._span.set(**facts)
        self._span.end(ending.error_code)

    def _commit(self, status: Status, ending: Ending) -> bool:
        """Write the final row, and with it what is to be kept; False if it was taken away."""
        result, order, assembler = self._result(ending), self._document_store, self._assembler
        if assembler is None:
            return Generation.objects.finish(self._claim, status, **result)
        kind = kind_of(self._claim.kind)
        if kind.settle is None or not (order or kind.recover):
            return Generation.objects.finish(self._claim, status, **result)
        with lent_connection(), transaction.atomic():
            held = Generation.objects.finish(self._claim, status, **result)
            if held:
                kind.settle(self._claim.public_id, status, assembler, order)
        return held

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
