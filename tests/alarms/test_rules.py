"""Rules: what raises an alarm, what does not, and when it is over."""

from __future__ import annotations

import datetime as dt
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, connections, transaction
from django.test import Client
from django.utils import timezone

from inference_site.accounts.budgets import begun_at, current_starts, period_start
from inference_site.accounts.models import ApiKey, Budget, BudgetSpend
from inference_site.console.alarms import evaluation
from inference_site.console.alarms.evaluation import evaluate, spent_above
from inference_site.console.alarms.models import Alarm, Rule, RuleKind
from inference_site.core.storage import postgresql
from inference_site.outbox.models import Endpoint, Message
from inference_site.runs.models import ServiceClass, Status
from inference_site.runs.usage.models import LatencyHistogram, Period, UsageRollup, bucket_of
from inference_site.runs.usage.queries import floor
from tests.generations.rows import create_generation

pytestmark = [pytest.mark.django_db, pytest.mark.redis]
Key = tuple[ApiKey, str]


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> None:
    evaluation._usage_of_week_before.cache_clear()
    evaluation._ttft_p95_of_week_before.cache_clear()


def only(kind: RuleKind, bound: float, factor: float = 0) -> Rule:
    """Leave one rule."""
    Rule.objects.all().delete()
    return Rule.objects.create(kind=kind, bound=bound, factor=factor)


def firing() -> list[str]:
    evaluate()
    return [alarm.subject for alarm in Alarm.objects.filter(resolved_at=None).order_by("pk")]


def test_a_new_site_has_a_rule_of_each_kind() -> None:
    assert set(Rule.objects.values_list("kind", flat=True)) == set(RuleKind.values)
    budgets = Rule.objects.filter(kind=RuleKind.BUDGET).values_list("bound", flat=True)
    assert list(budgets) == [80, 100]


def test_what_waits_for_a_model_without_a_worker_raises_two_alarms(api_key: Key) -> None:
    only(RuleKind.NO_WORKER, 10)
    Rule.objects.create(kind=RuleKind.QUEUE_WAIT, bound=60)
    create_generation(api_key[0], model="fresh")
    for seconds, model in ((30, "young"), (90, "old")):
        at = timezone.now() - dt.timedelta(seconds=seconds)
        create_generation(api_key[0], model=model, created_at=at)
    assert sorted(firing()) == ["old", "old", "young"]


def test_an_alarm_begins_once_and_ends_when_it_has_been_over_for_a_while(
    api_key: Key, monkeypatch: Any
) -> None:
    only(RuleKind.QUEUE_WAIT, 1)
    Endpoint.objects.create(way="email", address="ops@example.org")
    at = timezone.now() - dt.timedelta(seconds=90)
    row = create_generation(api_key[0], created_at=at)
    assert firing() == firing() == ["m"]
    row.delete()
    assert firing() == ["m"]  # It may come back.
    assert Message.objects.count() == 1
    monkeypatch.setattr(evaluation, "RESOLVED_AFTER_S", -1)
    assert firing() == []
    assert Alarm.objects.count() == 1
    told = Message.objects.order_by("pk").values_list("event_type", flat=True)
    assert list(told) == ["alarm.firing", "alarm.resolved"]


def test_an_alarm_ends_although_the_clock_was_set_back(api_key: Key) -> None:
    only(RuleKind.QUEUE_WAIT, 1)
    row = create_generation(api_key[0], created_at=timezone.now() - dt.timedelta(seconds=90))
    assert firing() == ["m"]
    row.delete()
    Alarm.objects.update(seen_at=timezone.now() + dt.timedelta(hours=2))
    assert firing() == []


def test_a_rule_that_is_turned_off_ends_its_alarms(api_key: Key) -> None:
    rule = only(RuleKind.QUEUE_WAIT, 1)
    create_generation(api_key[0], created_at=timezone.now() - dt.timedelta(seconds=90))
    assert firing() == ["m"]
    Rule.objects.filter(pk=rule.pk).update(is_enabled=False)
    assert firing() == []


