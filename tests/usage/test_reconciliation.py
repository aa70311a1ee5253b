"""``manage.py usage``: what is kept adds up to the log, and is made so when it does not."""

from __future__ import annotations

import csv
import datetime as dt
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.utils import timezone
from rest_framework.test import APIRequestFactory, force_authenticate

from inference_site.accounts.budgets import Estimate, reserve
from inference_site.accounts.keys import Caller, Limits
from inference_site.accounts.models import ApiKey, Budget, BudgetSpend, Project, Scope
from inference_site.core.domain.request import GenerationRequest, Message
from inference_site.gateway import usage_views
from inference_site.gateway.submission.admission import admit
from inference_site.runs.models import Generation, Status
from inference_site.runs.usage.accounting import account
from inference_site.runs.usage.models import KindRollup, LatencyHistogram, UsageRollup
from inference_site.runs.usage.pruning import prune_old
from inference_site.runs.usage.queries import usage_by
from tests.generations.rows import create_generation

pytestmark = pytest.mark.django_db(transaction=True)  # The comparison is a snapshot.

Key = tuple[ApiKey, str]


def usage(*arguments: str) -> str:
    out = StringIO()
    call_command("usage", *arguments, stdout=out, stderr=StringIO())
    return out.getvalue()


def fill(key: ApiKey, count: int = 60) -> None:
    dice = random.Random(count)
    now = timezone.now()
    for _ in range(count):
        end = now - dt.timedelta(seconds=dice.randrange(5 * 86_400))
        create_generation(
            key,
            model=dice.choice("ab"),
            status=dice.choice([Status.COMPLETED, Status.FAILED, Status.CANCELLED]),
            created_at=end - dt.timedelta(seconds=dice.random() * 30),
            claimed_at=end - dt.timedelta(seconds=dice.random()),
            first_token_at=end - dt.timedelta(seconds=dice.random()),
            finished_at=end,
            input_tokens=dice.randrange(1000),
            output_tokens=dice.randrange(1000),
            prefill_ms=dice.random() * 100,
            cost=Decimal(dice.randrange(10**9)) / 10**9,
        )


def test_roll_ups_and_budgets_match_the_usage_log(api_key: Key) -> None:
    Budget.objects.create(project=api_key[0].project, unit="tokens", every="month", amount=1)
    Budget.objects.create(project=api_key[0].project, unit="cost", every="day", amount=1)
    fill(api_key[0])
    assert "add up to the usage log" in usage("--check")
    assert UsageRollup.objects.exists()


@pytest.mark.parametrize("harm", ["usage", "latency", "missing", "spent", "too_much"])
def test_a_counter_that_differs_is_named_and_rebuilt(api_key: Key, harm: str) -> None:
    fill(api_key[0])
    Budget.objects.create(project=api_key[0].project, unit="tokens", every="month", amount=1)
    create_generation(
        api_key[0], status=Status.COMPLETED, finished_at=timezone.now(), output_tokens=5
    )
    account()
    row = UsageRollup.objects.filter(period="day").latest("start")
    match harm:
        case "usage":
            UsageRollup.objects.filter(pk=row.pk).update(output_tokens=row.output_tokens + 1)
        case "latency":
            LatencyHistogram.objects.filter(period="hour").update(count=99)
        case "missing":
            row.delete()
        case "spent":
            BudgetSpend.objects.update(spent=3)
        case "too_much":
            UsageRollup.objects.create(
                period="day", start=row.start, project_id=99, api_key_id=99, model="m", requests=1
            )
    with pytest.raises(CommandError, match="differ from the usage log"):
        usage("--check")
    assert "add up to the usage log" in usage("--rebuild", "--check")


def test_a_list_of_counters_that_is_not_whole_says_so(api_key: Key) -> None:
    """It said that 100 differ, whatever their number."""
    row = {"period": "day", "start": timezone.now(), "api_key_id": 99, "model": "m", "requests": 1}
    rows = [UsageRollup(project_id=1_000 + number, **row) for number in range(101)]
    UsageRollup.objects.bulk_create(rows)
    with pytest.raises(CommandError, match=r"^at least 100 counters differ"):
        usage("--check")
    UsageRollup.objects.filter(project_id__gt=1_098).delete()
    with pytest.raises(CommandError, match=r"^99 counters differ"):
        usage("--check")


def test_counters_match_after_the_log_is_pruned(api_key: Key, settings: Any) -> None:
    settings.USAGE_LOG_DAYS = 3
    fill(api_key[0])
    account()
    before = UsageRollup.objects.filter(period="day").count()
    prune_old(threading.Event())
    assert 0 < Generation.objects.count() < 60
    assert "add up to the usage log" in usage("--check")
    usage("--rebuild")
    assert UsageRollup.objects.filter(period="day").count() == before


def test_usage_stays_of_what_ended_long_after_it_was_accepted(api_key: Key) -> None:
    """A background response has waited for a worker for longer than generations are kept."""
    Project.objects.update(generations_days=2)
    now = timezone.now()
    accepted = {"background": True, "created_at": now - dt.timedelta(days=5)}
    create_generation(
        api_key[0], status=Status.COMPLETED, finished_at=now, output_tokens=40, **accepted
    )
    account()
    prune_old(threading.Event())
    assert not Generation.objects.exists()
    assert "add up to the usage log" in usage("--rebuild", "--check")
    assert UsageRollup.objects.get(period="day").output_tokens == 40


