"""Limits of requests and tokens per minute, for keys and projects, counted in Redis.

Each is for all models or for one. A request counts in all that hold for its model.

The windows slide: they cover the last 60 seconds, not the minute of the clock. A request's tokens
are counted as an estimate when it arrives and corrected after it has ended.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import redis.exceptions
from django.conf import settings
from django.db.models import Q
from limits.storage import RedisStorage

from inference_site.accounts.keys import Caller, Limits, Owner, shown_owner
from inference_site.accounts.limits_private import change_previous_count
from inference_site.accounts.models import ApiKey, ModelLimit, Project
from inference_site.core.errors.api_errors import RateLimitError
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.redis import client_options

logger = logging.getLogger(__name__)

_WINDOW_S = 60
_NO_LIMIT = 2**53
_PRIORITY = "priority requests"
_outage = OutageLog(logger, "rate limits: requests are accepted uncounted")


@dataclass(frozen=True, slots=True)
class AccountedGeneration:
    """Tokens of a generation: reserved at acceptance, and used."""

    project_id: int
    api_key_id: int
    model: str
    created_at: dt.datetime
    reserved_tokens: int
    used_tokens: int


@dataclass(frozen=True, slots=True)
class Window:
    """The state of a window: its limit, what remains, and the seconds until all of it remains.

    Without a ``model`` it is for all.
    """

    unit: str
    amount: int
    remaining: int
    reset_s: float
    model: str = ""


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit of requests, tokens or priority requests per minute, of one key or project.

    It is for one ``model``, or for all.
    """

    owner: Owner
    id: int
    unit: str
    amount: int
    model: str = ""

    def cost(self, tokens: int) -> int:
        """Return the cost of a request with this number of tokens, at most the whole limit."""
        return min(tokens, self.amount) if self.unit == "tokens" else 1

    def window(self) -> Window:
        """Return the current state of the window."""
        previous, previous_s, current, current_s = self._counts()
        used = int(previous * previous_s / _WINDOW_S) + current
        reset_s = current_s if current else previous_s if previous else 0.0
        return Window(self.unit, self.amount, max(0, self.amount - used), reset_s, self.model)

    def wait_s(self, cost: int) -> float:
        """Return the seconds until the window has room for this cost, if nothing else uses it."""
        previous, previous_s, current, current_s = self._counts()
        room = self.amount - cost
        if current > room:  # It becomes the previous one, whose count falls evenly to zero.
            return current_s - (room + 1) * _WINDOW_S / current
        return previous_s - (room - current + 1) * _WINDOW_S / max(previous, 1)

    def _counts(self) -> tuple[int, float, int, float]:
        """Return the counts of the previous and the current window, each with its rest of time.

        That of the current window includes the minute in which it will be the previous one.
        """
        return limit_storage().get_sliding_window(self._key, _WINDOW_S)

    @property
    def _key(self) -> str:
        """The name of the counts. Without the amount: a limit that is changed keeps its counts."""
        key = f"{self.unit}/{self.owner}/{self.id}"
        return f"{key}/{self.model}" if self.model else key

    def __str__(self) -> str:
        return f"{self.amount} {self.unit} a minute of {shown_owner(self.owner, self.model)}"

    def hit(self, cost: int) -> bool:
        """Count this cost if the window has room for it; return whether it has."""
        return limit_storage().acquire_sliding_window_entry(self._key, self.amount, _WINDOW_S, cost)

    def change_count(self, change: int) -> None:
        """Change the count of the current window; the limit does not apply."""
        if change < 0:  # Not below zero: the previous window gives no credit.
            _previous, _previous_s, current, _current_s = self._counts()
            change = max(change, -current)
        if change:
            limit_storage().acquire_sliding_window_entry(self._key, _NO_LIMIT, _WINDOW_S, change)

    def take_back(self, counted: Sequence[tuple[float, int]]) -> None:
        """Reduce the counts by numbers that were counted some seconds ago, where they were counted.

        What was counted before the previous window counts no more.
        """
        previous, previous_s, _current, current_s = self._counts()
        began_s = 2 * _WINDOW_S - current_s  # Since the beginning of the current window.
        earlier = sum(n for age_s, n in counted if began_s < age_s <= began_s + _WINDOW_S)
        from_previous = min(earlier, previous)
        if from_previous and previous_s > 1:  # Later it hardly counts, and may have expired.
            change_previous_count(limit_storage(), self._key, _WINDOW_S, -from_previous)
        # The clocks of hosts differ: what the previous window does not have is in this one.
        in_current = sum(n for age_s, n in counted if age_s <= began_s)
        self.change_count(from_previous - earlier - in_current)


