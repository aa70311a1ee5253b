"""The pages of keys and projects: spend, budgets, limits in use and recent errors."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django.fixtures import Settings

from inference_site.accounts.budgets import period_start
from inference_site.accounts.models import ApiKey, Budget, BudgetSpend
from inference_site.core.admin_pages.labels import milliseconds, money
from inference_site.runs.models import Status
from tests.generations.rows import create_generation

Key = tuple[ApiKey, str]


@pytest.fixture
def busy(api_key: Key) -> ApiKey:
    """A key with a budget that is nearly spent, of whose two runs one is running."""
    key = api_key[0]
    ApiKey.objects.filter(pk=key.pk).update(
        concurrent_runs=4, requests_per_minute=50, priority_requests_per_minute=7
    )
    budget = Budget.objects.create(project=key.project, unit="cost", every="month", amount=20)
    start = period_start(Budget.Every.MONTH, timezone.now())
    spent = {"spent": Decimal("17.5")}
    BudgetSpend.objects.update_or_create(budget=budget, start=start, defaults=spent)
    create_generation(key, status=Status.RUNNING)
    failed = {"status": Status.FAILED, "finished_at": timezone.now()}
    create_generation(key, error_code="model_error", **failed)
    return key


def test_the_pages_of_a_key_and_its_project_show_what_is_used(admin: Client, busy: ApiKey) -> None:
    for kind, pk in (("apikey", busy.pk), ("project", busy.project_id)):
        text = admin.get(f"/admin/accounts/{kind}/{pk}/change/").content.decode()
        assert "17.50 USD</strong> of 20.00 USD (87 %)" in text
        assert "model_error" in text
        assert "Last 30 days" in text
    text = admin.get(f"/admin/accounts/apikey/{busy.pk}/change/").content.decode()
    assert "1</strong> of 4 (25 %)" in text
    assert "Requests in this minute: <strong>0</strong> of 50 (0 %)" in text
    assert "Priority requests in this minute: <strong>0</strong> of 7 (0 %)" in text
    assert f"/admin/requests/?status=refused&amp;key={busy.pk}" in text
    assert "Recent errors" not in admin.get("/admin/accounts/apikey/add/").content.decode()


@pytest.mark.parametrize("limit", ["concurrent_runs", "requests_per_minute", "tokens_per_minute"])
def test_a_limit_of_zero_is_refused_at_its_field_beside_the_limits_that_hold(
    admin: Client, busy: ApiKey, limit: str
) -> None:
    for kind, pk in (("apikey", busy.pk), ("project", busy.project_id)):
        answer = admin.post(f"/admin/accounts/{kind}/{pk}/change/", {limit: "0"})
        assert answer.status_code == 200
        assert limit in answer.context["adminform"].form.errors
        if kind == "apikey":
            text = answer.content.decode()
            assert "1</strong> of 4 (25 %)" in text
            assert "Requests in this minute: <strong>0</strong> of 50 (0 %)" in text


def test_a_budget_says_what_its_fields_are_and_where_it_is_added(
    admin: Client, busy: ApiKey
) -> None:
    text = admin.get(f"/admin/accounts/project/{busy.project_id}/change/").content.decode()
    for name in ("API key", "Unit", "Every", "Amount"):
        assert f'aria-label="{name}"' in text
    assert 'value="20"' in text, "without zeros at its end"
    assert '<option value="" selected>all keys</option>' in text
    Budget.objects.all().delete()
    listed = admin.get("/admin/accounts/budget/").content.decode()
    assert "No budgets yet" in listed
    assert "A budget is added on the page of its project." in listed


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (None, "—"),
        (999.4, "999 ms"),
        (999.6, "1.00 s"),
        (9_996, "10.0 s"),
        (99_960, "100 s"),
        (1_000_000, "1,000 s"),
    ],
)
def test_a_time_has_three_digits(ms: float | None, shown: str) -> None:
    assert milliseconds(ms) == shown


def test_who_may_not_see_usage_or_generations_does_not_see_them_here(
    staff: Callable[..., Client], busy: ApiKey
) -> None:
    text = staff("accounts.view_apikey").get(f"/admin/accounts/apikey/{busy.pk}/change/")
    assert "model_error" not in text.content.decode()
    assert "Last 30 days" not in text.content.decode()


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "0.00 EUR"),
        (Decimal("1234.5"), "1,234.50 EUR"),
        (0.0000012, "0.0000012 EUR"),
        (0.009, "0.009 EUR"),
        (Decimal("0.01"), "0.01 EUR"),
    ],
)
def test_money_has_one_format(settings: Settings, amount: float, shown: str) -> None:
    settings.CURRENCY = "EUR"
    assert money(amount) == shown
