"""The addresses of a model's servers: which are up, and which of them takes the next request."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

NOT_ASKED = "It has not been asked yet."
_SURE_S = 2.0
"""As long as two looks at a server that is down."""
_ENDS_S = 5.0
"""How long a server may take to end after its engine."""


class Address:
    """One server of the model. ``fault`` says why it cannot be used; empty while it can.

    ``model`` is the model's name there, once it is known; ``contexts`` are the tokens that it
    lists for each of its models. It ``is_silent`` when its fault is that it says nothing, which one
    that is busy may do, too.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.model: str | None = None
        self.contexts: dict[str, int | None] = {}
        self.fault = NOT_ASKED
        self.busy = 0
        self.is_silent = True
        self._down_at = 0.0
        self._heard_at = self._avoided_until = self._doubted_until = -math.inf

    @property
    def root_url(self) -> str:
        """The address without ``/v1``: some servers have their own endpoints there."""
        return self.base_url.removesuffix("/v1")

    @property
    def is_up(self) -> bool:
        """Whether it can be used."""
        return not self.fault

    def note(self, fault: str, *, is_silent: bool) -> None:
        """Note what is wrong with it; nothing: an empty text."""
        if not self.fault:
            self._down_at = time.monotonic()
        self.fault, self.is_silent, self._doubted_until = fault, is_silent, -math.inf

    def doubt(self) -> None:
        """Do not believe for a while that it is up: its engine has ended, and its port has not."""
        self._doubted_until = time.monotonic() + _ENDS_S

    @property
    def is_doubted(self) -> bool:
        """Whether it is not believed to be up."""
        return time.monotonic() < self._doubted_until

    @property
    def is_gone(self) -> bool:
        """Whether it has been down for some time, and not only silent."""
        is_sure = time.monotonic() - self._down_at > _SURE_S
        return bool(self.fault) and not self.is_silent and is_sure

    @property
    def is_avoided(self) -> bool:
        """Whether it has asked for a pause that is not over."""
        return time.monotonic() < self._avoided_until

    def avoid(self, seconds: float) -> None:
        """Prefer others for so long."""
        self._avoided_until = time.monotonic() + seconds

    def heard(self) -> None:
        """Note that it has answered a run."""
        self._heard_at = time.monotonic()

    def was_heard_within(self, seconds: float) -> bool:
        """Whether it has answered a run in the last so many seconds."""
        return time.monotonic() - self._heard_at < seconds

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count a run of this process on it."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1


class Addresses:
    """The servers of one model, all alike. For the event loop; ``fault`` is for any thread."""

    def __init__(self, base_urls: Collection[str]) -> None:
        self.all = [Address(url) for url in base_urls]

    @property
    def fault(self) -> str:
        """Why nothing can be run; empty while one of them is up."""
        if any(address.is_up for address in self.all):
            return ""
        return "\n".join(address.fault for address in self.all)

    def best(self, tried: Collection[Address] = ()) -> Address:
        """Return the one that is up and has the fewest runs, if there is one not tried yet."""
        left = [address for address in self.all if address not in tried] or self.all
        # Equals are drawn, so that the workers of a site do not all begin with the same one.
        return min(left, key=lambda a: (not a.is_up, a.is_avoided, a.busy, random.random()))  # noqa: S311  # No secret.

    def has_another(self, tried: Collection[Address]) -> bool:
        """Whether one is up that was not tried."""
        return any(address.is_up and address not in tried for address in self.all)
