"""What a rule would have done in the last seven days, from what the site has recorded.

Latencies and errors are recorded by hour, so a rule of these is tried on hours instead of the five
minutes that it looks at. Hours in a row count as one alarm.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from django.db.models import Q
from django.utils import timezone

from inference_site.accounts.models import BudgetSpend
from inference_site.console.alarms.evaluation import (
    MIN_REQUESTS,
    WEEK,
    failed_percent,
    span_of,
    spent_above,
)
from inference_site.console.alarms.models import Rule, RuleKind
from inference_site.core.storage.capacity import disks, memory_of
from inference_site.core.storage.redis import all_clients
from inference_site.runs.usage.models import Measure, Period, percentile
from inference_site.runs.usage.queries import (
    Span,
    floor,
    histograms,
    total_by,
    usage_by,
    without_table_scans,
)

_AN_HOUR = dt.timedelta(hours=1)
_MAX_MODELS = 50

_NOTES = {
    RuleKind.NO_WORKER: " It counts long waits; whether a worker had the model is not recorded.",
    RuleKind.ERRORS: " It counts invalid requests too, which the rule leaves out.",
    RuleKind.TTFT: " It counts the wait in the queue too, which the rule leaves out.",
}

Hours = dict[str, set[dt.datetime]]
"""The hours in which the condition was true, by model."""
Histograms = dict[dt.datetime, Counter[int]]


def preview(rule: Rule) -> str:
    """Return how often the rule would have fired in the last week, as a sentence.

    The rule need not be saved. Raise redis' errors.
    """
    match RuleKind(rule.kind):
        case RuleKind.BUDGET:
            # Of the periods of budgets that are in the week, those that have reached the bound. The
            # day of a month on which one did is not recorded.
            first = timezone.now().date() - WEEK
            spends = BudgetSpend.objects.filter(
                Q(start__gt=first) | Q(budget__every="month", start__gte=first.replace(day=1))
            )
            spent = spent_above(spends, rule.bound, rule.project_id, rule.api_key_id)
            return _fired(spent.count())
        case RuleKind.DISK:
            full = max((disk.percent for disk in disks()), default=0.0)
            return _now(rule, full, "The fullest disk")
        case RuleKind.REDIS_MEMORY:
            memories = [memory_of(client) for client in all_clients()]
            full = max((one.percent for one in memories if one.limit_bytes), default=0.0)
            return _now(rule, full, "The fullest Redis")
        case kind:
            end = floor(timezone.now(), Period.HOUR) + _AN_HOUR
            models = [rule.model] if rule.model else None
            span = span_of(Period.HOUR, end - WEEK, end, rule.project_id, rule.api_key_id, models)
            with without_table_scans():
                hours = _HOURS[kind](rule, span)
            lasted = sum(map(len, hours.values()))
            alarms = sum(hour - _AN_HOUR not in at for at in hours.values() for hour in at)
            within = f", in {lasted} hour{'s' if lasted > 1 else ''} of it" if lasted else ""
            return f"{_fired(alarms, within)}{_NOTES.get(kind, '')}"


def _fired(times: int, within: str = "") -> str:
    if not times:
        return "It would not have fired in the last week."
    return f"It would have fired {times} time{'s' if times > 1 else ''} in the last week{within}."


def _now(rule: Rule, percent: float, what: str) -> str:
    verdict = "fire" if percent >= rule.bound else "not fire"
    return f"{what} is {percent:.0f} % full, so it would {verdict} now. The past is not recorded."


def _hours_of_errors(rule: Rule, span: Span) -> Hours:
    usual = {model: usage for (model,), usage in total_by(span, "model").items()}
    hours: Hours = defaultdict(set)
    for (start, (model,)), usage in usage_by(span, "model").items():
        if usage.requests < MIN_REQUESTS:
            continue
        rate = failed_percent(usage)
        if rate > rule.bound and rate > rule.factor * failed_percent(usual[model]):
            hours[model].add(start)
    return hours


def _hours_of_late_tokens(rule: Rule, span: Span) -> Hours:
    hours: Hours = defaultdict(set)
    for model, counts in _by_model(span, Measure.TTFT):
        total: Counter[int] = sum(counts.values(), Counter())
        least = max(rule.bound, rule.factor * (percentile(total, 0.95) or 0.0))
        for start, values in counts.items():
            late = percentile(values, 0.95)
            if values.total() >= MIN_REQUESTS and late is not None and late > least:
                hours[model].add(start)
    return hours


def _hours_of_long_queues(rule: Rule, span: Span) -> Hours:
    hours: Hours = defaultdict(set)
    for model, counts in _by_model(span, Measure.QUEUE):
        for start, values in counts.items():
            # A bucket is true from its lower end on: 2^(n/2) milliseconds.
            if any(2 ** (bucket / 2) > 1000 * rule.bound for bucket in values):
                hours[model].add(start)
    return hours


def _by_model(span: Span, measure: Measure) -> Iterator[tuple[str, Histograms]]:
    """Yield the histograms of each model that was used, of at most ``_MAX_MODELS``."""
    used = [model for (model,) in total_by(span, "model")]
    for model in used[:_MAX_MODELS]:
        yield model, histograms(replace(span, models=[model]))[measure]


_HOURS: dict[RuleKind, Callable[[Rule, Span], Hours]] = {
    RuleKind.NO_WORKER: _hours_of_long_queues,
    RuleKind.QUEUE_WAIT: _hours_of_long_queues,
    RuleKind.ERRORS: _hours_of_errors,
    RuleKind.TTFT: _hours_of_late_tokens,
}
