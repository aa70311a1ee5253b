"""Budgets: reserving is all or nothing, and never more than what is left."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

from inference_site.accounts.budgets import (
    BudgetExhausted,
    Estimate,
    period_end,
    period_start,
    reserve,
)
from inference_site.accounts.models import ApiKey, Budget, BudgetSpend, Project

Key = tuple[ApiKey, str]
NOW = dt.datetime(2026, 12, 31, 23, 0, tzinfo=dt.UTC)


def estimate(tokens: int, cost: str = "0") -> Estimate:
    return Estimate(tokens, Decimal(cost))


def make(key: ApiKey, amount: Any, unit: str = "tokens", every: str = "day") -> Budget:
    return Budget.objects.create(project=key.project, unit=unit, every=every, amount=amount)


def held(budget: Budget) -> float:
    return float(budget.spends.latest("start").reserved)  # There is one of today, too.


def test_the_estimate_is_reserved(api_key: Key) -> None:
    key = api_key[0]
    tokens, money = make(key, 100), make(key, 1, "cost", "month")
    reserve(key.project_id, key.pk, estimate(30, "0.25"), NOW)
    reserve(key.project_id, key.pk, estimate(40, "0.25"), NOW)
    assert (held(tokens), held(money)) == (70, 0.5)


def test_a_request_over_the_rest_of_a_budget_is_refused_and_reserves_nothing(api_key: Key) -> None:
    key = api_key[0]
    wide, narrow = make(key, 1000, every="month"), make(key, 100)
    reserve(key.project_id, key.pk, estimate(60), NOW)
    with pytest.raises(BudgetExhausted, match="100 tokens a day") as caught:
        reserve(key.project_id, key.pk, estimate(41), NOW)
    assert caught.value.retry_after_s == 3600
    assert (held(wide), held(narrow)) == (60, 60)
    reserve(key.project_id, key.pk, estimate(40), NOW)


def test_a_request_larger_than_the_rest_runs_if_nothing_else_is_in_flight(api_key: Key) -> None:
    key = api_key[0]
    budget = make(key, 100)
    BudgetSpend.objects.create(budget=budget, start=NOW.date(), spent=99)
    reserve(key.project_id, key.pk, estimate(500), NOW)
    with pytest.raises(BudgetExhausted):
        reserve(key.project_id, key.pk, estimate(1), NOW)


@pytest.mark.parametrize("spent", [100, 101])
def test_a_used_up_budget_refuses_everything(api_key: Key, spent: int) -> None:
    key = api_key[0]
    budget = make(key, 100)
    BudgetSpend.objects.create(budget=budget, start=NOW.date(), spent=spent)
    with pytest.raises(BudgetExhausted):
        reserve(key.project_id, key.pk, estimate(1), NOW)


def test_a_budget_of_zero_refuses_everything(api_key: Key) -> None:
    key = api_key[0]
    make(key, 0)
    with pytest.raises(BudgetExhausted):
        reserve(key.project_id, key.pk, estimate(1), NOW)


def test_the_next_period_is_a_new_one(api_key: Key) -> None:
    key = api_key[0]
    make(key, 10)
    reserve(key.project_id, key.pk, estimate(10), NOW)
    reserve(key.project_id, key.pk, estimate(10), NOW + dt.timedelta(hours=1))


def test_budgets_of_other_keys_and_projects_do_not_change(api_key: Key, project: Project) -> None:
    key = api_key[0]
    other = ApiKey.objects.create(project=project, name="other")
    stranger = Project.objects.create(name="stranger")
    for owner in ({"project": project, "api_key": other}, {"project": stranger}):
        Budget.objects.create(unit="tokens", every="day", amount=0, **owner)
    reserve(key.project_id, key.pk, estimate(10), NOW)
    assert not BudgetSpend.objects.filter(reserved__gt=0).exists()


def test_periods_begin_and_end_with_days_and_months_of_utc() -> None:
    east = NOW.astimezone(dt.timezone(dt.timedelta(hours=9)))  # Already the next year there.
    assert period_start("day", east) == dt.date(2026, 12, 31)
    assert period_start("month", east) == dt.date(2026, 12, 1)
    new_year = dt.datetime(2027, 1, 1, tzinfo=dt.UTC)
    assert period_end("day", east) == period_end("month", east) == new_year
    february = dt.datetime(2027, 2, 10, tzinfo=dt.UTC)
    assert period_end("month", february) == dt.datetime(2027, 3, 1, tzinfo=dt.UTC)