def test_a_rule_that_cannot_be_evaluated_leaves_its_alarm_and_stops_no_other(
    api_key: Key, monkeypatch: Any
) -> None:
    only(RuleKind.QUEUE_WAIT, 1)
    Rule.objects.create(kind=RuleKind.DISK, bound=0)
    create_generation(api_key[0], created_at=timezone.now() - dt.timedelta(seconds=90))
    assert "m" in firing()
    before = Alarm.objects.count()

    def away(rule: Rule) -> Any:
        # The statement timeout ends it; the transaction of this test goes on.
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(9)")

    monkeypatch.setitem(evaluation._CONDITIONS, RuleKind.QUEUE_WAIT, away)
    monkeypatch.setattr(evaluation, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(postgresql, "_process_timeout_s", 30.0)
    monkeypatch.setattr(evaluation, "RESOLVED_AFTER_S", -1)
    assert "m" in firing()
    assert Alarm.objects.filter(resolved_at=None).count() == before


def used(key: ApiKey, at: dt.datetime, period: Period, ttft_ms: float, **sums: int) -> None:
    shared = {
        "period": period,
        "start": floor(at, period),
        "project_id": key.project_id,
        "api_key_id": key.pk,
        "model": "m",
    }
    UsageRollup.objects.create(**shared, **sums)
    count = sums["requests"]
    bucket = bucket_of(ttft_ms)
    every = {"project_id": LatencyHistogram.EVERY, "api_key_id": LatencyHistogram.EVERY}
    LatencyHistogram.objects.create(
        **{**shared, **every}, measure="ttft", bucket=bucket, count=count
    )


@pytest.mark.parametrize(
    ("failed", "ttft_ms", "expected"),
    [
        (5, 900, []),  # Below the bounds.
        (25, 900, []),  # More than 10 %, but not three times the usual 9 %.
        (40, 900, [RuleKind.ERRORS]),
        (5, 6000, [RuleKind.TTFT]),  # More than three times the usual second.
        (40, 6000, [RuleKind.ERRORS, RuleKind.TTFT]),
    ],
)
def test_errors_and_first_tokens_are_compared_with_the_week_before(
    api_key: Key, failed: int, ttft_ms: float, expected: list[RuleKind]
) -> None:
    only(RuleKind.ERRORS, 10, 3)
    Rule.objects.create(kind=RuleKind.TTFT, bound=2000, factor=3)
    now = timezone.now()
    used(api_key[0], now - dt.timedelta(days=2), Period.DAY, 1000, requests=1000, failed=90)
    used(api_key[0], now, Period.MINUTE, ttft_ms, requests=100, failed=failed)
    answered(api_key[0], wait_ms=10, since_claim_ms=ttft_ms)
    evaluate()
    assert sorted(Alarm.objects.values_list("rule__kind", flat=True)) == sorted(expected)


@pytest.mark.parametrize(
    ("code", "fires"), [("model_error", True), ("context_length_exceeded", False)]
)
def test_requests_that_a_worker_found_invalid_are_no_errors_of_the_model(
    api_key: Key, code: str, fires: bool
) -> None:
    only(RuleKind.ERRORS, 10, 3)
    now = timezone.now()
    used(api_key[0], now, Period.MINUTE, 900, requests=100, failed=40)
    for _ in range(35):
        create_generation(api_key[0], status=Status.FAILED, finished_at=now, error_code=code)
    assert firing() == (["m"] if fires else [])


def test_the_alert_of_prometheus_leaves_out_the_same_failures() -> None:
    text = (settings.BASE_DIR / "deploy/prometheus/alerts.yml").read_text()
    [left_out] = re.findall(r'failed",error_code!~"([^"]*)"', text)
    assert sorted(left_out.split("|")) == sorted(evaluation._INVALID)


def answered(key: ApiKey, wait_ms: float, since_claim_ms: float, **fields: Any) -> None:
    """Have enough requests answered that waited in the queue and then for their first tokens."""
    at = timezone.now() - dt.timedelta(seconds=60)
    claimed_at = at + dt.timedelta(milliseconds=wait_ms)
    first_token_at = claimed_at + dt.timedelta(milliseconds=since_claim_ms)
    times = {"created_at": at, "claimed_at": claimed_at, "first_token_at": first_token_at}
    for _ in range(20):
        create_generation(key, status=Status.RUNNING, **times, **fields)


@pytest.mark.parametrize(
    ("usual_ms", "wait_ms", "since_claim_ms", "fields", "fires"),
    [
        (1000, 10, 6000, {}, True),
        (0, 10, 6000, {}, False),  # Without requests in the week before, nothing is usual.
        (1000, 6000, 10, {}, False),  # They waited in the queue: that has rules of its own.
        (1000, 10, 6000, {"service_class": ServiceClass.BACKGROUND}, False),  # No client waits.
    ],
)
def test_first_tokens_are_late_if_clients_wait_for_the_model_and_not_for_a_slot(
    api_key: Key,
    usual_ms: float,
    wait_ms: float,
    since_claim_ms: float,
    fields: dict[str, Any],
    fires: bool,
) -> None:
    only(RuleKind.TTFT, 2000, 3)
    now = timezone.now()
    if usual_ms:
        used(api_key[0], now - dt.timedelta(days=2), Period.DAY, usual_ms, requests=1000)
    used(api_key[0], now, Period.MINUTE, wait_ms + since_claim_ms, requests=100)
    answered(api_key[0], wait_ms, since_claim_ms, **fields)
    assert firing() == (["m"] if fires else [])


def test_a_few_requests_say_nothing_of_a_rate(api_key: Key) -> None:
    only(RuleKind.ERRORS, 10)
    used(api_key[0], timezone.now(), Period.MINUTE, 9, requests=19, failed=19)
    assert firing() == []


def test_a_budget_raises_an_alarm_at_80_and_at_100_percent(api_key: Key) -> None:
    only(RuleKind.BUDGET, 80)
    Rule.objects.create(kind=RuleKind.BUDGET, bound=100)
    budget = Budget.objects.create(
        project_id=api_key[0].project_id, unit="tokens", every="day", amount=Decimal(200)
    )
    start = period_start("day", timezone.now())
    spend, _ = BudgetSpend.objects.get_or_create(budget=budget, start=start)
    found = []
    for spent in (159, 160, 200):
        BudgetSpend.objects.filter(pk=spend.pk).update(spent=spent)
        found.append(len(firing()))
    assert found == [0, 1, 2]
    text = Alarm.objects.order_by("-pk")[0].text
    assert text == "owner: 100 % of 200 tokens a day is spent."


def test_budgets_are_found_by_their_period_among_all_that_were_spent() -> None:
    current = BudgetSpend.objects.filter(begun_at(current_starts(timezone.now())))
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        assert "budget_spend_by_start" in spent_above(current, 80, None, None).explain()


def test_a_name_from_right_to_left_does_not_reorder_the_text_of_an_alarm(api_key: Key) -> None:
    only(RuleKind.BUDGET, 80)
    project, name = api_key[0].project, "\u0645\u0634\u0631\u0648\u0639"
    project.name = name
    project.save()
    budget = Budget.objects.create(project=project, unit="tokens", every="day", amount=200)
    start = period_start("day", timezone.now())
    BudgetSpend.objects.update_or_create(budget=budget, start=start, defaults={"spent": 200})
    assert len(firing()) == 1
    assert Alarm.objects.get().text == f"\u2068{name}\u2069: 100 % of 200 tokens a day is spent."
    only(RuleKind.QUEUE_WAIT, 1)
    Rule.objects.update(project=project)
    create_generation(api_key[0], created_at=timezone.now() - dt.timedelta(seconds=90))
    assert len(firing()) == 1
    assert f" of project \u2068{name}\u2069 has waited" in Alarm.objects.latest("pk").text


def test_full_disks_and_a_full_redis_raise_alarms(settings: Any, tmp_path: Path) -> None:
    only(RuleKind.DISK, 0)
    Rule.objects.create(kind=RuleKind.REDIS_MEMORY, bound=0)
    assert {"DATA_DIR", "MODELS_DIR"} <= set(firing())
    settings.FILES_DIR = str(tmp_path)
    assert "FILES_DIR" in firing()


def test_of_two_beats_at_one_moment_one_evaluates(api_key: Key) -> None:
    only(RuleKind.QUEUE_WAIT, 1)
    create_generation(api_key[0], created_at=timezone.now() - dt.timedelta(seconds=90))
    other = connections["default"].copy()
    try:
        with other.cursor() as cursor:
            cursor.execute(f"SELECT pg_advisory_lock({0x1F5A0004})")
        assert firing() == []
    finally:
        with other.cursor() as cursor:
            cursor.execute(f"SELECT pg_advisory_unlock({0x1F5A0004})")
        other.close()
    assert firing() == ["m"]


def test_the_home_page_says_what_fires_in_red_and_that_nothing_does(
    admin: Client, api_key: Key
) -> None:
    only(RuleKind.QUEUE_WAIT, 1)
    assert "no alarms" in admin.get("/admin/").content.decode()
    at = timezone.now() - dt.timedelta(seconds=90)
    create_generation(api_key[0], model="<b>", created_at=at)
    evaluate()
    page = admin.get("/admin/").content.decode()
    assert "1 alarm firing" in page
    assert "1 request for &lt;b&gt; has waited" in page


def test_a_budget_that_has_passed_two_rules_is_told_once(admin: Client) -> None:
    for bound in (80, 100):
        rule, _ = Rule.objects.get_or_create(kind=RuleKind.BUDGET, bound=bound)
        Alarm.objects.create(rule=rule, subject="shop", text="Shop: 105 % is spent.")
    page = admin.get("/admin/").content.decode()
    assert "1 alarm firing" in page
    assert page.count("Shop: 105 % is spent.") == 2  # In the banner, and in the bell's list.


def test_an_endpoint_has_an_address_of_its_way(admin: Client) -> None:
    form = {"is_enabled": "on", "secret": "whsec_YQ=="}
    for way, address in (("email", "https://x.org"), ("webhook", "ops@x.org"), ("webhook", "a b")):
        answer = admin.post("/admin/outbox/endpoint/add/", {**form, "way": way, "address": address})
        assert answer.status_code == 200, (way, address)
    good = {**form, "way": "webhook", "address": "https://example.org/hook"}
    assert admin.post("/admin/outbox/endpoint/add/", good).status_code == 302


def test_an_endpoint_has_a_secret_that_can_sign(admin: Client) -> None:
    form = {"is_enabled": "on", "way": "webhook", "address": "https://example.org/hook"}
    for secret in ("geheim", "whsec_", "whsec_geheim"):
        page = admin.post("/admin/outbox/endpoint/add/", {**form, "secret": secret})
        assert page.status_code == 200, secret
        assert "whsec_ and then base64" in page.content.decode()


def test_an_action_on_endpoints_is_for_all_that_are_chosen(admin: Client) -> None:
    hooks = [
        Endpoint.objects.create(way=Endpoint.Way.WEBHOOK, address=f"https://example.org/{number}")
        for number in range(25)
    ]
    chosen = {"_selected_action": [hook.pk for hook in hooks]}
    admin.post("/admin/outbox/endpoint/", {"action": "test", **chosen})
    assert Message.objects.count() == 25
    shown = admin.post("/admin/outbox/endpoint/", {"action": "rotate", **chosen})
    assert len(shown.context["secrets"]) == 25
