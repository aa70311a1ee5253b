"""What each kind of rule looks at. Each looks at a bounded number of rows and subjects."""

from __future__ import annotations

import datetime as dt
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db.models import Count, F, FloatField, Min, Q, QuerySet
from django.db.models.functions import Cast
from django.utils import timezone

from inference_site.accounts.budgets import period_start
from inference_site.accounts.models import Budget, BudgetSpend
from inference_site.admin_pages.labels import duration, milliseconds
from inference_site.alarms.models import Kind, Rule
from inference_site.fleet.leases import ModelState, live_workers
from inference_site.generations.models import Generation, Status
from inference_site.storage.postgresql import cached_sql
from inference_site.storage.redis import all_clients, memory_of
from inference_site.usage.histograms import percentile
from inference_site.usage.models import Measure, Period
from inference_site.usage.queries import Span, Usage, floor, histograms, reading, total_by

MOST_FOUND = 50
"""Subjects of one rule that fire at one time."""
_RECENT = dt.timedelta(minutes=5)
_USUAL = dt.timedelta(days=7)
_LEAST_REQUESTS = 20
"""Fewer requests say nothing of a rate."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A subject of which a condition is true, and what an operator is told of it."""

    subject: str
    text: str


def found(rule: Rule) -> list[Finding]:
    """Return of what the rule is true now. Raise the errors of Redis and PostgreSQL."""
    return list(islice(_CONDITIONS[Kind(rule.kind)](rule), MOST_FOUND))


def _no_worker(rule: Rule) -> Iterator[Finding]:
    workers = live_workers()
    having = {
        model.id
        for worker in workers
        for model in worker.models
        if model.state != ModelState.FAILED
    }
    for model, count, waited_s in _waiting(rule.bound):
        if model not in having:
            text = f"{_told(model, count, waited_s)}, and no worker has the model."
            yield Finding(model, text)


def _queue_wait(rule: Rule) -> Iterator[Finding]:
    for model, count, waited_s in _waiting(rule.bound):
        yield Finding(model, f"{_told(model, count, waited_s)}.")


def _told(model: str, count: int, waited_s: float) -> str:
    if count == 1:
        return f"1 request for {model} has waited for {duration(waited_s)}"
    return f"{count} requests for {model} wait, the oldest for {duration(waited_s)}"


def _waiting(longer_than_s: float) -> Iterator[tuple[str, int, float]]:
    """Yield models with how many wait for them, and for how long the oldest has."""
    for model, count, oldest in _queued():
        waited_s = (timezone.now() - oldest).total_seconds()
        if waited_s > longer_than_s:
            yield model, count, waited_s


@cached_sql
def _queued() -> QuerySet[Any, Any]:
    rows = Generation.objects.filter(status=Status.QUEUED).values_list("model").order_by()
    return rows.annotate(Count("pk"), Min("created_at"))


def _errors(rule: Rule) -> Iterator[Finding]:
    for model, usage in _recent().items():
        share = _failed(usage)
        usual = _failed(_usual_usage(_today()).get((model,), Usage()))
        if share > rule.bound and share > rule.factor * usual:
            text = f"{share:.1f} % of the requests for {model} fail; usual are {usual:.1f} %."
            yield Finding(model, text)


def _failed(usage: Usage) -> float:
    return 100 * usage.failed / usage.requests if usage.requests else 0.0


def _ttft(rule: Rule) -> Iterator[Finding]:
    now = timezone.now()
    for model in _recent():
        ms = _p95(Span(Period.MINUTE, now - _RECENT, now, models=[model]))
        usual = _usual_ttft(model, _today()) or 0.0
        if ms is not None and ms > rule.bound and ms > rule.factor * usual:
            told = f"takes {milliseconds(ms)} (p95); usual are {milliseconds(usual)}"
            yield Finding(model, f"{model}: the first token {told}.")


def _recent() -> dict[str, Usage]:
    now = timezone.now()
    with reading():
        totals = total_by(Span(Period.MINUTE, now - _RECENT, now), "model")
    busy = {model: usage for (model,), usage in totals.items() if usage.requests >= _LEAST_REQUESTS}
    return dict(islice(busy.items(), MOST_FOUND))


def _today() -> dt.datetime:
    return floor(timezone.now(), Period.DAY)


# Whole days before this one: they do not change any more.
@lru_cache(maxsize=2)
def _usual_usage(today: dt.datetime) -> dict[Any, Usage]:
    with reading():
        return total_by(Span(Period.DAY, today - _USUAL, today), "model")


@lru_cache(maxsize=200)
def _usual_ttft(model: str, today: dt.datetime) -> float | None:
    return _p95(Span(Period.DAY, today - _USUAL, today, models=[model]))


def _p95(span: Span) -> float | None:
    with reading():
        counts = histograms(span)[Measure.TTFT]
    together: Counter[int] = sum(counts.values(), Counter())
    return percentile(together, 0.95)


def _budget(rule: Rule) -> Iterator[Finding]:
    now = timezone.now()
    starts = tuple((every, period_start(every, now)) for every in Budget.Every.values)
    if shares := dict(_spent(rule.bound, starts)):
        rows = BudgetSpend.objects.filter(pk__in=shares)
        for spend in rows.select_related("budget__project", "budget__api_key"):
            budget, share = spend.budget, shares[spend.pk]
            owner = f"{budget.project}" + (f", key {budget.api_key.name}" if budget.api_key else "")
            text = f"{owner}: {share:.0f} % of {budget} is spent."
            yield Finding(f"budget {budget.pk} from {spend.start}", text)


@cached_sql
def _spent(bound: float, starts: tuple[tuple[str, dt.date], ...]) -> QuerySet[Any, Any]:
    current = Q(*(Q(budget__every=every, start=start) for every, start in starts), _connector=Q.OR)
    spends = BudgetSpend.objects.filter(current, budget__amount__gt=0)
    share = Cast(F("spent"), FloatField()) * 100 / Cast(F("budget__amount"), FloatField())
    spent = spends.annotate(share=share).filter(share__gte=bound)
    return spent.order_by("-share").values_list("pk", "share")[:MOST_FOUND]


def _disk(rule: Rule) -> Iterator[Finding]:
    for name in ("DATA_DIR", "MODELS_DIR"):
        path = Path(getattr(settings, name))
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        usage = shutil.disk_usage(there)
        share = 100 * (1 - usage.free / usage.total)
        if share >= rule.bound:
            free = f"{usage.free / 2**30:,.1f} GiB are free"
            yield Finding(name, f"The disk of {path} is {share:.0f} % full; {free}.")


def _redis_memory(rule: Rule) -> Iterator[Finding]:
    for number, client in enumerate(all_clients()):
        used, limit = memory_of(client)
        share = 100 * used / limit if limit else 0.0
        if limit and share >= rule.bound:
            yield Finding(
                f"server {number}", f"The memory of Redis {number} is {share:.0f} % full."
            )


_CONDITIONS: dict[Kind, Callable[[Rule], Iterator[Finding]]] = {
    Kind.NO_WORKER: _no_worker,
    Kind.QUEUE_WAIT: _queue_wait,
    Kind.ERRORS: _errors,
    Kind.TTFT: _ttft,
    Kind.BUDGET: _budget,
    Kind.DISK: _disk,
    Kind.REDIS_MEMORY: _redis_memory,
}