@cache
def limit_storage() -> RedisStorage:
    """Return the counts of all limits, in the Redis of ``RATE_LIMIT_URL``."""
    return RedisStorage(settings.RATE_LIMIT_URL, key_prefix="limit", **client_options())


def _limits_of(caller: Caller, model: str) -> Iterator[_Limit]:
    ids = {"key": caller.api_key_id, "project": caller.project_id}
    for limits in caller.limits:
        if limits.holds_for(model):
            for unit, amount in _amounts(limits):
                yield _Limit(limits.owner, ids[limits.owner], unit, amount, limits.model)


def has_token_limit(caller: Caller, model: str) -> bool:
    """Return whether the caller's key or project has a token limit that holds for this model."""
    return any(limit.unit == "tokens" for limit in _limits_of(caller, model))


def count_request(caller: Caller, tokens: int | None = None, model: str = "") -> dict[str, str]:
    """Count a request; return the rate limit headers of its response. Raise as ``hit`` does."""
    return headers(hit(caller, tokens, model))


def hit(caller: Caller, tokens: int | None, model: str = "") -> list[Window]:
    """Count a request with an estimate of its tokens; return the state of each window.

    ``tokens=None`` is for a request that generates nothing: it is not checked against token limits,
    and has no model.

    Raise RateLimitError if a window has no room; a refused request is not counted. When Redis is
    down, raise redis' error, or with ``RATE_LIMITS_FAIL_OPEN`` accept the request uncounted.
    """
    windows: list[Window] = []
    counted: list[_Limit] = []
    try:
        for limit in _limits_of(caller, model):
            if limit.unit == "tokens" and tokens is None:
                continue
            if not limit.hit(limit.cost(tokens or 0)):
                for earlier in counted:
                    earlier.change_count(-earlier.cost(tokens or 0))
                wait_s = max(1, math.ceil(limit.wait_s(limit.cost(tokens or 0))))
                error = RateLimitError(
                    f"Rate limit reached: {limit}. Please try again in {duration(wait_s)}.",
                    retry_after_s=wait_s,
                    headers=current_headers(caller, model),
                )
                error.type = limit.unit
                raise error
            windows.append(limit.window())
            counted.append(limit)
    except redis.exceptions.RedisError as exc:
        if not settings.RATE_LIMITS_FAIL_OPEN:
            raise
        _outage.failed(exc)
    else:
        if counted:
            _outage.succeeded()
    return windows


def current_headers(caller: Caller, model: str) -> dict[str, str]:
    """Return the rate limit headers of a refused request, when nothing counts for it any more.

    While Redis is away there are none.
    """
    try:
        return headers([limit.window() for limit in _limits_of(caller, model)])
    except redis.exceptions.RedisError as exc:
        logger.warning("rate limits: a refusal does not say what remains: %s", exc)
        return {}


def takes_priority(caller: Caller) -> bool:
    """Count a request that asks for priority; return whether its key has one more this minute.

    While Redis is down no request has priority.
    """
    amount = caller.priority_requests_per_minute
    if not amount:
        return False
    try:
        return _Limit("key", caller.api_key_id, _PRIORITY, amount).hit(1)
    except redis.exceptions.RedisError as exc:
        logger.warning("rate limits: a request is served without priority: %s", exc)
        return False


def give_back(caller: Caller, tokens: int, model: str) -> None:
    """Undo ``hit`` for a request that was refused later."""
    _change({limit: -limit.cost(tokens) for limit in _limits_of(caller, model)})


def give_back_priority(caller: Caller) -> None:
    """Undo ``takes_priority`` for a request that was refused later."""
    amount = caller.priority_requests_per_minute or 0
    _change({_Limit("key", caller.api_key_id, _PRIORITY, amount): -1})


def add_tokens(caller: Caller, tokens: int, model: str) -> None:
    """Count an estimate of what an accepted request needs besides; no limit refuses it."""
    limits = [limit for limit in _limits_of(caller, model) if limit.unit == "tokens"]
    _change({limit: limit.cost(tokens) for limit in limits})


def _change(counts: Mapping[_Limit, int]) -> None:
    """Change the counts of limits by these numbers; while Redis is away, they stay as they are."""
    try:
        for limit, by in counts.items():
            limit.change_count(by)
    except redis.exceptions.RedisError as exc:
        logger.warning("rate limits: a count is not changed: %s", exc)


