"""How a stream ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ends.

    ``frames`` close an event stream. ``status`` and ``body`` are the answer to a client that does
    not stream, or, when ``is_early``, to one whose stream has nothing in it but the failure.
    ``error_code`` is empty unless it failed, ``finish_reason`` unless it completed.
    ``retry_after_s`` is what a client is told with a 429, 503 or 504.
    """

    frames: Sequence[bytes]
    status: int
    body: bytes
    finish_reason: str = ""
    error_code: str = ""
    is_early: bool = False
    retry_after_s: int | None = None
