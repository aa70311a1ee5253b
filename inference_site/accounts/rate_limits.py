"""Limits of requests and tokens per minute, for keys and projects, counted in Redis.

The windows slide: they cover the last 60 seconds, not the minute of the clock. A request's tokens
are counted as an estimate when it arrives and corrected after it has ended.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis.exceptions
from django.conf import settings
from django.db.models import QuerySet
from limits import RateLimitItemPerMinute
from limits.storage import RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from inference_site.accounts.keys import Caller, Limits
from inference_site.accounts.models import ApiKey, Project
from inference_site.storage.redis import client_options

logger = logging.getLogger(__name__)

_WINDOW_S = 60
_NO_LIMIT = 2**53


@dataclass(frozen=True, slots=True)
class Accounted:
    """An accounted generation, with the tokens reserved for it and the tokens it used."""

    project_id: int
    api_key_id: int
    created_at: dt.datetime
    reserved_tokens: int
    used_tokens: int


@dataclass(frozen=True, slots=True)
class Window:
    """The state of one window after a request: what remains, and the seconds until it resets."""

    unit: str
    amount: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit of requests or tokens per minute, of one key or project."""

    owner: str
    id: int
    unit: str
    amount: int

    @property
    def item(self) -> tuple[RateLimitItemPerMinute, tuple[str, str, str]]:
        """The limit and the identifiers of its owner, as the library ``limits`` takes them."""
        return RateLimitItemPerMinute(self.amount), (self.unit, self.owner, str(self.id))

    def cost(self, tokens: int) -> int:
        """Return the cost of a request of so many tokens, at most the whole limit."""
        return 1 if self.unit == "requests" else min(tokens, self.amount)


class RateLimited(Exception):
    """The window has no room for the request."""

    def __init__(self, owner: str, window: Window, windows: list[Window]) -> None:
        super().__init__(f"{window.amount} {window.unit} a minute of this {owner}")
        self.window, self.windows = window, windows


@cache
def _limiter() -> SlidingWindowCounterRateLimiter:
    storage = RedisStorage(settings.RATE_LIMIT_URL, key_prefix="limit", **client_options())
    return SlidingWindowCounterRateLimiter(storage)


def hit(caller: Caller, tokens: int | None) -> list[Window]:
    """Count a request of so many tokens; return the state of each window.

    With None the request generates nothing, and no window of tokens is looked at.

    Raise RateLimited if a window has no room; a refused request counts for nothing. When Redis is
    down, raise redis' error, or with ``RATE_LIMITS_FAIL_OPEN`` accept the request uncounted.
    """
    windows: list[Window] = []
    taken: list[_Limit] = []
    try:
        for limit in _limits(caller):
            if limit.unit == "tokens" and tokens is None:
                continue
            item, identifiers = limit.item
            is_in = _limiter().hit(item, *identifiers, cost=limit.cost(tokens or 0))
            stats = _limiter().get_window_stats(item, *identifiers)
            reset_s = max(0.0, stats.reset_time - time.time())
            windows.append(Window(limit.unit, limit.amount, stats.remaining, reset_s))
            if not is_in:
                _release(taken, tokens or 0)
                raise RateLimited(limit.owner, windows[-1], windows)
            taken.append(limit)
    except redis.exceptions.RedisError as exc:
        if not settings.RATE_LIMITS_FAIL_OPEN:
            raise
        logger.warning("rate limits: request accepted uncounted: %s", exc)
    return windows


def used(tenant: ApiKey | Project) -> list[Window]:
    """Return the windows of a key or a project as they are now. Raise redis' errors."""
    owner = "key" if isinstance(tenant, ApiKey) else "project"
    windows = []
    for unit in ("requests", "tokens"):
        amount: int | None = getattr(tenant, f"{unit}_per_minute")
        if amount is not None:
            item, identifiers = _Limit(owner, tenant.pk, unit, amount).item
            stats = _limiter().get_window_stats(item, *identifiers)
            reset_s = max(0.0, stats.reset_time - time.time())
            windows.append(Window(unit, amount, stats.remaining, reset_s))
    return windows


def give_back(caller: Caller, tokens: int) -> None:
    """Undo ``hit`` for a request that was refused later."""
    try:
        _release(_limits(caller), tokens)
    except redis.exceptions.RedisError as exc:
        logger.warning("rate limits: count of a refused request not undone: %s", exc)


def _release(limits: Iterable[_Limit], tokens: int) -> None:
    for limit in limits:
        _shift(limit, -limit.cost(tokens))


def has_token_limit(caller: Caller) -> bool:
    """Return whether the caller's key or project has a token limit."""
    return any(
        limits.tokens_per_minute is not None
        for limits in (caller.key_limits, caller.project_limits)
    )


def _limits(caller: Caller) -> Iterator[_Limit]:
    yield from _of("key", caller.api_key_id, caller.key_limits)
    yield from _of("project", caller.project_id, caller.project_limits)


def _of(owner: str, id_: int, limits: Limits) -> Iterator[_Limit]:
    if limits.requests_per_minute is not None:
        yield _Limit(owner, id_, "requests", limits.requests_per_minute)
    if limits.tokens_per_minute is not None:
        yield _Limit(owner, id_, "tokens", limits.tokens_per_minute)


def correct(accounted: Iterable[Accounted], now_s: float) -> None:
    """Replace the estimated tokens in the windows by the tokens that were used."""
    estimated = [row for row in accounted if row.reserved_tokens]
    keys = _limited(ApiKey, {row.api_key_id for row in estimated})
    projects = _limited(Project, {row.project_id for row in estimated})
    shifts: Counter[_Limit] = Counter()
    for row in estimated:
        for limit in (keys.get(row.api_key_id), projects.get(row.project_id)):
            if limit is not None:
                shifts[limit] += _correction(row, limit, now_s)
    for limit, more in shifts.items():
        _shift(limit, more)


def _correction(row: Accounted, limit: _Limit, now_s: float) -> int:
    more = row.used_tokens - limit.cost(row.reserved_tokens)
    # An estimate from more than a minute ago has left the window by itself.
    has_left = now_s - row.created_at.timestamp() > _WINDOW_S
    return 0 if more < 0 and has_left else more


def _limited(kind: type[ApiKey] | type[Project], ids: set[int]) -> dict[int, _Limit]:
    if not ids:
        return {}
    owner = "key" if kind is ApiKey else "project"
    rows: QuerySet[Any] = kind._default_manager.filter(pk__in=ids, tokens_per_minute__isnull=False)
    amounts = rows.values_list("pk", "tokens_per_minute")
    return {pk: _Limit(owner, pk, "tokens", amount) for pk, amount in amounts}


def _shift(limit: _Limit, more: int) -> None:
    """Change the count of the current window, without regard to its limit."""
    item, identifiers = limit.item
    key = item.key_for(*identifiers)
    storage = _limiter().storage
    assert isinstance(storage, RedisStorage)
    if more < 0:  # Never below zero: the previous window gives no credit.
        _previous, _previous_s, current, _current_s = storage.get_sliding_window(key, _WINDOW_S)
        more = max(more, -current)
    if more:
        storage.acquire_sliding_window_entry(key, _NO_LIMIT, _WINDOW_S, more)


def headers(windows: list[Window]) -> dict[str, str]:
    """Return the ``x-ratelimit-*`` headers of the window with the least left, for each unit."""
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
    """Format a duration as in the API's headers: ``350ms``, ``12s``, ``1m3s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
