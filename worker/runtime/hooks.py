"""Hooks: an operator's own functions, which see, change or drop what a model yields.

``ON_CHUNK`` and ``ON_DONE`` name them by their dotted paths:

    def on_chunk(context: HookContext, chunk: Chunk) -> Chunk | None: ...
    def on_done(context: HookContext, chunks: Sequence[Chunk]) -> None: ...

They work on deltas, before anything is made of them: what is streamed, what is answered whole and
what is stored all have what ``on_chunk`` returned, and nothing of what it dropped. ``on_done`` gets
all of that once the engine has ended its answer, before the client learns of it. A call whose first
chunk is dropped is dropped as a whole. Both run in the worker; ``on_chunk`` on the
thread that drives the engine: a slow one slows every generation of its model, and of all models of
other servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from inference_site.domain.deltas import Delta, Finish, ReasoningDelta, TextDelta, ToolCallDelta
from inference_site.domain.errors import HookFailed

Chunk = TextDelta | ReasoningDelta | ToolCallDelta
"""What hooks get: pieces of an answer. Its end and its usage cannot be changed."""


@dataclass(frozen=True, slots=True)
class HookContext:
    """Which generation a hook is called for."""

    generation_id: str
    kind: str
    model: str


OnChunk = Callable[[HookContext, Chunk], Chunk | None]
OnDone = Callable[[HookContext, Sequence[Chunk]], None]


class Hooks:
    """The hooks of one generation. Chunks are kept only when there is somebody to see them."""

    def __init__(self, context: HookContext, on_chunk: OnChunk | None, on_done: OnDone | None):
        self._context, self._on_chunk, self._on_done = context, on_chunk, on_done
        self._seen: list[Chunk] = []
        self._calls: dict[int, dict[int, int]] = {}

    def pass_on(self, delta: Delta) -> Delta | None:
        """Return what is to become of a delta; None drops it. Raise HookFailed."""
        if isinstance(delta, Finish):
            is_without = delta.reason == "tool_calls" and not self._calls.get(delta.index)
            return replace(delta, reason="stop") if is_without else delta
        if not isinstance(delta, Chunk):
            return delta
        chunk = self._call(self._on_chunk, delta) if self._on_chunk else delta
        if chunk is not None and not isinstance(chunk, Chunk):
            raise HookFailed(f"on_chunk returned {type(chunk).__name__}, which is no chunk.")
        if isinstance(chunk, ToolCallDelta):
            chunk = self._renumbered(chunk)
        if chunk is not None and self._on_done:
            self._seen.append(chunk)
        return chunk

    def _renumbered(self, delta: ToolCallDelta) -> ToolCallDelta | None:
        """Number the calls that are passed on from 0; the rest of a call goes with its first."""
        numbers = self._calls.setdefault(delta.index, {})
        if delta.name is not None:
            numbers.setdefault(delta.call, len(numbers))
        return replace(delta, call=numbers[delta.call]) if delta.call in numbers else None

    def done(self) -> None:
        """Show all that was passed on. Raise HookFailed."""
        if self._on_done:
            self._call(self._on_done, tuple(self._seen))

    def _call(self, hook: Callable[[HookContext, Any], Any], seen: Any) -> Any:
        try:
            return hook(self._context, seen)
        except Exception as exc:
            name = getattr(hook, "__name__", type(hook).__name__)
            raise HookFailed(f"{name} raised {type(exc).__name__}: {exc}") from exc


def check_hooks() -> None:
    """Import the hooks. Raise ImproperlyConfigured for a path that leads nowhere."""
    for name in ("ON_CHUNK", "ON_DONE"):
        try:
            _loaded(getattr(settings, name))
        except ImportError as exc:
            raise ImproperlyConfigured(f"{name}: {exc}.") from exc


def hooks_for(context: HookContext) -> Hooks | None:
    """Return the hooks of a generation, or None when the site has none."""
    on_chunk, on_done = _loaded(settings.ON_CHUNK), _loaded(settings.ON_DONE)
    return Hooks(context, on_chunk, on_done) if on_chunk or on_done else None


@cache
def _loaded(path: str) -> Callable[..., Any] | None:
    """Return the function of this dotted path. Raise ImportError for a wrong one."""
    return import_string(path) if path else None
