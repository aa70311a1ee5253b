"""Evaluates the rules: checks their conditions, raises and resolves alarms, and publishes both.

Each condition reads a bounded number of rows and yields a bounded number of subjects.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from django.db import Error, connection, transaction
from django.db.models import Count, F, FloatField, Min, Q, QuerySet
from django.db.models.functions import Cast
from django.utils import timezone
from redis.exceptions import RedisError

from inference_site.accounts.budgets import period_start
from inference_site.accounts.models import Budget, BudgetSpend
from inference_site.catalogue.fleet.leases import ModelState, live_workers
from inference_site.console.alarms.models import Alarm, Rule, RuleKind
from inference_site.core.admin_pages.labels import duration, milliseconds
from inference_site.core.storage.capacity import disks, memory_of
from inference_site.core.storage.postgresql import cached_sql
from inference_site.core.storage.redis import all_clients
from inference_site.outbox.models import publish
from inference_site.runs.models import Generation, ServiceClass, Status
from inference_site.runs.usage.models import Measure, Period, percentile
from inference_site.runs.usage.queries import (
    Span,
    Usage,
    floor,
    histograms,
    total_by,
    without_table_scans,
)

logger = logging.getLogger(__name__)

RESOLVED_AFTER_S = 30.0
"""How long a condition must be false before its alarm is resolved, so that a condition which
changes quickly raises one alarm."""
_TIMEOUT_MS = 2_000
_LOCK = "SELECT pg_try_advisory_xact_lock(0x1F5A0004)"
_MAX_FINDINGS = 50
"""Subjects of one rule that can fire at the same time."""
_RECENT = dt.timedelta(minutes=5)
_WEEK = dt.timedelta(days=7)
_LATEST = 1_000
_MIN_REQUESTS = 20
"""Models with fewer recent requests have no meaningful error rate or percentile."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A subject for which a condition is true, and the text for the operator."""

    subject: str
    text: str


def evaluate() -> None:
    """Evaluate all rules once. A rule whose condition cannot be read keeps its alarms."""
    rules = list(Rule.objects.all())
    results = {rule: findings for rule in rules if (findings := _findings(rule)) is not None}
    if not (any(results.values()) or _is_any_firing()):
        return
    now = timezone.now()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_LOCK)
        if not cursor.fetchone()[0]:
            return  # Another beat process is evaluating.
        for rule, findings in results.items():
            _raise_and_resolve(rule, findings, now)


@cached_sql
def _is_any_firing() -> QuerySet[Any, Any]:
    return Alarm.objects.filter(resolved_at=None).values_list("pk").order_by()[:1]


def _findings(rule: Rule) -> list[Finding] | None:
    if not rule.is_enabled:
        return []
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {_TIMEOUT_MS}")
            return list(islice(_CONDITIONS[RuleKind(rule.kind)](rule), _MAX_FINDINGS))
    except (Error, RedisError, OSError) as exc:
        logger.warning("the alarm rule %s could not be evaluated: %s", rule, exc)
        return None


def _raise_and_resolve(rule: Rule, findings: Sequence[Finding], now: dt.datetime) -> None:
    firing = {alarm.subject: alarm for alarm in rule.alarms.filter(resolved_at=None)}
    for finding in findings:
        subject, text = finding.subject[:200], finding.text[:400]
        alarm = firing.pop(subject, None)
        if alarm is None:
            raised = rule.alarms.create(subject=subject, text=text, started_at=now, seen_at=now)
            logger.warning("alarm: %s", text)
            _publish(raised, "alarm.firing")
        else:
            alarm.text, alarm.seen_at = text, now
            alarm.save(update_fields=["text", "seen_at"])
    limit = now - dt.timedelta(seconds=RESOLVED_AFTER_S)
    resolved = [alarm for alarm in firing.values() if alarm.seen_at < limit or not rule.is_enabled]
    Alarm.objects.filter(pk__in=[alarm.pk for alarm in resolved]).update(resolved_at=now)
    for alarm in resolved:
        alarm.resolved_at = now
        _publish(alarm, "alarm.resolved")