def used(tenant: ApiKey | Project, of_models: Iterable[ModelLimit] = ()) -> list[Window]:
    """Return the current windows of a key or a project, and of its limits of models.

    Raise redis' errors.
    """
    owner: Owner = "key" if isinstance(tenant, ApiKey) else "project"
    limits = [
        _Limit(owner, tenant.pk, unit, amount, model)
        for model, row in [("", tenant), *((row.model, row) for row in of_models)]
        for unit, amount in _amounts(row)
    ]
    return [limit.window() for limit in limits]


def _amounts(of: Limits | ApiKey | Project | ModelLimit) -> Iterator[tuple[str, int]]:
    """Yield the unit and the amount of each limit that there is."""
    amounts = {"requests": of.requests_per_minute, "tokens": of.tokens_per_minute}
    if isinstance(of, ApiKey):
        amounts[_PRIORITY] = of.priority_requests_per_minute
    for unit, amount in amounts.items():
        if amount is not None:
            yield unit, amount


def correct(accounted: Iterable[AccountedGeneration], now_s: float) -> None:
    """Replace the estimated tokens in the windows by the tokens that were used."""
    estimated = [row for row in accounted if row.reserved_tokens]
    limits = _token_limits(estimated) if estimated else {}
    too_much: defaultdict[_Limit, list[tuple[float, int]]] = defaultdict(list)
    too_little: Counter[_Limit] = Counter()
    for row in estimated:
        owners: tuple[tuple[Owner, int], ...]
        owners = ("key", row.api_key_id), ("project", row.project_id)
        models = "", row.model
        found = (limits.get((owner, pk, model)) for owner, pk in owners for model in models)
        for limit in filter(None, found):
            change = row.used_tokens - limit.cost(row.reserved_tokens)
            if change < 0:
                too_much[limit].append((now_s - row.created_at.timestamp(), -change))
            else:
                too_little[limit] += change
    for limit, counted in too_much.items():
        limit.take_back(counted)
    for limit, change in too_little.items():
        limit.change_count(change)


def _token_limits(rows: Sequence[AccountedGeneration]) -> dict[tuple[Owner, int, str], _Limit]:
    """Return the token limits of the keys and projects of generations, by owner, id and model."""
    keys, projects = {row.api_key_id for row in rows}, {row.project_id for row in rows}
    amounts: dict[tuple[Owner, int, str], int | None] = {}
    of_keys = ApiKey.objects.filter(pk__in=keys)
    for pk, amount in of_keys.values_list("pk", "tokens_per_minute"):
        amounts["key", pk, ""] = amount
    of_projects = Project.objects.filter(pk__in=projects)
    for pk, amount in of_projects.values_list("pk", "tokens_per_minute"):
        amounts["project", pk, ""] = amount
    models = {row.model for row in rows}
    of_models = ModelLimit.objects.filter(project__in=projects, model__in=models)
    of_models = of_models.filter(Q(api_key=None) | Q(api_key__in=keys))
    for row in of_models:
        if row.api_key_id is None:
            amounts["project", row.project_id, row.model] = row.tokens_per_minute
        else:
            amounts["key", row.api_key_id, row.model] = row.tokens_per_minute
    return {
        (owner, pk, model): _Limit(owner, pk, "tokens", amount, model)
        for (owner, pk, model), amount in amounts.items()
        if amount is not None
    }


def headers(windows: list[Window]) -> dict[str, str]:
    """Return the ``x-ratelimit-*`` headers: for each unit, the window with the least remaining."""
    values = {}
    for unit in ("requests", "tokens"):
        least = min(
            (window for window in windows if window.unit == unit),
            key=lambda window: window.remaining,
            default=None,
        )
        if least is not None:
            values[f"x-ratelimit-limit-{unit}"] = str(least.amount)
            values[f"x-ratelimit-remaining-{unit}"] = str(least.remaining)
            values[f"x-ratelimit-reset-{unit}"] = duration(least.reset_s)
    return values


def duration(seconds: float) -> str:
    """Format a duration as in the API's headers: ``350ms``, ``12s``, ``1m3s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def seconds_of(text: str) -> float:
    """Return the seconds of a duration that ``duration`` has formatted."""
    if text.endswith("ms"):
        return int(text[:-2]) / 1000
    minutes, _, rest = text[:-1].rpartition("m")
    return int(minutes or 0) * 60 + int(rest)
