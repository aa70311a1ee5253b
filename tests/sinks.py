"""A sink for engines: remembers what it is fed, and can be cancelled at a certain delta."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue

from inference_site.core.domain.deltas import Delta, Finish, ReasoningDelta, TextDelta, Usage
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Engine


class RecordingSink:
    """Cancels itself once ``cancel_after`` pieces have come; calls ``on_first`` at the first."""

    def __init__(
        self, cancel_after: int | None = None, on_first: Callable[[], object] | None = None
    ) -> None:
        self.deltas: list[Delta] = []
        self.cancelled = cancel_after == 0
        self._cancel_after, self._on_first = cancel_after, on_first

    def feed(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if not isinstance(delta, TextDelta | ReasoningDelta):
            return
        if len(self.pieces) == 1 and self._on_first is not None:
            self._on_first()
        if len(self.pieces) == self._cancel_after:
            self.cancelled = True

    @property
    def pieces(self) -> list[str]:
        """Text and reasoning, as they came."""
        return [d.text for d in self.deltas if isinstance(d, TextDelta | ReasoningDelta)]

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(d.text for d in self.deltas if isinstance(d, TextDelta))

    @property
    def finishes(self) -> list[str]:
        """The finish reasons; a run that was not cancelled has exactly one."""
        return [d.reason for d in self.deltas if isinstance(d, Finish)]

    @property
    def usage(self) -> Usage:
        """The last delta, which must be the usage."""
        last = self.deltas[-1]
        assert isinstance(last, Usage)
        return last


def answered(engine: Engine, request: GenerationRequest, *, starts: bool) -> RecordingSink:
    """Return what the engine answers; ``starts``: by ``start``, otherwise by ``run``."""
    sink = RecordingSink()
    if starts:
        ended: Queue[Exception | None] = Queue()
        assert engine.start(request, sink, ended.put)
        assert ended.get(timeout=30) is None
    else:
        engine.run(request, sink)
    return sink
