"""What clients asked for, and what they were told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["open", "ok", "error", "cut", "left"]
"""``cut``: the connection ended before the answer did. ``left``: the client ended it."""


@dataclass(slots=True)
class Request:
    """One request. ``tag`` is its end user, by which its rows are found; ``expected`` its text."""

    client: str
    tag: str
    expected: str
    is_response: bool = False
    is_background: bool = False
    is_stored: bool = False
    has_key: bool = False
    conversation: str = ""
    began_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    outcome: Outcome = "open"
    id: str = ""
    told: str = ""
    """The status and the code of an error, as the client got them."""
    text: str = ""
    usage: dict[str, Any] | None = None
    numbers: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What the client itself found wrong in what it got."""

    def end(self, outcome: Outcome, told: str = "") -> None:
        """Note how it ended, once."""
        if self.outcome == "open":
            self.outcome, self.told, self.ended_at = outcome, told, time.monotonic()


@dataclass(slots=True)
class Injection:
    """One fault. ``back_after_s``: until a probe was answered after the last that failed."""

    fault: str
    at: float
    in_flight: list[Request]
    back_after_s: float = 0.0


@dataclass(slots=True)
class Ledger:
    """All requests and injections of a run, in their order."""

    requests: list[Request] = field(default_factory=list)
    injections: list[Injection] = field(default_factory=list)
    probes: list[tuple[float, float, bool]] = field(default_factory=list)
    """Of each short probe: when it began, when it ended, and whether it was answered."""

    def add(self, other: Ledger) -> None:
        """Add what happened to another stack."""
        self.requests += other.requests
        self.injections += other.injections
        self.probes += other.probes

    def begin(self, request: Request) -> Request:
        """Add a request."""
        self.requests.append(request)
        return request

    def in_flight(self) -> list[Request]:
        """Return the requests that have not ended."""
        return [request for request in self.requests if request.outcome == "open"]

    def back_after(self, at: float) -> float:
        """Return the seconds from this time until a probe was answered after the last that failed;
        0 when none failed."""
        later = [(ended, is_ok) for _, ended, is_ok in self.probes if ended >= at]
        failed = [index for index, (_, is_ok) in enumerate(later) if not is_ok]
        if not failed:
            return 0.0
        answered = failed[-1] + 1
        return later[min(answered, len(later) - 1)][0] - at
