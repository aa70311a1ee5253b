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
from unicodedata import bidirectional
from urllib.parse import urlencode

from django.conf import settings
from django.db import Error, connection, transaction
from django.db.models import Count, F, FloatField, Min, QuerySet
from django.db.models.functions import Cast
from django.utils import timezone
from redis.exceptions import RedisError

from inference_site.accounts.budgets import Starts, begun_at, current_starts
from inference_site.accounts.models import BudgetSpend
from inference_site.catalogue.fleet.leases import ModelState, live_workers
from inference_site.console.alarms.models import Alarm, Rule, RuleKind
from inference_site.core.admin_pages.labels import duration, milliseconds
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.capacity import disks, memory_of
from inference_site.core.storage.postgresql import cached_sql, statement_timeout
from inference_site.core.storage.redis import all_clients
from inference_site.outbox.models import publish, send
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
_TIMEOUT_S = 2.0
_LOCK = f"SELECT pg_try_advisory_xact_lock({0x1F5A0004})"
_MAX_FINDINGS = 50
"""Subjects of one rule that can fire at the same time."""
_RECENT = dt.timedelta(minutes=5)
WEEK = dt.timedelta(days=7)
_LATEST = 1_000
MIN_REQUESTS = 20
"""Models with fewer recent requests have no meaningful error rate or percentile."""
_INVALID = ("context_length_exceeded", "invalid_request_error", "unsupported_parameter")
"""Error codes of requests that a worker found invalid, as in the alert ``GenerationsFail``."""
_outages: dict[int, OutageLog] = {}
"""Of the rules that could not be evaluated the last time, by their keys."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A subject for which a condition is true, and the text for the operator.

    ``query`` selects the requests that it is about, as a query string of lists of requests.
    """

    subject: str
    text: str
    query: str = ""


def evaluate() -> None:
    """Evaluate all rules once. A rule whose condition cannot be read keeps its alarms."""
    results: dict[Rule, list[Finding]] = {}
    for rule in Rule.objects.select_related("project", "api_key"):
        if not rule.is_enabled:
            results[rule] = []
            continue
        try:
            with statement_timeout(_TIMEOUT_S):
                found = _CONDITIONS[RuleKind(rule.kind)](rule)
                results[rule] = list(islice(found, _MAX_FINDINGS))
        except (Error, RedisError, OSError) as exc:
            _outages.setdefault(rule.pk, OutageLog(logger, f"alarm rule {rule}")).failed(exc)
        else:
            if rule.pk in _outages:
                _outages.pop(rule.pk).succeeded()
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


def _raise_and_resolve(rule: Rule, findings: Sequence[Finding], now: dt.datetime) -> None:
    firing = {alarm.subject: alarm for alarm in rule.alarms.filter(resolved_at=None)}
    for finding in findings:
        subject, text = finding.subject[:200], finding.text[:400]
        alarm = firing.pop(subject, None)
        if alarm is None:
            raised = Alarm(
                rule=rule,
                subject=subject,
                text=text,
                query=finding.query[:400],
                started_at=now,
                seen_at=now,
            )
            # While the last alarm of the subject is snoozed, this one is too, and nobody is told.
            last = rule.alarms.filter(subject=subject).order_by("-pk").first()
            if last is not None and last.snoozed_until is not None and last.snoozed_until > now:
                raised.snoozed_until, raised.handled_by_id = last.snoozed_until, last.handled_by_id
                raised.is_told = False
            raised.save()
            logger.warning("alarm: %s", text)
            if raised.is_told:
                _publish(raised, "alarm.firing")
            continue
        alarm.text, alarm.seen_at = text, now
        changed = ["text", "seen_at"]
        if alarm.snoozed_until is not None and alarm.snoozed_until <= now:
            alarm.snoozed_until, alarm.handled_by, alarm.is_told = None, None, True
            changed += ["snoozed_until", "handled_by", "is_told"]
            _publish(alarm, "alarm.firing")
        alarm.save(update_fields=changed)
    # Also of the future: the clock was set back.
    patience = dt.timedelta(seconds=RESOLVED_AFTER_S)
    resolved = [
        alarm
        for alarm in firing.values()
        if abs(now - alarm.seen_at) > patience or not rule.is_enabled
    ]
    Alarm.objects.filter(pk__in=[alarm.pk for alarm in resolved]).update(resolved_at=now)
    for alarm in resolved:
        alarm.resolved_at = now
        if alarm.is_told:
            _publish(alarm, "alarm.resolved")


