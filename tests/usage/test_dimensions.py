"""Usage by end user and by tag: it adds up, stays bounded, and is forgotten."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.utils import timezone

from inference_site.accounts.budgets import BudgetExhausted, Estimate, reserve
from inference_site.accounts.keys import create_key
from inference_site.accounts.models import END_USER, ApiKey, Budget, BudgetSpend, Project
from inference_site.core.site_settings import models as site_settings
from inference_site.core.site_settings.models import SiteSettings
from inference_site.runs.models import Generation, Status
from inference_site.runs.usage import dimensions
from inference_site.runs.usage.accounting import account
from inference_site.runs.usage.dimensions import Bound, bound, tags_of
from inference_site.runs.usage.models import (
    LONGEST_VALUE,
    OTHERS,
    DimensionRollup,
    Period,
    UsageRollup,
)
from inference_site.runs.usage.pruning import prune_old
from tests.generations.rows import create_generation

pytestmark = pytest.mark.django_db(transaction=True)  # ``--check`` compares in a snapshot.

Key = tuple[ApiKey, str]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    site_settings.forget()
    yield
    site_settings._last = SiteSettings()
    site_settings.forget()


@pytest.fixture
def other_key(db: None) -> ApiKey:
    return create_key(Project.objects.create(name="other"), "other")[0]


def set_site(**fields: Any) -> None:
    SiteSettings.objects.update_or_create(pk=1, defaults=fields)
    site_settings.forget()


def ended(key: ApiKey, age: dt.timedelta = dt.timedelta(), **fields: Any) -> Generation:
    end = timezone.now() - age
    usual = {"status": Status.COMPLETED, "created_at": end, "finished_at": end, "input_tokens": 10}
    return create_generation(key, **(usual | fields))


def check(*arguments: str) -> str:
    out = StringIO()
    call_command("usage", "--check", *arguments, stdout=out, stderr=StringIO())
    return out.getvalue()


def requests_by_value(dimension: str, period: Period = Period.DAY) -> dict[str, int]:
    rows = DimensionRollup.objects.filter(dimension=dimension, period=period)
    return dict(rows.values_list("value", "requests"))


def test_usage_is_counted_by_end_user_and_by_tag(api_key: Key) -> None:
    ended(api_key[0], end_user="ann", tags=["team=red", "stage=a=b"], cost=Decimal("0.5"))
    ended(api_key[0], end_user="ann", tags=["team=blue"])
    ended(api_key[0], end_user="bob", tags=["team=red"])
    ended(api_key[0])
    account()
    for period in Period:
        assert requests_by_value(END_USER, period) == {"ann": 2, "bob": 1}
        assert requests_by_value("tag:team", period) == {"red": 2, "blue": 1}
        assert requests_by_value("tag:stage", period) == {"a=b": 1}
    row = DimensionRollup.objects.get(period="day", value="ann")
    assert (row.completed, row.input_tokens, row.cost) == (2, 20, Decimal("0.5"))
    assert "add up" in check()


def test_a_counter_of_an_end_user_that_differs_is_named_and_rebuilt(api_key: Key) -> None:
    ended(api_key[0], end_user="ann")
    account()
    DimensionRollup.objects.filter(period="day").update(requests=7)
    with pytest.raises(CommandError, match="differ"):
        check()
    assert "add up" in check("--rebuild")


def test_only_the_chosen_keys_of_metadata_are_tags(db: None) -> None:
    given = {"team": "red\0", "secret": "x", "empty": ""}
    assert tags_of(given) == []
    set_site(usage_tags=["team", "empty", "absent"])
    assert tags_of(given) == ["team=red\ufffd"]
    assert tags_of(None) == []


def test_the_values_with_the_highest_costs_have_rows_and_the_others_are_added_up(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dimensions, "MOST_VALUES", 3)
    for number in range(10):
        ended(api_key[0], end_user=f"u{number}", cost=Decimal(number))
    account()
    step = Bound()
    step()
    step()
    expected = {"u9": 1, "u8": 1, "u7": 1, OTHERS: 7}
    for period in Period:
        assert requests_by_value(END_USER, period) == expected
    ended(api_key[0], end_user="u0", cost=Decimal("8.5"))
    account()
    step()
    assert requests_by_value(END_USER) == {"u9": 1, "u0": 1, "u8": 1, OTHERS: 8}
    total = UsageRollup.objects.get(period="day")
    rows = DimensionRollup.objects.filter(period="day")
    assert sum(row.cost for row in rows) == total.cost
    assert "add up" in check()
    check("--rebuild")
    assert requests_by_value(END_USER)["u0"] == 2, "the log has all of them"
    assert len(requests_by_value(END_USER)) == 4


def test_a_project_with_many_values_does_not_push_out_those_of_another(
    api_key: Key, other_key: ApiKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dimensions, "MOST_VALUES", 2)
    for number in range(9):
        ended(api_key[0], end_user=f"u{number}", cost=Decimal(5))
    ended(other_key, end_user="ann")
    account()
    bound()
    assert requests_by_value(END_USER)["ann"] == 1


def test_a_hundred_thousand_end_users_of_a_day_become_a_thousand_rows(api_key: Key) -> None:
    key = api_key[0]
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO usage_dimensionrollup (period, start, project_id, api_key_id, model,
                dimension, value, requests, completed, failed, cancelled, input_tokens,
                cached_tokens, output_tokens, reasoning_tokens, queue_ms, prefill_ms, decode_ms,
                cost)
            SELECT 'day', date_trunc('day', now(), 'UTC'), %s, %s, 'm', 'user', md5(n::text),
                1, 1, 0, 0, n, 0, 0, 0, 0, 0, 0, 0 FROM generate_series(1, 100000) n""",
            [key.project_id, key.pk],
        )
    bound()
    rows = DimensionRollup.objects.all()
    assert rows.count() == 1_001
    assert rows.get(value=OTHERS).requests == 99_000
    assert sum(rows.values_list("requests", flat=True)) == 100_000


