"""Whether requests with a key are accepted now, and if not, why; limits and budgets in use.

The state of a key is one sentence. On a list it is read from PostgreSQL alone, with a fixed number
of queries; on the key's page it also has the limits per minute, and the refusals of the last day.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis.exceptions
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Count, Q
from django.utils import timezone

from inference_site.accounts import rate_limits
from inference_site.accounts.budgets import Spent, period_end, spent_of
from inference_site.accounts.models import (
    ApiKey,
    Budget,
    KeySecret,
    ModelLimit,
    Project,
    Scope,
)
from inference_site.console.tiles import short
from inference_site.core.admin_pages.labels import money, time_since
from inference_site.gateway.head import resolve_cached
from inference_site.runs.models import INDEXING, Generation
from inference_site.runs.request_log.models import Refusal
from inference_site.runs.usage.models import Period
from inference_site.runs.usage.queries import (
    PERIOD_LENGTH,
    Span,
    floor,
    total_by,
    without_table_scans,
)

REVOKED = "Revoked."
"""The entry of the audit log for a revoked key."""
OTHERS_KEY = "{name} was not rotated: only its user may see its secret, on the page My keys."
"""What is said instead of a secret that the user may not see (see ``may_rotate``)."""
ROTATION_OVERLAP = dt.timedelta(days=1)
"""How long the old secret of a rotated key works."""
SPEND_TIME = dt.timedelta(days=30)
_WARNING_PERCENT = 80
_A_DAY = dt.timedelta(days=1)
_MAX_REFUSALS = 2_000
"""Rows of refusals that are read for one key, newest first."""
_MAX_REASONS = 3
_REASONS = {
    "model_not_allowed": "the key does not allow the model",
    "model_not_found": "the project has no such model",
    "rate_limit_exceeded": "a limit was reached",
    "insufficient_quota": "a budget was spent",
    "invalid_api_key": "the secret was not valid",
}


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """How much of a budget or a limit is used; ``percent`` is at most 100.

    ``resets`` says when it begins anew. ``refusal`` says why requests are refused while nothing is
    left; it is empty for what refuses none.
    """

    name: str
    used: str
    of: str
    percent: int
    resets: str = ""
    refusal: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether little or nothing is left."""
        return self.percent >= _WARNING_PERCENT

    @property
    def is_used_up(self) -> bool:
        """Whether nothing is left, so that requests are refused."""
        return self.percent >= 100 and bool(self.refusal)


@dataclass(frozen=True, slots=True)
class KeyState:
    """Whether requests with a key are accepted now, as a word and as a sentence."""

    label: Literal["works", "refused", "expired", "revoked"]
    sentence: str


def bars_of(tenant: ApiKey | Project) -> list[ProgressBar]:
    """Return the budgets and limits of a project, or of a key and its project."""
    now = timezone.now()
    budgets = Budget.objects.filter(project=tenant.pk)
    if isinstance(tenant, ApiKey):
        of_project = Budget.objects.filter(project=tenant.project_id, api_key=None)
        budgets = Budget.objects.filter(api_key=tenant.pk) | of_project
    bars = _budget_bars(list(budgets.select_related("api_key").order_by("pk")), now)
    tenants: list[ApiKey | Project] = [tenant]
    if isinstance(tenant, ApiKey):
        tenants.append(tenant.project)
    limited = [
        (one, "" if one == tenant else ", whole project", _of_models(one)) for one in tenants
    ]
    return [
        *bars.values(),
        *(bar for one in limited for bar in _minute_bars(*one)),
        *(bar for one in limited for bar in _run_bars(*one)),
    ]


def _of_models(tenant: ApiKey | Project) -> list[ModelLimit]:
    """Return the limits of a key, or of a project without those of its keys, for single models."""
    of_project = ModelLimit.objects.filter(project=tenant.pk, api_key=None)
    of_key = ModelLimit.objects.filter(api_key=tenant.pk)
    return list((of_key if isinstance(tenant, ApiKey) else of_project).order_by("model"))


def _budget_bars(budgets: Sequence[Budget], now: dt.datetime) -> dict[int, ProgressBar]:
    """Return a bar for each budget, by its id."""
    spends = spent_of(budgets, now)
    bars = {}
    for budget in budgets:
        spend = spends.get(budget.pk, Spent())
        spent = spend.highest
        percent = int(100 * spent / budget.amount) if budget.amount else 100
        whose = "whole project" if budget.api_key is None else f"key {budget.api_key.name}"
        of, until = budget.shown(budget.amount), _moment(period_end(budget.every, now), now)
        owner = " of the project" if budget.api_key is None else ""
        name = f"Budget of a {budget.every}{_for(budget.model)}, {whose}"
        resets = f"resets at {until}"
        refusal = f"budget{owner} of {of} a {budget.every} spent until {until}"
        if budget.each:
            name = f"{name}, for each {budget.shown_each} (the highest)"
            resets = f"{spend.used_up:,} used up; {resets}"
        if budget.model or budget.each:  # The key still works for others.
            refusal = ""
        bars[budget.pk] = ProgressBar(
            name, budget.shown(spent), of, min(100, percent), resets, refusal
        )
    return bars


