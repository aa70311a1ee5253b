"""Sums of histograms: what a report reads is what the keys have, whoever has written it."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_site.runs.models import Status
from inference_site.runs.usage.accounting import account
from inference_site.runs.usage.models import (
    LatencyHistogram,
    LatencyRollup,
    Measure,
    Period,
    bucket_of,
    percentile,
)
from inference_site.runs.usage.queries import Span, histograms
from tests.generations.rows import create_generation

pytestmark = pytest.mark.django_db

START = dt.datetime(2026, 5, 31, 12, tzinfo=dt.UTC)
MIGRATIONS = "inference_site.runs.usage.migrations"
MIGRATION = import_module(f"{MIGRATIONS}.0002_latency_histograms")
OF_PREFILL = import_module(f"{MIGRATIONS}.0007_first_token_without_queue")
Row = tuple[int, int, str, str, int, int]
"""Hour, key (its project has half as many), model, measure, bucket, count."""

rows = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(1, 4),
        st.sampled_from("ab"),
        st.sampled_from(Measure.values),
        st.integers(-14, 60),
        st.integers(1, 10**12),
    ),
    max_size=30,
    unique_by=lambda row: row[:5],
)
chosen = st.none() | st.lists(st.integers(1, 4), max_size=3, unique=True)


def project_of(key: int) -> int:
    return (key + 1) // 2


def written_by_the_release_before(found: Iterable[Row]) -> None:
    LatencyRollup.objects.bulk_create(
        LatencyRollup(
            period=Period.HOUR,
            start=START + dt.timedelta(hours=hour),
            project_id=project_of(key),
            api_key_id=key,
            model=model,
            measure=measure,
            bucket=bucket,
            count=count,
        )
        for hour, key, model, measure, bucket, count in found
    )


def summed(found: Iterable[Row], span: Span) -> dict[str, dict[dt.datetime, Counter[int]]]:
    """Add up the rows of a span as if there were no sums."""
    sums: dict[str, dict[dt.datetime, Counter[int]]] = {}
    for hour, key, model, measure, bucket, count in found:
        start = START + dt.timedelta(hours=hour)
        if (
            (span.projects is None or project_of(key) in span.projects)
            and (span.api_keys is None or key in span.api_keys)
            and (span.models is None or model in span.models)
            and start < span.end
        ):
            of_measure = sums.setdefault(measure, {}).setdefault(start, Counter())
            of_measure[bucket] += count
    return sums


def run(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows, rows, chosen, chosen, st.none() | st.sampled_from([["a"], ["a", "b"]]))
def test_histograms_equal_the_sums_of_what_the_release_before_has_written(
    earlier: Sequence[Row],
    late: Sequence[Row],
    projects: Sequence[int] | None,
    keys: Sequence[int] | None,
    models: Sequence[str] | None,
) -> None:
    """Before the migration, and after it, while processes of that release were still there."""
    LatencyHistogram.objects.all().delete()
    written_by_the_release_before(earlier)
    run(MIGRATION._LOCK + MIGRATION._MOVE)
    written_by_the_release_before(late)
    account()
    assert not LatencyRollup.objects.exists()
    span = Span(Period.HOUR, START, START + dt.timedelta(hours=2), projects, keys, models)
    read, true = histograms(span), summed([*earlier, *late], span)
    assert read == true
    for measure, of_measure in true.items():
        for start, counts in of_measure.items():
            assert percentile(read[measure][start], 0.95) == percentile(counts, 0.95)


def test_the_migration_can_be_taken_back() -> None:
    row: Row = (1, 3, "a", "ttft", 20, 7)
    written_by_the_release_before([row])
    run(MIGRATION._LOCK + MIGRATION._MOVE)
    written_by_the_release_before([row])
    run(MIGRATION._LOCK + MIGRATION._MOVE_BACK)
    back = LatencyRollup.objects.values_list("project_id", "api_key_id", "bucket", "count")
    assert list(back) == [(2, 3, 20, 14)]


def test_a_generation_is_counted_for_its_key_its_project_and_all(api_key: Any) -> None:
    key = api_key[0]
    end = START + dt.timedelta(seconds=9)
    times = {"created_at": START, "claimed_at": START, "finished_at": end}
    create_generation(key, status=Status.COMPLETED, **times)
    account()
    counted = LatencyHistogram.objects.filter(period=Period.DAY, measure=Measure.QUEUE)
    found = counted.values_list("project_id", "api_key_id", "bucket", "count")
    owners = ((key.project_id, key.pk), (key.project_id, 0), (0, 0))
    assert set(found) == {(*owner, bucket_of(0), 1) for owner in owners}


def test_the_migration_counts_first_tokens_without_the_queue_as_accounting_does(
    api_key: Any,
) -> None:
    now = timezone.now()
    for ms in (3, 40, 40, 500):
        first = now - dt.timedelta(seconds=1)
        times = {"created_at": now - dt.timedelta(seconds=60), "first_token_at": first}
        times |= {"claimed_at": first - dt.timedelta(milliseconds=ms), "finished_at": now}
        create_generation(api_key[0], status=Status.COMPLETED, **times)
    account()
    counted = LatencyHistogram.objects.filter(measure=Measure.PREFILL)
    kept = set(counted.values_list("period", "project_id", "api_key_id", "bucket", "count"))
    assert len(kept) == 3 * 3 * 3
    counted.delete()
    run(OF_PREFILL._LOCK + OF_PREFILL._FILL)
    assert set(counted.values_list("period", "project_id", "api_key_id", "bucket", "count")) == kept