def _publish(alarm: Alarm, event: str) -> None:
    """Tell the endpoints of the site."""
    data = {
        "id": alarm.pk,
        "rule": alarm.rule.kind,
        "subject": alarm.subject,
        "text": alarm.text,
        "started_at": alarm.started_at,
        "resolved_at": alarm.resolved_at,
    }
    publish(None, event, f"alarm {alarm.pk}", data)


def _no_worker(rule: Rule) -> Iterator[Finding]:
    served = {
        model.id
        for worker in live_workers()
        for model in worker.models
        if model.state != ModelState.FAILED
    }
    for model, text in _long_queues(rule.bound):
        if model not in served:
            yield Finding(model, f"{text}, and no worker has the model.")


def _queue_wait(rule: Rule) -> Iterator[Finding]:
    for model, text in _long_queues(rule.bound):
        yield Finding(model, f"{text}.")


def _long_queues(min_wait_s: float) -> Iterator[tuple[str, str]]:
    """Yield models whose oldest queued request waits for longer than this, with a text."""
    for model, count, oldest in _queued():
        waited_s = (timezone.now() - oldest).total_seconds()
        if waited_s <= min_wait_s:
            continue
        if count == 1:
            yield model, f"1 request for {model} has waited for {duration(waited_s)}"
        else:
            yield model, f"{count} requests for {model} wait, the oldest for {duration(waited_s)}"


@cached_sql
def _queued() -> QuerySet[Any, Any]:
    rows = Generation.objects.filter(status=Status.QUEUED).values_list("model").order_by()
    return rows.annotate(Count("pk"), Min("created_at"))


def _error_rate(rule: Rule) -> Iterator[Finding]:
    for model, usage in _recent_usage().items():
        rate = _failed_percent(usage)
        usual = _failed_percent(_usage_of_week_before(_today()).get((model,), Usage()))
        if rate > rule.bound and rate > rule.factor * usual:
            text = f"{rate:.1f} % of the requests for {model} fail; usual are {usual:.1f} %."
            yield Finding(model, text)


def _failed_percent(usage: Usage) -> float:
    return 100 * usage.failed / usage.requests if usage.requests else 0.0


def _time_to_first_token(rule: Rule) -> Iterator[Finding]:
    now = timezone.now()
    for model in _recent_usage():
        ms = _ttft_p95(Span(Period.MINUTE, now - _RECENT, now, models=[model]))
        if ms is None or ms <= rule.bound:
            continue
        usual = _ttft_p95_of_week_before(model, _today()) or 0.0
        if rule.factor and not usual:
            continue  # Without requests in the week before, nothing is usual.
        least = max(rule.bound, rule.factor * usual)
        # What the wait in the queue adds is the matter of other rules.
        since_claim = _since_claim_p95(model) if ms > least else None
        if since_claim is not None and since_claim > least:
            times = f"takes {milliseconds(since_claim)} (p95)"
            times += f"; usual are {milliseconds(usual)}" if usual else ""
            yield Finding(model, f"{model}: the first token {times}.")


def _since_claim_p95(model: str) -> float | None:
    """Return the 95th percentile of the time from claim to first token, in milliseconds.

    Of the latest requests that clients have waited for, at most ``_LATEST``.
    """
    recent = Generation.objects.filter(model=model, created_at__gte=timezone.now() - _RECENT)
    of_clients = recent.filter(service_class__lt=ServiceClass.BACKGROUND)
    began = of_clients.exclude(first_token_at=None).exclude(claimed_at=None).order_by("-pk")
    took = began.values_list(F("first_token_at") - F("claimed_at"), flat=True)[:_LATEST]
    times = sorted(1000 * one.total_seconds() for one in took)
    return times[int(0.95 * (len(times) - 1))] if len(times) >= _MIN_REQUESTS else None