def _moment(moment: dt.datetime, now: dt.datetime) -> str:
    """Return a time in UTC; without its date, if it is within a day."""
    is_near = abs(moment - now) <= _A_DAY
    return f"{moment:%H:%M} UTC" if is_near else f"{moment:%Y-%m-%d %H:%M} UTC"


def _minute_bars(
    tenant: ApiKey | Project, whose: str, of_models: Sequence[ModelLimit]
) -> list[ProgressBar]:
    """Return the use of the limits per minute; nothing while Redis is not reachable."""
    try:
        windows = rate_limits.used(tenant, of_models)
    except redis.exceptions.RedisError:
        return []
    bars = []
    for window in windows:
        used = max(0, window.amount - window.remaining)
        percent = min(100, 100 * used // window.amount)
        wait = f"in {max(1, round(window.reset_s))} s"
        name = f"{window.unit.capitalize()} in this minute{_for(window.model)}{whose}"
        # Above the limit of priority requests, requests are served as usual. A key whose limit for
        # one model is used up works with others.
        is_limit = window.unit in ("requests", "tokens") and not window.model
        refusal = f"all {window.amount:,} {window.unit} of this minute{whose} used, resets {wait}"
        bars.append(
            ProgressBar(
                name,
                f"{used:,}",
                f"{window.amount:,}",
                percent,
                f"resets {wait}" if used else "",
                refusal if is_limit else "",
            )
        )
    return bars


def _run_bars(
    tenant: ApiKey | Project, whose: str, of_models: Sequence[ModelLimit]
) -> list[ProgressBar]:
    limits = {"": tenant.concurrent_runs}
    limits |= {row.model: row.concurrent_runs for row in of_models}
    if set(limits.values()) == {None}:
        return []
    # The project is the first column of the index of generations that have not ended.
    project = tenant.project_id if isinstance(tenant, ApiKey) else tenant.pk
    current = Generation.objects.filter(project=project, finished_at=None).exclude(**INDEXING)
    if isinstance(tenant, ApiKey):
        current = current.filter(api_key=tenant.pk)
    by_model = dict(current.values_list("model").annotate(Count("pk")))
    runs_of = {"": sum(by_model.values()), **by_model}
    bars = []
    for model, limit in limits.items():
        if limit is None:
            continue
        runs = runs_of.get(model, 0)
        percent = min(100, 100 * runs // limit)
        refusal = "" if model else f"all {limit:,} runs at one time{whose} in use"
        name = f"Waiting and running now{_for(model)}{whose}"
        bars.append(ProgressBar(name, str(runs), str(limit), percent, "", refusal))
    return bars


def _for(model: str) -> str:
    return f" for {model}" if model else ""


def states_of(keys: Iterable[ApiKey]) -> dict[int, KeyState]:
    """Return the states of these keys by id, from PostgreSQL alone.

    The keys have been read with their projects and owners.
    """
    now, listed = timezone.now(), list(keys)
    projects = {key.project_id for key in listed}
    of_projects = Q(project__in=projects, api_key=None)
    found = Budget.objects.filter(of_projects | Q(api_key__in=[key.pk for key in listed]))
    budgets = list(found.select_related("api_key").order_by("-every", "pk"))
    bars = _budget_bars(budgets, now)
    states = {}
    for key in listed:
        own = (
            bars[budget.pk]
            for budget in budgets
            if budget.project_id == key.project_id and budget.api_key_id in (None, key.pk)
        )
        states[key.pk] = _refused(key, own, now) or KeyState("works", f"{_works(key)}.")
    return states


def may_rotate(key: ApiKey, user: Any) -> bool:
    """Return whether a user may see a secret of this key: its own user, or anybody if it has none.

    A key of a user uses what that user has authorised at MCP servers.
    """
    return key.owner_id in (None, user.pk)


def valid_secrets(key: ApiKey) -> list[KeySecret]:
    """Return the secrets that are accepted now, the newest first; two during a rotation."""
    is_valid = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    return list(key.secrets.filter(is_valid).order_by("-pk"))


def spends_of(keys: Iterable[ApiKey]) -> dict[int, str]:
    """Return the tokens and the cost of the last 30 days of these keys, by id; not of unused ones.

    The time is that of whole days of UTC.
    """
    ids = [key.pk for key in keys]
    end = floor(timezone.now(), Period.DAY) + PERIOD_LENGTH[Period.DAY]
    with without_table_scans():
        totals = total_by(Span(Period.DAY, end - SPEND_TIME, end, api_keys=ids), "api_key_id")
    return {
        key: ", ".join(
            [
                f"{short(usage.input_tokens + usage.output_tokens)} tokens",
                *([money(usage.cost)] if usage.cost else []),
            ]
        )
        for (key,), usage in totals.items()
    }


def state_of(key: ApiKey, bars: Sequence[ProgressBar], *, with_refusals: bool) -> KeyState:
    """Return the state of one key, whose ``bars`` were read with ``bars_of``.

    ``with_refusals`` adds how many of its requests were refused in the last day, and why.
    """
    now = timezone.now()
    state = _refused(key, bars, now)
    if state is not None and state.label == "revoked":
        by = _revoked_by(key)
        return KeyState("revoked", f"{state.sentence[:-1]} by {by}.") if by else state
    if state is None:
        used = key.last_used_at
        last = "not used yet" if used is None else f"last used {time_since(used)} ago"
        state = KeyState("works", f"{_works(key)}; {last}.")
    refusals = _refusals(key, now) if with_refusals else ""
    return KeyState(state.label, f"{state.sentence} {refusals}.") if refusals else state


def _works(key: ApiKey) -> str:
    """Return whether a key works for clients, or without a secret for what was imported."""
    is_of_imports = not key.prefix and key.user_id is None
    return "Works for what was imported, without a secret" if is_of_imports else "Works"


def _refused(key: ApiKey, bars: Iterable[ProgressBar], now: dt.datetime) -> KeyState | None:
    """Return why requests are refused; None if they are accepted."""
    if key.revoked_at is not None:
        return KeyState("revoked", f"Refused: revoked {_moment(key.revoked_at, now)}.")
    if key.expires_at is not None and key.expires_at <= now:
        return KeyState("expired", f"Refused: expired {_moment(key.expires_at, now)}.")
    if not key.project.is_active:
        return KeyState("refused", f"Refused: the project {key.project} is inactive.")
    if key.owner is not None and not key.owner.is_active:
        return KeyState("refused", f"Refused: its user {key.owner} is deactivated.")
    used_up = next((bar for bar in bars if bar.is_used_up), None)
    return None if used_up is None else KeyState("refused", f"Refused: {used_up.refusal}.")


def state_at(key: ApiKey, moment: dt.datetime) -> str:
    """Return whether a key was valid at a time, and whether it still is.

    Only what has a time is known: the revocation and the expiry.
    """
    now = timezone.now()
    ends: list[tuple[dt.datetime, str]] = []
    if key.revoked_at is not None:
        by = _revoked_by(key)
        ends.append((key.revoked_at, f"revoked {_moment(key.revoked_at, now)}{by and f' by {by}'}"))
    if key.expires_at is not None and key.expires_at <= now:
        ends.append((key.expires_at, f"expired {_moment(key.expires_at, now)}"))
    if not ends:
        return "valid then and now"
    at, text = min(ends)
    return text if at <= moment else f"valid then; {text}"


def _revoked_by(key: ApiKey) -> str:
    """Return the name of the user who revoked the key; "" if the audit log has no such entry."""
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(ApiKey),
        object_id=str(key.pk),
        change_message__startswith=REVOKED,
    )
    entry = entries.select_related("user").order_by("pk").first()
    return "" if entry is None else entry.user.get_username()


def _refusals(key: ApiKey, now: dt.datetime) -> str:
    """Return how many requests were refused in the last day and why; "" for none."""
    rows = Refusal.objects.filter(api_key=key.pk).order_by("-id")
    newest = rows.values_list("created_at", "error_code", "path", "count")[: _MAX_REFUSALS + 1]
    reasons: Counter[str] = Counter()
    more = ""
    for read, (created_at, code, path, count) in enumerate(newest):
        if created_at < now - _A_DAY:
            continue
        if read == _MAX_REFUSALS:
            more = "more than "
            break
        reason = _REASONS.get(code) or code.replace("_", " ") or "unknown"
        if code == "insufficient_scope":
            match = resolve_cached(path.rstrip("/"))
            scope = getattr(getattr(match and match.func, "cls", None), "scope", Scope.INFERENCE)
            # A view may need a scope for some methods only; the key may have got it since.
            is_there = scope in key.scopes
            reason = "a scope was missing" if is_there else f"scope {scope.value} is missing"
        reasons[reason] += count
    if not reasons:
        return ""
    common = reasons.most_common(_MAX_REASONS)
    texts = [reason if len(reasons) == 1 else f"{reason} ({n:,})" for reason, n in common]
    return f"{more}{reasons.total():,} refused in the last day: {', '.join(texts)}"