def _publish(alarm: Alarm, event: str) -> None:
    """Tell the recipients of the rule; if it names none, the endpoints of the site."""
    data = {
        "id": alarm.pk,
        "rule": alarm.rule.kind,
        "subject": alarm.subject,
        "text": alarm.text,
        "started_at": alarm.started_at,
        "resolved_at": alarm.resolved_at,
    }
    named = list(alarm.rule.recipients.all())
    if named:
        told = [one for one in named if one.is_enabled and event in (one.event_types or (event,))]
        send(told, event, f"alarm {alarm.pk}", data)
    else:
        publish(None, event, f"alarm {alarm.pk}", data)


def _no_worker(rule: Rule) -> Iterator[Finding]:
    served = {
        model.id
        for worker in live_workers()
        for model in worker.models
        if model.state != ModelState.FAILED
    }
    for model, text in _long_queues(rule):
        if model not in served:
            yield Finding(model, f"{text}, and no worker has the model.", _query(rule, model))


def _queue_wait(rule: Rule) -> Iterator[Finding]:
    for model, text in _long_queues(rule):
        yield Finding(model, f"{text}.", _query(rule, model))


def _query(rule: Rule, model: str) -> str:
    """Return the query string of the requests of a model in the scope of a rule."""
    scope = {"model": model, "project": rule.project_id, "key": rule.api_key_id}
    return urlencode({name: value for name, value in scope.items() if value is not None})


def _long_queues(rule: Rule) -> Iterator[tuple[str, str]]:
    """Yield models whose oldest queued request waits for longer than the bound, with a text."""
    for model, count, oldest in _queued(rule.model, rule.project_id, rule.api_key_id):
        waited_s = (timezone.now() - oldest).total_seconds()
        if waited_s <= rule.bound:
            continue
        whose = _whose(rule)
        if count == 1:
            yield model, f"1 request for {model}{whose} has waited for {duration(waited_s)}"
        else:
            waited = duration(waited_s)
            yield model, f"{count} requests for {model}{whose} wait, the oldest for {waited}"


def _whose(rule: Rule) -> str:
    """Return of whom the requests in a text are: " of key laptop"; "" for everybody's."""
    if rule.api_key is not None:
        return f" of key {_isolated(rule.api_key.name)}"
    return f" of project {_isolated(rule.project.name)}" if rule.project is not None else ""


def _isolated(name: str) -> str:
    """Return a name as a part of a text; one with right-to-left letters does not reorder the rest.

    The text is in pages, mails and webhooks: the characters are what ``<bdi>`` is in HTML.
    """
    is_right_to_left = any(bidirectional(one) in ("R", "AL") for one in name)
    return f"\u2068{name}\u2069" if is_right_to_left else name


@cached_sql
def _queued(model: str, project: int | None, api_key: int | None) -> QuerySet[Any, Any]:
    scope = {"model": model or None, "project": project, "api_key": api_key}
    chosen = {name: value for name, value in scope.items() if value is not None}
    rows = Generation.objects.filter(status=Status.QUEUED, **chosen).values_list("model").order_by()
    return rows.annotate(Count("pk"), Min("created_at"))


