"""Budget reservations: an accepted generation reserves its estimated usage.

When the generation has ended, accounting replaces the reservation by the actual usage. So
concurrent requests together exceed a budget by less than the usage in flight.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from django.db.models import Case, Count, F, Max, Q, When

from inference_site.accounts.models import END_USER, TAG, Bounded, Budget, BudgetSpend
from inference_site.core.storage.postgresql import execute_prepared

# Before any counter is locked, and in the order in which accounting inserts, to avoid deadlocks.
# A budget that is being deleted is waited for, and has no counter then.
_ADD_SPENDS = """
INSERT INTO accounts_budgetspend (budget_id, start, value, spent, reserved)
SELECT budget.id, wanted.start, wanted.value, 0, 0
FROM unnest(%(budgets)s::bigint[], %(starts)s::date[], %(values)s::text[])
    AS wanted (budget_id, start, value) JOIN accounts_budget budget ON budget.id = wanted.budget_id
WHERE NOT EXISTS (
    SELECT FROM accounts_budgetspend known WHERE known.budget_id = wanted.budget_id
        AND known.start = wanted.start AND known.value = wanted.value
) ORDER BY budget.id FOR KEY SHARE OF budget
ON CONFLICT DO NOTHING
"""


_RESERVED_RETRY_S = 1
"""The end of any request may release what a budget has reserved."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated usage of a generation."""

    tokens: int
    cost: Decimal

    def of(self, unit: str) -> Decimal:
        """Return the amount to reserve in a budget of this unit."""
        return self.cost if unit == Budget.Unit.COST else Decimal(self.tokens)


class BudgetExhausted(Exception):
    """A budget has no room for a request: try again in ``retry_after_s``.

    If it ``is_used_up``, that is the start of its next period. Otherwise requests that have not
    ended reserve the rest.
    """

    def __init__(self, budget: Budget, retry_after_s: int, *, is_used_up: bool) -> None:
        super().__init__(
            f"the budget of {budget} is used up"
            if is_used_up
            else f"requests that have not ended reserve the rest of the budget of {budget}"
        )
        self.budget, self.retry_after_s, self.is_used_up = budget, retry_after_s, is_used_up


def period_start(every: str, now: dt.datetime) -> dt.date:
    """Return the first day of the period that contains ``now``."""
    today = now.astimezone(dt.UTC).date()
    return today if every == Budget.Every.DAY else today.replace(day=1)


def period_end(every: str, now: dt.datetime) -> dt.datetime:
    """Return when the next period begins."""
    start = period_start(every, now)
    days = 1 if every == Budget.Every.DAY else 31
    after = period_start(every, dt.datetime.combine(start, dt.time(), dt.UTC) + dt.timedelta(days))
    return dt.datetime.combine(after, dt.time(), dt.UTC)


Starts = tuple[tuple[str, dt.date], ...]
"""The start of one period of each length."""


def current_starts(now: dt.datetime) -> Starts:
    """Return the lengths of periods, each with the start of the one that contains a moment."""
    return tuple((every, period_start(every, now)) for every in Budget.Every.values)


def begun_at(starts: Starts) -> Q:
    """Return the condition on spends that they are of these periods."""
    return Q(*(Q(budget__every=every, start=start) for every, start in starts), _connector=Q.OR)


def values_of(end_user: str, tags: Sequence[str]) -> dict[str, str]:
    """Return the end user and the values of the tags of a request, by dimension."""
    pairs = (tag.partition("=") for tag in tags)
    values = {TAG + key: value for key, _, value in pairs}
    return values | ({END_USER: end_user} if end_user else {})


