"""The value that ends a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a stream: its last frames, and the response to a client that does not stream.

    With ``is_early``, ``status`` and ``body`` also answer a streaming client, because the stream
    contains only a failure. ``error_code`` is empty unless the generation failed, ``finish_reason``
    unless it completed. ``retry_after_s`` is the ``Retry-After`` of a 429, 503 or 504. With
    ``begins_log`` the log was empty when a stream was ended in place of its worker: what a reader
    has was in a log that is lost.
    """

    frames: Sequence[bytes]
    status: int
    body: bytes
    finish_reason: str = ""
    error_code: str = ""
    is_early: bool = False
    retry_after_s: int | None = None
    begins_log: bool = False