@pytest.mark.parametrize("value", ["\U0001f9c0" * 512, "'; --", "%s", "=1+1", "\u202e", " " * 512])
def test_an_odd_value_is_counted(api_key: Key, value: str) -> None:
    ended(api_key[0], end_user=value, tags=[f"team={value}"])
    assert account()
    assert requests_by_value(END_USER) == {value[:LONGEST_VALUE]: 1}
    assert requests_by_value("tag:team") == {value[:LONGEST_VALUE]: 1}


def test_a_forgotten_end_user_is_not_counted_any_more_also_not_later(
    api_key: Key, other_key: ApiKey
) -> None:
    first = ended(api_key[0], end_user="ann")
    account()
    ended(api_key[0], end_user="ann", finished_at=first.finished_at)  # Not accounted yet.
    ended(api_key[0], end_user="bob")
    ended(other_key, end_user="ann")
    out = StringIO()
    call_command("forget", "--user", "ann", "--project", api_key[0].project.name, stdout=out)
    assert "3 counts of usage" in out.getvalue()
    account()
    rows = DimensionRollup.objects.filter(period="day").values_list("project", "value")
    assert set(rows) == {(api_key[0].project_id, "bob"), (other_key.project_id, "ann")}
    assert UsageRollup.objects.get(period="day", api_key=api_key[0]).requests == 3
    assert "add up" in check()
    call_command("forget", "--user", "ann", stdout=out)
    assert requests_by_value(END_USER) == {"bob": 1}
    with pytest.raises(CommandError, match="--user is not valid UTF-8"):
        call_command("forget", "--user", "m\udcfcller", stdout=out)


def test_what_commands_change_is_in_the_audit_log_without_the_end_user(api_key: Key) -> None:
    name = api_key[0].project.name
    call_command("forget", "--user", "ann", "--project", name, stdout=StringIO())
    call_command("forget", "--user", "ann", stdout=StringIO())
    check("--rebuild")
    entries = LogEntry.objects.order_by("pk").values_list("object_repr", "change_message")
    forgot = "manage.py forget deleted what was stored of an end user."
    rebuilt = ("Usage", "Rebuilt by manage.py usage.")
    assert list(entries) == [(name, forgot), ("All projects", forgot), rebuilt]


