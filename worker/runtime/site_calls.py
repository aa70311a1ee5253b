"""Runs the calls that a turn of the model has made to tools of the site, several at a time.

The model has made the calls of a turn without the results of the others, so none waits for another;
results are given in the order of the calls. A call is made only after its row was committed as
``sent``, and its result is used only after it was stored in the row
(``inference_site.runs.tool_calls``). Each call has a thread of its own, because a tool may never
return: the run goes on without it when the time is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from decimal import Decimal
from itertools import groupby
from typing import Any, TypeVar

import orjson
from django.conf import settings

from inference_site.core.domain.deltas import Usage
from inference_site.core.domain.errors import StreamLost
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult
from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE, release_connection_after
from inference_site.mcp.access import LIST_TOOLS
from inference_site.runs.models import Claim
from inference_site.runs.tool_calls.models import CallStatus, ToolCall, hash_of
from worker.runtime.publisher import Stream
from worker.tools.base import (
    RESULT_FACTOR,
    CallContext,
    SiteTool,
    ToolCancelled,
    ToolTimeout,
    ToolUnreachable,
    create_tool,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_RETRY_S = 0.5
_GRACE_S = 2.0
"""How much longer than its time limit a call may take to report that the time is over."""
_MAX_SOURCES = 100
_MOST_AT_ONCE = 8
"""Calls of one turn that run at the same time."""
_ONE_BY_ONE = frozenset({"web_search", "file_search"})
"""Types of tools whose calls begin with the sources of all results before them."""
_UNKNOWN = "Outcome unknown: the call was sent, and its result was lost. It was not repeated."
T = TypeVar("T")


class Stopped(Exception):
    """The run was stopped while its calls ran."""


class SiteCalls:
    """The calls of one attempt of a generation.

    ``options`` are those of its tools. ``keeps``: content may be stored, for a restart.
    """

    def __init__(
        self, claim: Claim, stream: Stream, options: Sequence[Mapping[str, Any]], *, keeps: bool
    ) -> None:
        self._claim, self._stream, self._options, self._keeps = claim, stream, options, keeps
        self._tools: dict[int, SiteTool] = {}
        self._creates = threading.Lock()

    def run(
        self,
        calls: Sequence[SiteCall],
        state: Mapping[str, Any],
        usage: Usage,
        sources: Callable[[], Sequence[Source]],
    ) -> Iterator[ToolResult]:
        """Yield the results of the calls, in order.

        ``state`` and ``usage`` are those of the turns so far; they are saved before the first call.
        Raise Stopped when the run is stopped, and StreamLost when another attempt has it.
        """
        types = [str(options["type"]) for options in self._options]
        kept = state if self._keeps else {}
        rows = self._stored(lambda: ToolCall.objects.plan(self._claim, calls, types, kept, usage))
        if rows is None:
            raise StreamLost
        for is_alone, group in groupby(calls, lambda call: types[call.tool] in _ONE_BY_ONE):
            if is_alone:
                for call in group:
                    yield self._run(call, rows[call.number], sources())
            else:
                yield from self._run_together(list(group), rows, sources())

    def _run_together(
        self, calls: Sequence[SiteCall], rows: Mapping[int, ToolCall], sources: Sequence[Source]
    ) -> Iterator[ToolResult]:
        """Yield the results of calls that run at the same time. Raise what ``_run`` raises.

        After an error no further call begins. The calls that run see by themselves that the stream
        is cancelled; if another attempt has the claim, their results are not stored.
        """
        if len(calls) == 1:
            yield self._run(calls[0], rows[calls[0].number], sources)
            return
        waiting = [(call, Future[ToolResult]()) for call in calls]
        results = [result for _, result in waiting]
        waiting.reverse()

        def work() -> None:
            while waiting:
                try:
                    call, result = waiting.pop()
                except IndexError:
                    return
                try:
                    result.set_result(self._run(call, rows[call.number], sources))
                except BaseException as exc:  # noqa: BLE001  # The thread of the run raises it.
                    waiting.clear()
                    result.set_exception(exc)

        for number in range(min(len(calls), _MOST_AT_ONCE)):
            threading.Thread(target=work, name=f"tool calls {number}", daemon=True).start()
        try:
            for result in results:
                yield self._awaited(result)
        finally:
            waiting.clear()

    def _awaited(self, result: Future[ToolResult]) -> ToolResult:
        """Return a result of another thread. Raise Stopped, and what the call raises."""
        while True:
            try:
                return result.result(_POLL_S)
            except FutureTimeout:
                self._raise_if_stopped()

    def _stored(self, act: Callable[[], T]) -> T:
        """Call a function that uses PostgreSQL, again while PostgreSQL is down. Raise Stopped."""
        while True:
            self._raise_if_stopped()
            try:
                with release_connection_after():
                    return act()
            except DATABASE_UNAVAILABLE as exc:
                logger.warning("generation %s: cannot store a call: %s", self._claim.public_id, exc)
                time.sleep(_RETRY_S)

    def _raise_if_stopped(self) -> None:
        if self._stream.cancelled:
            raise Stopped

    def _run(self, call: SiteCall, row: ToolCall, sources: Sequence[Source]) -> ToolResult:
        fingerprint = self._options[call.tool].get("images_hash", "")
        arguments_hash = hash_of(call.arguments + fingerprint)
        with self._creates:
            if call.tool not in self._tools:
                self._tools[call.tool] = create_tool(self._options[call.tool])
            tool = self._tools[call.tool]
        # Arguments may differ after a restart: the answer that a moderation judges is generated
        # again, and its images are fetched again. A stored result then counts only if the call
        # must not be repeated.
        is_same = row.arguments_hash == arguments_hash or not tool.is_idempotent(call.name)
        if is_same and row.status == CallStatus.DONE and (stored := row.stored_result):
            return stored
        try:
            arguments = orjson.loads(call.arguments or "{}")
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            fields = {"error_code": "invalid_tool_input"}
            result = ToolResult("The arguments are no JSON object.", fields, is_error=True)
            return self._finished(row, result)
        if row.status != CallStatus.PLANNED and not tool.is_idempotent(call.name):
            unknown = ToolResult(_UNKNOWN, is_error=True)
            if row.status == CallStatus.DONE:  # Of a run in the foreground no result is stored.
                return unknown
            return self._finished(row, unknown, is_unknown=True)
        price = _price_of(self._options[call.tool], call.name)
        if not self._stored(lambda: ToolCall.objects.send(self._claim, row, arguments_hash, price)):
            raise StreamLost
        return self._call(tool, call.name, arguments, row, sources)

    def _finished(
        self, row: ToolCall, result: ToolResult, *, is_unknown: bool = False
    ) -> ToolResult:
        """Store a result. Raise StreamLost if another attempt has the call."""
        keeps = self._keeps

        def finish() -> bool:
            return ToolCall.objects.finish(row, result, is_unknown=is_unknown, keeps=keeps)

        if not self._stored(finish):
            raise StreamLost
        return result

    def _call(
        self,
        tool: SiteTool,
        name: str,
        arguments: Mapping[str, Any],
        row: ToolCall,
        sources: Sequence[Source],
    ) -> ToolResult:
        """Make the call on a thread; wait for its result, which is stored then."""
        timeout_s: float = settings.TOOL_TIMEOUT_S
        until = time.monotonic() + timeout_s + _GRACE_S
        is_over, has_ended = threading.Event(), threading.Event()
        results: list[tuple[ToolResult, bool]] = []
        context = CallContext(
            key=row.key,
            generation_id=self._claim.public_id,
            attempt=row.attempt,
            timeout_s=timeout_s,
            max_bytes=settings.TOOL_OUTPUT_BYTES,
            is_cancelled=lambda: self._stream.cancelled or is_over.is_set(),
            sources=sources,
        )

        def call() -> None:
            results.append(_outcome(tool, name, arguments, context))
            has_ended.set()
            if self._stream.cancelled or is_over.is_set():
                self._store_late(row, *results[0])

        threading.Thread(target=call, name=f"tool {name}"[:15], daemon=True).start()
        while not has_ended.wait(_POLL_S):
            self._raise_if_stopped()
            if time.monotonic() > until:
                is_over.set()
                return self._finished(row, _timed_out(timeout_s), is_unknown=True)
        self._raise_if_stopped()
        result, is_unknown = results[0]
        return self._finished(row, result, is_unknown=is_unknown)

    def _store_late(self, row: ToolCall, result: ToolResult, is_unknown: bool) -> None:
        """Record the end of a call after the run has stopped waiting for it."""
        try:
            with release_connection_after():
                ToolCall.objects.finish(row, result, is_unknown=is_unknown, keeps=self._keeps)
        except DATABASE_UNAVAILABLE as exc:
            logger.warning("tool call %s: its late end is not stored: %s", row.key, exc)


def _price_of(options: Mapping[str, Any], name: str) -> Decimal:
    """Return what a call costs. A server that a request has named by its URL has no price."""
    tool = str(options["type"])
    if tool == "mcp":
        is_free = "server_id" not in options or name == LIST_TOOLS
        tool = "" if is_free else f"mcp:{options['server_label']}"
    price: Decimal = settings.TOOL_PRICES.get(tool, Decimal(0))
    return price


def _outcome(
    tool: SiteTool, name: str, arguments: Mapping[str, Any], context: CallContext
) -> tuple[ToolResult, bool]:
    """Make the call; return its result, and whether its effect is unknown. Never raises."""
    try:
        return _bounded(tool.call(name, arguments, context), context.max_bytes), False
    except ToolTimeout:
        return _timed_out(context.timeout_s), True
    except ToolCancelled:
        return ToolResult("The call was cancelled.", is_error=True), True
    except ToolUnreachable as exc:
        return ToolResult(f"The tool cannot be reached: {exc}", is_error=True), False
    except Exception:
        logger.exception("tool %s: the call %s failed", name, context.key)
        return ToolResult("The tool failed.", is_error=True), True


def _timed_out(timeout_s: float) -> ToolResult:
    return ToolResult(f"Outcome unknown: the call took longer than {timeout_s:g} s.", is_error=True)


def _bounded(result: ToolResult, max_bytes: int) -> ToolResult:
    """Return the result with at most ``max_bytes`` of output, and about as much in its fields."""
    # PostgreSQL takes no lone surrogates. A character has at least one byte.
    output = result.output[: max_bytes + 1].encode("utf-8", "replace")
    text = output[:max_bytes].decode("utf-8", "ignore")
    if len(output) > max_bytes:
        text += f"\n[Cut off: the result has {len(result.output)} characters.]"
    fields = dict(result.fields)
    if len(orjson.dumps(fields)) > RESULT_FACTOR * max_bytes:
        return ToolResult(f"The result has more than {max_bytes} bytes.", is_error=True)
    return ToolResult(text, fields, tuple(result.sources[:_MAX_SOURCES]), result.is_error)
