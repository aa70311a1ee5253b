"""Budgets: reserving is all or nothing, and never more than what is left."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection, transaction

from inference_site.accounts.budgets import (
    BudgetExhausted,
    Estimate,
    Spent,
    period_end,
    period_start,
    replace_budgets,
    reserve,
    spent_of,
)
from inference_site.accounts.models import ApiKey, Budget, BudgetSpend, Project
from tests.waiting import wait_for_a_wait

Key = tuple[ApiKey, str]
NOW = dt.datetime(2099, 12, 31, 23, 0, tzinfo=dt.UTC)
"""In periods that have not begun: a new budget has the spend of those of today."""


def estimate(tokens: int, cost: str = "0") -> Estimate:
    return Estimate(tokens, Decimal(cost))


def make(
    key: ApiKey, amount: Any, unit: str = "tokens", every: str = "day", each: str = ""
) -> Budget:
    fields: dict[str, Any] = {"created_at": NOW - dt.timedelta(days=99), "each": each}
    return Budget.objects.create(
        project=key.project, unit=unit, every=every, amount=amount, **fields
    )


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
    with pytest.raises(BudgetExhausted, match="reserve the rest of the budget of 100") as caught:
        reserve(key.project_id, key.pk, estimate(41), NOW)
    assert (caught.value.is_used_up, caught.value.retry_after_s) == (False, 1)
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
    with pytest.raises(BudgetExhausted, match="100 tokens a day is used up") as caught:
        reserve(key.project_id, key.pk, estimate(1), NOW)
    assert (caught.value.is_used_up, caught.value.retry_after_s) == (True, 3600)


def test_of_several_budgets_the_one_that_refuses_longest_says_when(api_key: Key) -> None:
    key = api_key[0]
    now = NOW.replace(day=15)
    reserved, day, month = make(key, 9, "cost"), make(key, 5), make(key, 7, every="month")
    BudgetSpend.objects.create(budget=reserved, start=now.date(), spent=8, reserved=1)
    BudgetSpend.objects.create(budget=day, start=now.date(), spent=5)
    BudgetSpend.objects.create(budget=month, start=now.date().replace(day=1), spent=7)
    with pytest.raises(BudgetExhausted, match="7 tokens a month") as caught:
        reserve(key.project_id, key.pk, estimate(2, "1"), now)
    assert caught.value.retry_after_s == (16 * 24 + 1) * 3600


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


def test_a_budget_that_is_newer_than_a_request_holds_nothing_of_it(api_key: Key) -> None:
    """Accounting releases nothing there; a clock that is set back would hold it for a month."""
    key = api_key[0]
    budget = make(key, 100)
    reserve(key.project_id, key.pk, estimate(30), budget.created_at - dt.timedelta(seconds=1))
    assert not BudgetSpend.objects.filter(reserved__gt=0).exists()
    reserve(key.project_id, key.pk, estimate(30), budget.created_at)
    assert budget.spends.get(start=budget.created_at.date()).reserved == 30


def test_periods_begin_and_end_with_days_and_months_of_utc() -> None:
    east = NOW.astimezone(dt.timezone(dt.timedelta(hours=9)))  # Already the next year there.
    assert period_start("day", east) == dt.date(2099, 12, 31)
    assert period_start("month", east) == dt.date(2099, 12, 1)
    new_year = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
    assert period_end("day", east) == period_end("month", east) == new_year
    february = dt.datetime(2100, 2, 10, tzinfo=dt.UTC)
    assert period_end("month", february) == dt.datetime(2100, 3, 1, tzinfo=dt.UTC)


def test_a_budget_for_each_end_user_bounds_each_on_their_own(api_key: Key) -> None:
    key = api_key[0]
    budget = Budget.objects.create(
        project=key.project, each="user", unit="tokens", every="day", amount=100
    )
    reserve(key.project_id, key.pk, estimate(90), NOW, {"user": "ann"})
    reserve(key.project_id, key.pk, estimate(90), NOW, {"user": "bob", "tag:team": "red"})
    with pytest.raises(BudgetExhausted, match="100 tokens a day for each end user"):
        reserve(key.project_id, key.pk, estimate(20), NOW, {"user": "ann"})
    reserve(key.project_id, key.pk, estimate(900), NOW)
    reserve(key.project_id, key.pk, estimate(900), NOW, {"tag:team": "red"})
    reserved = dict(budget.spends.filter(start=NOW.date()).values_list("value", "reserved"))
    assert reserved == {"ann": 90, "bob": 90}


def test_an_end_user_over_their_budget_reserves_nothing_of_the_project(api_key: Key) -> None:
    key = api_key[0]
    whole = make(key, 1000)
    Budget.objects.create(project=key.project, each="user", unit="tokens", every="day", amount=0)
    with pytest.raises(BudgetExhausted):
        reserve(key.project_id, key.pk, estimate(1), NOW, {"user": "ann"})
    assert not BudgetSpend.objects.filter(budget=whole, reserved__gt=0).exists()


def test_a_budget_for_each_value_of_a_tag_and_of_one_key(api_key: Key, project: Project) -> None:
    key = api_key[0]
    other = ApiKey.objects.create(project=project, name="other")
    for owner, amount in ((None, 1000), (key, 50)):
        fields: dict[str, Any] = {"project": project, "api_key": owner, "amount": amount}
        Budget.objects.create(each="tag:team", unit="tokens", every="day", **fields)
    reserve(key.project_id, key.pk, estimate(50), NOW, {"tag:team": "red"})
    with pytest.raises(BudgetExhausted, match="for each team"):
        reserve(key.project_id, key.pk, estimate(1), NOW, {"tag:team": "red"})
    reserve(key.project_id, key.pk, estimate(50), NOW, {"tag:team": "blue"})
    reserve(key.project_id, other.pk, estimate(900), NOW, {"tag:team": "red"})


def test_a_budget_of_a_model_counts_its_requests_beside_the_budget_of_all(api_key: Key) -> None:
    key = api_key[0]
    whole = make(key, 1000)
    large = {"model": "large", "unit": "tokens", "every": "day"}
    of_model = Budget.objects.create(project=key.project, amount=100, **large)
    of_each = Budget.objects.create(project=key.project, amount=70, each="user", **large)
    reserve(key.project_id, key.pk, estimate(60), NOW, {"user": "ann"}, "large")
    reserve(key.project_id, key.pk, estimate(300), NOW, {"user": "ann"}, "small")
    with pytest.raises(BudgetExhausted, match="70 tokens a day for the model large for each end"):
        reserve(key.project_id, key.pk, estimate(20), NOW, {"user": "ann"}, "large")
    with pytest.raises(BudgetExhausted, match="100 tokens a day for the model large"):
        reserve(key.project_id, key.pk, estimate(50), NOW, {"user": "bob"}, "large")
    found = {one: sum(one.spends.values_list("reserved", flat=True)) for one in (whole, of_model)}
    assert found == {whole: 360, of_model: 60}
    assert dict(of_each.spends.values_list("value", "reserved"))["ann"] == 60


def test_the_highest_of_many_is_shown_and_how_many_have_used_it_up(api_key: Key) -> None:
    key = api_key[0]
    each = Budget.objects.create(
        project=key.project, each="user", unit="tokens", every="day", amount=100
    )
    plain = make(key, 1000, every="month")
    for value, spent in (("ann", 120), ("bob", 100), ("cyd", 5)):
        BudgetSpend.objects.create(budget=each, start=NOW.date(), value=value, spent=spent)
    BudgetSpend.objects.create(budget=plain, start=dt.date(2099, 12, 1), spent=7)
    yesterday = NOW.date() - dt.timedelta(days=1)
    BudgetSpend.objects.create(budget=each, start=yesterday, value="dan", spent=900)
    found = spent_of([each, plain], NOW)
    assert found == {each.pk: Spent(Decimal(120), 2), plain.pk: Spent(Decimal(7), 0)}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("same", [True, False])
def test_requests_that_come_at_once_exceed_no_budget_of_an_end_user(same: bool) -> None:
    key = ApiKey.objects.create(project=Project.objects.create(name="p"), name="k")
    for unit in ("tokens", "cost"):
        Budget.objects.create(project=key.project, each="user", unit=unit, every="day", amount=100)
    accepted: list[str] = []

    def work(number: int) -> None:
        user = "ann" if same else f"user {number}"
        for _ in range(5):
            with contextlib.suppress(BudgetExhausted), transaction.atomic():
                reserve(key.project_id, key.pk, estimate(30, "30"), NOW, {"user": user})
                accepted.append(user)
        connection.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(Counter(accepted).values()) == {3}
    assert len(set(accepted)) == (1 if same else 8)
    assert set(BudgetSpend.objects.values_list("reserved", flat=True)) == {90}


@pytest.mark.django_db(transaction=True)
def test_a_request_is_accepted_while_one_of_its_budgets_is_deleted() -> None:
    """Its commit failed for the counter of a budget that was gone by then."""
    key = ApiKey.objects.create(project=Project.objects.create(name="p"), name="k")
    kept, deleted = make(key, 100), make(key, 100, every="month")
    with transaction.atomic():
        reserve(key.project_id, key.pk, estimate(1), NOW)  # Now there are counters.

    def work() -> None:
        with transaction.atomic():
            reserve(key.project_id, key.pk, estimate(30), NOW)
        connection.close()

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            deleted.delete()
            request = threads.submit(work)
            wait_for_a_wait()
        request.result(30)
    assert held(kept) == 31


@pytest.mark.django_db(transaction=True)
def test_a_new_budget_is_deleted_while_requests_reserve_in_it() -> None:
    key = ApiKey.objects.create(project=Project.objects.create(name="p"), name="k")
    budget = make(key, 100)

    def work() -> None:
        budget.delete()
        connection.close()

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            reserve(key.project_id, key.pk, estimate(30), NOW)  # It adds the counter.
            deletion = threads.submit(work)
            wait_for_a_wait()
        deletion.result(30)
    assert not Budget.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_request_holds_no_counter_while_it_waits_for_the_row_of_another() -> None:
    """Whoever adds that row, such as accounting, locks both after that: it was a deadlock."""
    key = ApiKey.objects.create(project=Project.objects.create(name="p"), name="k")
    whole, each = make(key, 100), make(key, 100, each="user")
    BudgetSpend.objects.create(budget=whole, start=NOW.date())

    def work() -> None:
        with transaction.atomic():
            reserve(key.project_id, key.pk, estimate(30), NOW, {"user": "ann"})
        connection.close()

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            BudgetSpend.objects.create(budget=each, start=NOW.date(), value="ann")
            request = threads.submit(work)
            wait_for_a_wait()
            assert len(BudgetSpend.objects.filter(start=NOW.date()).select_for_update()) == 2
        request.result(30)
    assert {spend.reserved for spend in BudgetSpend.objects.filter(start=NOW.date())} == {30}


@pytest.mark.django_db(transaction=True)
def test_a_change_of_several_budgets_holds_no_counter_while_it_waits_for_a_budget() -> None:
    """A reservation locks the budgets, then their counters: it was a deadlock."""
    key = ApiKey.objects.create(project=Project.objects.create(name="p"), name="k")
    kept, ending = make(key, 100), make(key, 100, every="month")

    def work() -> None:
        with transaction.atomic():
            kept.amount = Decimal(50)
            kept.save()
            ending.delete()
        connection.close()

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT FROM accounts_budget WHERE id = %s FOR KEY SHARE", [ending.pk])
            changing = threads.submit(work)
            wait_for_a_wait()
            assert kept.spends.select_for_update().get().spent == 0
        changing.result(30)
    assert [budget.amount for budget in Budget.objects.all()] == [50]


@pytest.mark.django_db(transaction=True)
def test_a_change_of_several_budgets_locks_their_counters_in_the_order_of_reservations() -> None:
    """The counter of a month is older than that of a day, but its budget may be the newer one."""
    key = ApiKey.objects.create(project=Project.objects.create(name="p"), name="k")
    daily, monthly = make(key, 100), make(key, 100, every="month")
    today = daily.spends.get()
    today.delete()
    daily.spends.create(start=today.start)  # As on each day but the first of a month.

    def work() -> None:
        with transaction.atomic():
            for budget in (daily, monthly):
                budget.amount += 1
                budget.save()
        connection.close()

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            assert monthly.spends.select_for_update().get()
            changing = threads.submit(work)
            wait_for_a_wait()
            assert daily.spends.select_for_update().first()
        changing.result(30)
    assert {budget.amount for budget in Budget.objects.all()} == {101}


def test_a_new_amount_keeps_what_is_spent_without_counting_the_month(api_key: Key) -> None:
    """The log has no usage here, so a count would find none."""
    budget = make(api_key[0], 100)
    budget.spends.update(spent=40)
    replace_budgets(budget.project_id, None, {("", "", "tokens", "day"): Decimal(50)})
    assert budget.spends.get().spent == 40
    assert Budget.objects.get().amount == 50