def _recent_usage() -> dict[str, Usage]:
    """Return the usage of the last minutes, of models with enough requests."""
    now = timezone.now()
    with without_table_scans():
        totals = total_by(Span(Period.MINUTE, now - _RECENT, now), "model")
    busy = {model: usage for (model,), usage in totals.items() if usage.requests >= _MIN_REQUESTS}
    return dict(islice(busy.items(), _MAX_FINDINGS))


def _today() -> dt.datetime:
    return floor(timezone.now(), Period.DAY)


# Cached by day: the days before today no longer change.
@lru_cache(maxsize=2)
def _usage_of_week_before(today: dt.datetime) -> dict[Any, Usage]:
    with without_table_scans():
        return total_by(Span(Period.DAY, today - _WEEK, today), "model")


@lru_cache(maxsize=200)
def _ttft_p95_of_week_before(model: str, today: dt.datetime) -> float | None:
    return _ttft_p95(Span(Period.DAY, today - _WEEK, today, models=[model]))


def _ttft_p95(span: Span) -> float | None:
    """Return the 95th percentile of the time to first token in milliseconds."""
    with without_table_scans():
        counts = histograms(span)[Measure.TTFT]
    total: Counter[int] = sum(counts.values(), Counter())
    return percentile(total, 0.95)


def _budget_spent(rule: Rule) -> Iterator[Finding]:
    now = timezone.now()
    starts = tuple((every, period_start(every, now)) for every in Budget.Every.values)
    if percents := dict(_spends_above(rule.bound, starts)):
        rows = BudgetSpend.objects.filter(pk__in=percents)
        for spend in rows.select_related("budget__project", "budget__api_key"):
            budget, percent = spend.budget, percents[spend.pk]
            owner = f"{budget.project}" + (f", key {budget.api_key.name}" if budget.api_key else "")
            text = f"{owner}: {percent:.0f} % of {budget} is spent."
            yield Finding(f"budget {budget.pk} from {spend.start}", text)


@cached_sql
def _spends_above(
    min_percent: float, starts: tuple[tuple[str, dt.date], ...]
) -> QuerySet[Any, Any]:
    """Return ids and percentages of the spends in current periods, highest first."""
    current = Q(*(Q(budget__every=every, start=start) for every, start in starts), _connector=Q.OR)
    spends = BudgetSpend.objects.filter(current, budget__amount__gt=0)
    percent = Cast(F("spent"), FloatField()) * 100 / Cast(F("budget__amount"), FloatField())
    spent = spends.annotate(share=percent).filter(share__gte=min_percent)
    return spent.order_by("-share").values_list("pk", "share")[:_MAX_FINDINGS]


def _disk_full(rule: Rule) -> Iterator[Finding]:
    for disk in disks():
        percent = 100 * (1 - disk.free_bytes / disk.total_bytes)
        if percent >= rule.bound:
            free = f"{disk.free_bytes / 2**30:,.1f} GiB are free"
            text = f"The disk of {disk.folder} is {percent:.0f} % full; {free}."
            yield Finding(disk.setting, text)


def _redis_full(rule: Rule) -> Iterator[Finding]:
    for number, client in enumerate(all_clients()):
        memory = memory_of(client)
        if memory.limit_bytes and memory.percent >= rule.bound:
            text = f"The memory of Redis {number} is {memory.percent:.0f} % full."
            yield Finding(f"server {number}", text)


_CONDITIONS: dict[RuleKind, Callable[[Rule], Iterator[Finding]]] = {
    RuleKind.NO_WORKER: _no_worker,
    RuleKind.QUEUE_WAIT: _queue_wait,
    RuleKind.ERRORS: _error_rate,
    RuleKind.TTFT: _time_to_first_token,
    RuleKind.BUDGET: _budget_spent,
    RuleKind.DISK: _disk_full,
    RuleKind.REDIS_MEMORY: _redis_full,
}