def _error_rate(rule: Rule) -> Iterator[Finding]:
    for model, usage in _recent_usage(rule).items():
        week = _usage_of_week_before(_today(), rule.project_id, rule.api_key_id)
        before = week.get((model,), Usage())
        usual = failed_percent(before)
        least = max(rule.bound, rule.factor * usual)
        rate = failed_percent(usage)
        if rate > least:  # What is wrong with the request is the matter of its client.
            rate -= 100 * _invalid_requests(rule, model) / usage.requests
        if rate > least:
            text = f"{rate:.1f} % of the requests for {model}{_whose(rule)} fail"
            text += f"; usual are {usual:.1f} %." if before.requests else "."
            yield Finding(model, text, f"{_query(rule, model)}&status=failed&since=1h")


def failed_percent(usage: Usage) -> float:
    """Return how many of 100 requests have failed; 0 without requests."""
    return 100 * usage.failed / usage.requests if usage.requests else 0.0


def _time_to_first_token(rule: Rule) -> Iterator[Finding]:
    now = timezone.now()
    for model in _recent_usage(rule):
        ms = _ttft_p95(_span(rule, Period.MINUTE, now - _RECENT, now, model))
        if ms is None or ms <= rule.bound:
            continue
        usual = _ttft_p95_of_week_before(model, _today(), rule.project_id, rule.api_key_id) or 0.0
        if rule.factor and not usual:
            continue  # Without requests in the week before, nothing is usual.
        least = max(rule.bound, rule.factor * usual)
        # What the wait in the queue adds is the matter of other rules.
        since_claim = _since_claim_p95(rule, model) if ms > least else None
        if since_claim is not None and since_claim > least:
            times = f"takes {milliseconds(since_claim)} (p95)"
            times += f"; usual are {milliseconds(usual)}" if usual else ""
            text = f"{model}{_whose(rule)}: the first token {times}."
            yield Finding(model, text, f"{_query(rule, model)}&since=1h")


def _since_claim_p95(rule: Rule, model: str) -> float | None:
    """Return the 95th percentile of the time from claim to first token, in milliseconds.

    Of the latest requests that clients have waited for, at most ``_LATEST``.
    """
    recent = _generations(rule, model).filter(created_at__gte=timezone.now() - _RECENT)
    of_clients = recent.filter(service_class__lt=ServiceClass.BACKGROUND)
    began = of_clients.exclude(first_token_at=None).exclude(claimed_at=None).order_by("-pk")
    took = began.values_list(F("first_token_at") - F("claimed_at"), flat=True)[:_LATEST]
    times = sorted(1000 * one.total_seconds() for one in took)
    return times[int(0.95 * (len(times) - 1))] if len(times) >= MIN_REQUESTS else None


def _generations(rule: Rule, model: str) -> QuerySet[Generation]:
    """Return the generations of a model in the scope of a rule."""
    scope = {"project": rule.project_id, "api_key": rule.api_key_id}
    chosen = {name: value for name, value in scope.items() if value is not None}
    return Generation.objects.filter(model=model, **chosen)


def _invalid_requests(rule: Rule, model: str) -> int:
    """Return how many of the recent requests failed because the worker found them invalid."""
    since = floor(timezone.now() - _RECENT, Period.MINUTE)
    # An index locates the time of creation. No client waits longer than this in the queue.
    created = since - dt.timedelta(seconds=settings.QUEUE_TIMEOUT_S)
    failed = _generations(rule, model).filter(status=Status.FAILED, created_at__gte=created)
    return failed.filter(finished_at__gte=since, error_code__in=_INVALID).count()


def _span(
    rule: Rule, period: Period, start: dt.datetime, end: dt.datetime, model: str = ""
) -> Span:
    """Return the span of a rule's scope, of one ``model`` if one is named."""
    models = [model or rule.model] if model or rule.model else None
    return span_of(period, start, end, rule.project_id, rule.api_key_id, models)


def span_of(
    period: Period,
    start: dt.datetime,
    end: dt.datetime,
    project: int | None,
    api_key: int | None,
    models: list[str] | None,
) -> Span:
    """Return the span of a project, a key and models; None is all of them."""
    return Span(
        period,
        start,
        end,
        projects=None if project is None else [project],
        api_keys=None if api_key is None else [api_key],
        models=models,
    )