def test_reservations_are_rebuilt(api_key: Key) -> None:
    key = api_key[0]
    budget = Budget.objects.create(project=key.project, unit="tokens", every="day", amount=100)
    with transaction.atomic():
        reserve(key.project_id, key.pk, Estimate(30, Decimal(0)), timezone.now())
    create_generation(key, reserved_tokens=30)
    assert "add up to the usage log" in usage("--check")
    budget.spends.update(reserved=0)
    usage("--rebuild")
    assert budget.spends.get().reserved == 30


@pytest.mark.redis
def test_a_request_whose_key_was_read_before_the_budget_was_made_reserves_in_it(
    api_key: Key,
) -> None:
    """Its end released what other requests had reserved."""
    key = api_key[0]
    caller = Caller(key.pk, key.project_id, limits=(Limits("key", tokens_per_minute=1_000),))
    budget = Budget.objects.create(project=key.project, unit="tokens", every="day", amount=100)
    request = GenerationRequest("demo", messages=(Message("user", "Hi"),), max_output_tokens=30)
    with admit(caller, request, None, {}) as admission, transaction.atomic():
        assert admission.has_more_to_write
        tokens = admission.estimate.tokens
        create_generation(key, reserved_tokens=tokens, created_at=admission.at)
        admission.write()
    assert budget.spends.get().reserved == tokens
    assert "add up to the usage log" in usage("--check")


def test_a_new_budget_starts_with_the_usage_of_its_period(api_key: Key) -> None:
    key = api_key[0]
    create_generation(key, status=Status.COMPLETED, finished_at=timezone.now(), output_tokens=40)
    account()
    budget = Budget.objects.create(project=key.project, unit="tokens", every="day", amount=50)
    assert budget.spends.get().spent == 40


def test_a_budget_of_a_model_counts_the_usage_of_that_model_alone(api_key: Key) -> None:
    key, now = api_key[0], timezone.now()

    def end(model: str, tokens: int) -> None:
        ended = {"status": Status.COMPLETED, "finished_at": now}
        create_generation(key, model=model, output_tokens=tokens, **ended)

    end("large", 40)
    end("small", 7)
    account()
    fields = {"unit": "tokens", "every": "day", "amount": 50}
    large, every = (
        Budget.objects.create(project=key.project, model=model, **fields) for model in ("large", "")
    )
    with transaction.atomic():
        reserve(key.project_id, key.pk, Estimate(9, Decimal(0)), timezone.now(), {}, "small")
    end("large", 1)
    end("small", 2)
    create_generation(key, model="small", reserved_tokens=9)
    account()
    assert [one.spends.get().spent for one in (large, every)] == [41, 50]
    assert "add up to the usage log" in usage("--check")
    for budget, model in ((large, "small"), (every, "large")):
        budget.model = model
        budget.save()
    assert [one.spends.get().spent for one in (large, every)] == [9, 41]
    assert "add up to the usage log" in usage("--rebuild", "--check")


def test_usage_is_printed_as_csv(api_key: Key, project: Project) -> None:
    ApiKey.objects.filter(pk=api_key[0].pk).update(name="=cmd()")
    create_generation(
        api_key[0], status=Status.COMPLETED, finished_at=timezone.now(), output_tokens=7
    )
    [row] = csv.DictReader(usage().splitlines())
    assert (row["project"], row["model"]) == (project.name, "m")
    assert row["key"] == "'=cmd()", "a spreadsheet would run it"
    assert (row["requests"], row["output_tokens"]) == ("1", "7")
    assert row["cost"] == "0.000000000"


def test_days_must_be_positive() -> None:
    with pytest.raises(CommandError, match="--days"):
        usage("--days", "0")


def test_kinds_with_reports_of_their_own_add_up_too(api_key: Key) -> None:
    now = timezone.now()
    apart = ("embedding", "ollama.embedding", "moderation", "speech.events", "translation")
    for kind in (*apart, "chat.completion"):
        create_generation(
            api_key[0],
            kind=kind,
            status=Status.COMPLETED,
            created_at=now,
            claimed_at=now,
            finished_at=now,
            input_tokens=10,
            cost=Decimal("0.5"),
        )
    assert "add up to the usage log" in usage("--check")
    of_days = KindRollup.objects.filter(period="day")
    found = of_days.values_list("kind", "requests", "input_tokens", "cost")
    assert set(found) == {(kind, 1, 10, Decimal("0.5")) for kind in apart}
    of_days.update(requests=7)
    with pytest.raises(CommandError, match="differ from the usage log"):
        usage("--check")
    assert "add up to the usage log" in usage("--rebuild", "--check")


def test_what_is_accounted_while_usage_is_read_is_not_taken_from_completions(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = {"status": Status.COMPLETED, "finished_at": timezone.now()}
    create_generation(api_key[0], **ended)
    account()

    def later(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(embed).result(30)
        return usage_by(*args)

    def embed() -> None:
        create_generation(api_key[0], kind="embedding", **ended)
        account()
        connection.close()

    monkeypatch.setattr(usage_views, "usage_by", later)
    caller = Caller(api_key[0].pk, api_key[0].project_id, scopes=frozenset({Scope.ADMIN}))
    request = APIRequestFactory().get(
        f"/v1/organization/usage/completions?start_time={int(time.time()) - 6 * 86_400}"
    )
    force_authenticate(request, caller)  # type: ignore[arg-type]  # It is the user here.
    page = usage_views.CompletionsUsageView.as_view()(request)
    requests = [result["num_model_requests"] for b in page.data["data"] for result in b["results"]]
    assert requests == [1], page.data
