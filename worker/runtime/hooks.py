"""Hooks: functions of the operator that see, change or drop the output of a model.

``ON_CHUNK`` and ``ON_DONE`` name them by their dotted paths:

    def on_chunk(context: HookContext, chunk: Chunk) -> Chunk | None: ...
    def on_done(context: HookContext, chunks: Sequence[Chunk]) -> None: ...

They work on deltas, before the assembler: streams, whole answers and stored answers contain what
``on_chunk`` returned, and nothing that it dropped. ``on_done`` gets all of that after the engine
has ended its answer, before the client sees the end. If the first chunk of a tool call is dropped,
the whole call is dropped. Both run in the worker. ``on_chunk`` runs on the thread that drives the
engine: a slow one slows all generations of its model, and of all models of upstreams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCallDelta,
)
from inference_site.core.domain.errors import HookFailed

Chunk = TextDelta | ReasoningDelta | RefusalDelta | ToolCallDelta
"""The deltas that hooks get. The finish and the usage of an answer cannot be changed."""


@dataclass(frozen=True, slots=True)
class HookContext:
    """The generation that a hook is called for."""

    generation_id: str
    kind: str
    model: str


OnChunk = Callable[[HookContext, Chunk], Chunk | None]
OnDone = Callable[[HookContext, Sequence[Chunk]], None]


class Hooks:
    """The hooks of one generation. Chunks are kept only if there is an ``on_done``."""

    def __init__(self, context: HookContext, on_chunk: OnChunk | None, on_done: OnDone | None):
        self._context, self._on_chunk, self._on_done = context, on_chunk, on_done
        self._seen: list[Chunk] = []
        self._calls: dict[int, dict[int, int]] = {}
        """The new numbers of the tool calls that were not dropped, by choice and old number."""

    def begin_turn(self) -> None:
        """Begin another turn of the model, whose calls are numbered from 0 again."""
        self._calls = {}

    def filter(self, delta: Delta) -> Delta | None:
        """Return the delta to pass on; None drops it. Raise HookFailed."""
        if isinstance(delta, Finish):
            has_no_calls = delta.reason == "tool_calls" and not self._calls.get(delta.index)
            return replace(delta, reason="stop") if has_no_calls else delta
        if not isinstance(delta, Chunk):
            return delta
        chunk = self._call(self._on_chunk, delta) if self._on_chunk else delta
        if chunk is not None and not isinstance(chunk, Chunk):
            raise HookFailed(f"on_chunk returned {type(chunk).__name__}, which is no chunk.")
        if isinstance(chunk, ToolCallDelta):
            # Calls are numbered from 0 again; one whose first chunk was dropped has no number.
            numbers = self._calls.setdefault(chunk.index, {})
            if chunk.name is not None:
                numbers.setdefault(chunk.call, len(numbers))
            chunk = replace(chunk, call=numbers[chunk.call]) if chunk.call in numbers else None
        if chunk is not None and self._on_done:
            self._seen.append(chunk)
        return chunk

    def done(self) -> None:
        """Call ``on_done``. Raise HookFailed."""
        if self._on_done:
            self._call(self._on_done, tuple(self._seen))

    def _call(self, hook: Callable[[HookContext, Any], Any], seen: Any) -> Any:
        try:
            return hook(self._context, seen)
        except Exception as exc:
            name = getattr(hook, "__name__", type(hook).__name__)
            raise HookFailed(f"{name} raised {type(exc).__name__}: {exc}") from exc


def check_hooks() -> None:
    """Import the hooks. Raise ImproperlyConfigured for a wrong path."""
    for name in ("ON_CHUNK", "ON_DONE"):
        path: str = getattr(settings, name)
        try:
            hook = _load(path)
        except ImportError as exc:
            raise ImproperlyConfigured(f"{name}: {exc}.") from exc
        if path and not callable(hook):
            raise ImproperlyConfigured(f"{name}: {path} is not a function.")


def hooks_for(context: HookContext) -> Hooks | None:
    """Return the hooks of a generation, or None if the site has none."""
    on_chunk, on_done = _load(settings.ON_CHUNK), _load(settings.ON_DONE)
    return Hooks(context, on_chunk, on_done) if on_chunk or on_done else None


@cache
def _load(path: str) -> Callable[..., Any] | None:
    return import_string(path) if path else None
