"""Requests and tokens a minute, of a key and of its project, counted in Redis.

The windows slide: what counts is the last minute, not the minute of the clock. Tokens are counted
as estimated when a request comes, and corrected when it has ended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis.exceptions
from django.conf import settings
from django.db.models import QuerySet
from limits import RateLimitItemPerMinute
from limits.storage import RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from inference_site.accounts.accounting import Accounted
from inference_site.accounts.keys import Caller, Limits
from inference_site.accounts.models import ApiKey, Project

logger = logging.getLogger(__name__)

_WINDOW_S = 60
_NO_LIMIT = 2**53


@dataclass(frozen=True, slots=True)
class Window:
    """How one window stands after a request: what is left, and when there is more of it again."""

    unit: str
    amount: int
    remaining: int
    reset_s: float


class RateLimited(Exception):
    """A window has no room for the request."""

    def __init__(self, owner: str, window: Window, windows: list[Window]) -> None:
        super().__init__(f"{window.amount} {window.unit} a minute of this {owner}")
        self.window, self.windows = window, windows


@cache
def _limiter() -> SlidingWindowCounterRateLimiter:
    storage = RedisStorage(
        settings.RATE_LIMIT_URL, key_prefix="limit", socket_timeout=2, socket_connect_timeout=2
    )
    return SlidingWindowCounterRateLimiter(storage)


def hit(caller: Caller, tokens: int) -> list[Window]:
    """Count a request of so many tokens; return how the windows stand, if there are any.

    Raise RateLimited for what is too much; a request that is refused takes no tokens. With Redis
    down nothing is counted and nothing refused, or redis' error raised: as
    ``RATE_LIMITS_FAIL_OPEN`` says.
    """
    windows: list[Window] = []
    try:
        for owner, id_, unit, amount in _limits(caller):
            cost = 1 if unit == "requests" else min(tokens, amount)
            item = RateLimitItemPerMinute(amount)
            is_in = _limiter().hit(item, unit, owner, str(id_), cost=cost)
            stats = _limiter().get_window_stats(item, unit, owner, str(id_))
            reset_s = max(0.0, stats.reset_time - time.time())
            windows.append(Window(unit, amount, stats.remaining, reset_s))
            if not is_in:
                raise RateLimited(owner, windows[-1], windows)
    except redis.exceptions.RedisError as exc:
        if not settings.RATE_LIMITS_FAIL_OPEN:
            raise
        logger.warning("rate limits: not counted: %s", exc)
    return windows


def give_back(caller: Caller, tokens: int) -> None:
    """Take back what was counted of a request that is not accepted."""
    try:
        for owner, id_, unit, amount in _limits(caller):
            _shift(owner, id_, unit, amount, -1 if unit == "requests" else -min(tokens, amount))
    except redis.exceptions.RedisError as exc:
        logger.warning("rate limits: not given back: %s", exc)


def has_token_limit(caller: Caller) -> bool:
    """Whether somebody counts this caller's tokens."""
    return any(
        limits.tokens_per_minute is not None
        for limits in (caller.key_limits, caller.project_limits)
    )


def _limits(caller: Caller) -> Iterator[tuple[str, int, str, int]]:
    """Yield the owner of each limit, its id, what is counted and how much there may be of it."""
    owners = (("key", caller.api_key_id, caller.key_limits),)
    for owner, id_, limits in (*owners, ("project", caller.project_id, caller.project_limits)):
        yield from _of(owner, id_, limits)


def _of(owner: str, id_: int, limits: Limits) -> Iterator[tuple[str, int, str, int]]:
    if limits.requests_per_minute is not None:
        yield owner, id_, "requests", limits.requests_per_minute
    if limits.tokens_per_minute is not None:
        yield owner, id_, "tokens", limits.tokens_per_minute


def correct(accounted: list[Accounted], now_s: float) -> None:
    """Count the tokens that were used instead of those that were estimated."""
    keys = _limited(ApiKey, {row.api_key_id for row in accounted if row.reserved_tokens})
    projects = _limited(Project, {row.project_id for row in accounted if row.reserved_tokens})
    for row in accounted:
        more = row.used_tokens - row.reserved_tokens
        # What was estimated more than a minute ago has left the window.
        if not row.reserved_tokens or (more < 0 and now_s - row.created_at.timestamp() > _WINDOW_S):
            continue
        for owner, id_, amounts in (
            ("key", row.api_key_id, keys),
            ("project", row.project_id, projects),
        ):
            if id_ in amounts:
                _shift(owner, id_, "tokens", amounts[id_], more)


def _limited(kind: type[ApiKey] | type[Project], ids: set[int]) -> dict[int, int]:
    if not ids:
        return {}
    rows: QuerySet[Any] = kind._default_manager.filter(pk__in=ids, tokens_per_minute__isnull=False)
    return dict(rows.values_list("pk", "tokens_per_minute"))


def _shift(owner: str, id_: int, unit: str, amount: int, more: int) -> None:
    """Count more, or fewer, in a window, whatever its limit is."""
    item = RateLimitItemPerMinute(amount)
    stats = _limiter().get_window_stats(item, unit, owner, str(id_))
    if stats.remaining == amount and more < 0:
        return  # Nothing of it is in the window any more.
    key = item.key_for(unit, owner, str(id_))
    storage = _limiter().storage
    assert isinstance(storage, RedisStorage)
    storage.acquire_sliding_window_entry(key, _NO_LIMIT, _WINDOW_S, more)


def headers(windows: list[Window]) -> dict[str, str]:
    """Return ``x-ratelimit-*``, each for the window of the key or project with the least left."""
    found = {}
    for unit in ("requests", "tokens"):
        least = min(
            (window for window in windows if window.unit == unit),
            key=lambda window: window.remaining,
            default=None,
        )
        if least is not None:
            found[f"x-ratelimit-limit-{unit}"] = str(least.amount)
            found[f"x-ratelimit-remaining-{unit}"] = str(least.remaining)
            found[f"x-ratelimit-reset-{unit}"] = duration(least.reset_s)
    return found


def duration(seconds: float) -> str:
    """Write a duration as the API's headers have it: ``350ms``, ``12s``, ``1m3s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
