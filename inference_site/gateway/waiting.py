"""Requests that wait until a generation has ended, without a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from inference_site.gateway.handoff import Wait
from inference_site.gateway.hub.hub import hub

_PAUSE_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """An answer, and what it waits for or, when it waits no more, which generation it started."""

    answer: T
    wait: Wait | None
    started_id: str = ""


class _Line:
    """Requests that wait for the same thing, and whose ending the first of them waits for."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()  # Gives its waiters their turns in the order they came.
        self.holder_id = ""

    def learn(self, attempt: Attempt[T]) -> None:
        """Note who holds up the line, as the latest attempt has found."""
        if attempt.wait is not None:
            self.holder_id = attempt.wait.generation_id
        elif attempt.started_id:
            self.holder_id = attempt.started_id


_lines: WeakValueDictionary[str, _Line] = WeakValueDictionary()


async def answer_of(call: Callable[[], Awaitable[Attempt[T]]], began_at: float) -> T:
    """Call, and again after each ending that an attempt waits for; return the last answer.

    Of a line only the first calls again; the others keep the answer they have when their time is
    up. ``began_at`` is of the monotonic clock.
    """
    attempt = await call()
    if attempt.wait is None:
        return attempt.answer
    deadline = began_at + attempt.wait.at_most_s
    line = _lines.setdefault(attempt.wait.line, _Line())
    line.learn(attempt)
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            await line.turn.acquire()
    except TimeoutError:
        return attempt.answer
    try:
        return await _first_in(line, attempt, call, deadline)
    finally:
        line.turn.release()


async def _first_in(
    line: _Line, attempt: Attempt[T], call: Callable[[], Awaitable[Attempt[T]]], deadline: float
) -> T:
    ended_id = ""
    while attempt.wait is not None and (left_s := deadline - time.monotonic()) > 0:
        if line.holder_id in ("", ended_id):
            # Nothing to wait for. A stream may end a moment before its row does.
            await asyncio.sleep(_PAUSE_S)
        else:
            ended_id = line.holder_id
            await hub.wait_for_ending(ended_id, left_s)
        attempt = await call()
        line.learn(attempt)
    return attempt.answer