def reserve(
    project_id: int,
    api_key_id: int,
    estimate: Estimate,
    now: dt.datetime,
    values: Mapping[str, str] | None = None,
    model: str = "",
) -> None:
    """Reserve the estimate in every budget of the key and the project, or in none.

    ``model`` is the one that serves the request. ``values`` has the request's end user and tags by
    their dimension: budgets for each of them count what that one has spent. Call this in the
    transaction that accepts the generation. Raise BudgetExhausted if the estimate exceeds the rest
    of a budget; of several, the one that refuses longest. A budget without reservations accepts any
    estimate until it is spent; otherwise a request larger than the remainder could never run. A
    budget that is newer than the request holds no reservation of it, because accounting releases
    none there (``accounting.HAS_RESERVATION``): the clock was set back, or the hosts that made the
    two have different times.
    """
    valued = {"": "", **(values or {})}
    is_affected = Q(api_key=None) | Q(api_key=api_key_id)
    budgets = list(
        Budget.objects.filter(
            is_affected, project=project_id, model__in=("", model), each__in=valued
        ).order_by("pk")
    )
    if not budgets:
        return
    rows = [
        BudgetSpend(budget=one, start=period_start(one.every, now), value=valued[one.each])
        for one in budgets
    ]
    wanted = {
        "budgets": [row.budget_id for row in rows],
        "starts": [row.start for row in rows],
        "values": [row.value for row in rows],
    }
    execute_prepared(_ADD_SPENDS, wanted)
    spends = _lock_spends(rows)
    budgets = [one for one in budgets if one.pk in spends]  # Others were deleted meanwhile.
    refusals = []
    for budget in budgets:
        spend = spends[budget.pk]
        if spend.spent + spend.reserved + estimate.of(budget.unit) <= budget.amount:
            continue
        if spend.spent >= budget.amount:
            left_s = (period_end(budget.every, now) - now).total_seconds()
            refusals.append(BudgetExhausted(budget, max(1, round(left_s)), is_used_up=True))
        elif spend.reserved:
            refusals.append(BudgetExhausted(budget, _RESERVED_RETRY_S, is_used_up=False))
    if refusals:
        raise max(refusals, key=lambda refusal: (refusal.is_used_up, refusal.retry_after_s))
    in_money = Q(budget__in=[budget.pk for budget in budgets if budget.unit == Budget.Unit.COST])
    holding = [spends[budget.pk].pk for budget in budgets if budget.created_at <= now]
    BudgetSpend.objects.filter(pk__in=holding).update(
        reserved=F("reserved")
        + Case(When(in_money, then=estimate.cost), default=Decimal(estimate.tokens))
    )


def _lock_spends(rows: Sequence[BudgetSpend]) -> dict[int, BudgetSpend]:
    """Lock and return the existing counters among these, by budget id."""
    wanted = Q()
    for row in rows:
        wanted |= Q(budget=row.budget_id, start=row.start, value=row.value)
    spends = BudgetSpend.objects.filter(wanted).order_by("id").select_for_update()
    return {spend.budget_id: spend for spend in spends}


def replace_budgets(
    project_id: int, api_key_id: int | None, wanted: Mapping[Bounded, Decimal]
) -> None:
    """Make these amounts the budgets of a project, or of one of its keys.

    A budget that bounds the same as before keeps what is spent of it. Call this in a transaction
    that has locked the row of the project and its budgets (``accounting.lock_budgets``), or made
    the row of the project or key.
    """
    left = dict(wanted)
    for budget in Budget.objects.filter(project=project_id, api_key=api_key_id).order_by("pk"):
        amount = left.pop((budget.model, budget.each, budget.unit, budget.every), None)
        if amount is None:
            budget.delete()
        elif amount != budget.amount:
            budget.amount = amount
            budget.save(update_fields=["amount"])
    for (model, each, unit, every), amount in left.items():
        bounded = {"model": model, "each": each, "unit": unit, "every": every}
        owner = {"project_id": project_id, "api_key_id": api_key_id}
        Budget.objects.get_or_create(**owner, **bounded, defaults={"amount": amount})


@dataclass(frozen=True, slots=True)
class Spent:
    """What is spent of a budget in its current period.

    For a budget of each end user or value of a tag: by the one who spent most, and how many have
    used it up.
    """

    highest: Decimal = Decimal(0)
    used_up: int = 0


def spent_of(budgets: Iterable[Budget], now: dt.datetime) -> dict[int, Spent]:
    """Return what is spent of these budgets, by id; those of which nothing is are missing."""
    ids = [budget.pk for budget in budgets]
    if not ids:
        return {}
    spends = BudgetSpend.objects.filter(begun_at(current_starts(now)), budget__in=ids)
    rows = spends.values_list("budget").order_by()
    is_used_up = Q(spent__gte=F("budget__amount"))
    summed = rows.annotate(highest=Max("spent"), used_up=Count("pk", filter=is_used_up))
    return {budget: Spent(highest, count) for budget, highest, count in summed}