def _recent_usage(rule: Rule) -> dict[str, Usage]:
    """Return the usage of the last minutes, of models with enough requests."""
    now = timezone.now()
    with without_table_scans():
        totals = total_by(_span(rule, Period.MINUTE, now - _RECENT, now), "model")
    busy = {model: usage for (model,), usage in totals.items() if usage.requests >= MIN_REQUESTS}
    return dict(islice(busy.items(), _MAX_FINDINGS))


def _today() -> dt.datetime:
    return floor(timezone.now(), Period.DAY)


# Cached by day: the days before today no longer change.
@lru_cache(maxsize=50)
def _usage_of_week_before(
    today: dt.datetime, project: int | None, api_key: int | None
) -> dict[Any, Usage]:
    span = span_of(Period.DAY, today - WEEK, today, project, api_key, None)
    with without_table_scans():
        return total_by(span, "model")


@lru_cache(maxsize=200)
def _ttft_p95_of_week_before(
    model: str, today: dt.datetime, project: int | None, api_key: int | None
) -> float | None:
    return _ttft_p95(span_of(Period.DAY, today - WEEK, today, project, api_key, [model]))


def _ttft_p95(span: Span) -> float | None:
    """Return the 95th percentile of the time to first token in milliseconds."""
    with without_table_scans():
        counts = histograms(span)[Measure.TTFT]
    total: Counter[int] = sum(counts.values(), Counter())
    return percentile(total, 0.95)


def _budget_spent(rule: Rule) -> Iterator[Finding]:
    starts = current_starts(timezone.now())
    if percents := dict(_spends_above(rule.bound, starts, rule.project_id, rule.api_key_id)):
        rows = BudgetSpend.objects.filter(pk__in=percents)
        for spend in rows.select_related("budget__project", "budget__api_key"):
            budget, percent = spend.budget, percents[spend.pk]
            owner = _isolated(budget.project.name)
            owner += f", key {_isolated(budget.api_key.name)}" if budget.api_key else ""
            text = f"{owner}: {percent:.0f} % of {budget} is spent."
            of = {"project": budget.project_id} | (
                {"key": budget.api_key_id} if budget.api_key else {}
            )
            yield Finding(f"budget {budget.pk} from {spend.start}", text, urlencode(of))


@cached_sql
def _spends_above(
    min_percent: float,
    starts: Starts,
    project: int | None,
    api_key: int | None,
) -> QuerySet[Any, Any]:
    """Return ids and percentages of the spends in current periods, highest first."""
    spends = BudgetSpend.objects.filter(begun_at(starts))
    found = spent_above(spends, min_percent, project, api_key)
    return found.order_by("-share").values_list("pk", "share")[:_MAX_FINDINGS]


def spent_above(
    spends: QuerySet[BudgetSpend], min_percent: float, project: int | None, api_key: int | None
) -> QuerySet[Any, Any]:
    """Return those of these spends whose ``share`` of the budget is at least a percentage.

    Those of single end users and values of tags are left out. ``project`` and ``api_key`` are those
    of the budgets; None is all.
    """
    spends = spends.filter(budget__amount__gt=0, value="")
    if project is not None:
        spends = spends.filter(budget__project=project)
    if api_key is not None:
        spends = spends.filter(budget__api_key=api_key)
    share = Cast("spent", FloatField()) * 100 / Cast("budget__amount", FloatField())
    return spends.annotate(share=share).filter(share__gte=min_percent)


def _disk_full(rule: Rule) -> Iterator[Finding]:
    for disk in disks():
        if disk.percent >= rule.bound:
            free = f"{disk.free_bytes / 2**30:,.1f} GiB are free"
            text = f"The disk of {disk.folder} is {disk.percent:.0f} % full; {free}."
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