def test_end_users_are_kept_as_long_as_the_generations(api_key: Key) -> None:
    for days in (1, 9, 40):
        ended(api_key[0], dt.timedelta(days=days), end_user="ann")
    account()
    prune_old(threading.Event())
    assert DimensionRollup.objects.filter(period="day").count() == 3
    assert DimensionRollup.objects.filter(period="hour").count() == 2
    set_site(usage_log_days=5)
    prune_old(threading.Event())
    assert DimensionRollup.objects.filter(period="day").count() == 1
    assert DimensionRollup.objects.filter(period="hour").count() == 1
    assert UsageRollup.objects.filter(period="day").count() == 3
    assert "add up" in check()
    check("--rebuild")
    assert DimensionRollup.objects.filter(period="day").count() == 1


def budget(key: ApiKey, each: str, **fields: Any) -> Budget:
    usual = {"unit": "tokens", "every": "day", "amount": 100}
    return Budget.objects.create(project=key.project, each=each, **(usual | fields))


def spent(of: Budget) -> dict[str, int]:
    rows = BudgetSpend.objects.filter(budget=of, spent__gt=0)
    return {value: int(amount) for value, amount in rows.values_list("value", "spent")}


def test_budgets_for_each_count_what_each_has_used(api_key: Key) -> None:
    users, teams = budget(api_key[0], "user"), budget(api_key[0], "tag:team", every="month")
    whole = budget(api_key[0], "")
    ended(api_key[0], end_user="ann", tags=["team=a=b", "stage=x"], reserved_tokens=50)
    ended(api_key[0], end_user="bob")
    ended(api_key[0])
    account()
    assert (spent(users), spent(teams)) == ({"ann": 10, "bob": 10}, {"a=b": 10})
    assert spent(whole) == {"": 30}
    assert "add up" in check()
    BudgetSpend.objects.filter(value="ann").update(spent=99)
    with pytest.raises(CommandError, match="differ"):
        check()
    assert "add up" in check("--rebuild")
    assert spent(users)["ann"] == 10


def test_a_new_budget_for_each_starts_with_the_usage_of_its_period(api_key: Key) -> None:
    ended(api_key[0], end_user="ann")
    ended(api_key[0], dt.timedelta(days=1), end_user="ann")
    create_generation(api_key[0], end_user="cyd", reserved_tokens=7)
    account()
    users = budget(api_key[0], "user")
    assert spent(users) == {"ann": 10}
    users.each = "tag:team"
    users.save()
    assert spent(users) == {}
    assert "add up" in check()


def test_what_end_users_have_spent_is_deleted_after_its_period_and_when_they_are_forgotten(
    api_key: Key,
) -> None:
    users, whole = budget(api_key[0], "user"), budget(api_key[0], "")
    ended(api_key[0], end_user="ann")
    ended(api_key[0], end_user="bob")
    account()
    old = timezone.now().date() - dt.timedelta(days=4)
    for of, value in ((users, "ann"), (whole, "")):
        BudgetSpend.objects.create(budget=of, start=old, value=value, spent=5)
    prune_old(threading.Event())
    kept = BudgetSpend.objects.get(start=old)
    assert kept.budget == whole
    kept.delete()
    assert spent(users) == {"ann": 10, "bob": 10}
    call_command("forget", "--user", "ann", stdout=StringIO())
    assert spent(users) == {"bob": 10}
    assert "add up" in check()


def test_a_forgotten_end_user_begins_with_the_whole_budget(api_key: Key) -> None:
    key, now = api_key[0], timezone.now()
    budget(key, "user", amount=10)
    ended(key, end_user="ann")
    account()
    ann = {"user": "ann"}
    with pytest.raises(BudgetExhausted), transaction.atomic():
        reserve(key.project_id, key.pk, Estimate(1, Decimal(0)), now, ann)
    call_command("forget", "--user", "ann", stdout=StringIO())
    with transaction.atomic():
        reserve(key.project_id, key.pk, Estimate(1, Decimal(0)), now, ann)
