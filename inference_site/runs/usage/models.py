"""Roll-ups: sums of the usage log by minute, hour and day. Reports read only these tables.

Latencies are histograms: unlike percentiles, histograms of several periods can be added up. Bucket
``b`` counts the values from ``√2^b`` up to ``√2^(b+1)``, so a percentile computed from the buckets
is off by less than 20 %. Each count is stored three times: for its key, for all keys of its
project, and for all projects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from django.db import models

from inference_site.accounts.models import LONGEST_DIMENSION, ApiKey, Project

MIN_VALUE = 0.01
"""Smaller values count as this one (milliseconds, or tokens per second)."""
_KEYS = "coalesce(project_id, 0) AS project_id, coalesce(api_key_id, 0) AS api_key_id"
_EACH_SUM = "GROUPING SETS ((project_id, api_key_id), (project_id), ())"
KEY = "period, start, project_id, api_key_id, model, measure, bucket"


def bucket_sql(value: str) -> str:
    """Return the SQL expression for the bucket of ``value``, an SQL expression."""
    return f"floor(2 * ln(greatest({value}, {MIN_VALUE})::float) / ln(2::float))::smallint"


def _milliseconds(start: str, end: str) -> str:
    return f"extract(epoch FROM {end} - {start})::float * 1000"


# For each generation: queue wait, time to first token with it and without it, and tokens per second
# after that token.
_MEASURES = f"""LATERAL (VALUES
    ('queue', {_milliseconds("created_at", "claimed_at")}),
    ('ttft', {_milliseconds("created_at", "first_token_at")}),
    ('prefill', {_milliseconds("claimed_at", "first_token_at")}),
    ('speed', CASE WHEN output_tokens > 1 AND finished_at > first_token_at THEN
        (output_tokens - 1) * 1000::bigint / ({_milliseconds("first_token_at", "finished_at")}) END)
) AS measured (measure, value)"""


def counts_sql(start: str, periods: str, where: str) -> str:
    """Return the query that counts generations, with the columns of ``KEY`` and ``count``.

    ``start`` is the SQL expression for the start of a generation's period, ``periods`` is the FROM
    item that has the column ``period``, and ``where`` is the condition on generations.
    """
    bucket = bucket_sql("value")
    return f"""
    SELECT period, {start} AS start, {_KEYS}, model, measure, {bucket} AS bucket, count(*) AS count
    FROM generations_generation, {_MEASURES}, {periods}
    WHERE {where} AND value IS NOT NULL
    GROUP BY period, {start}, model, measure, {bucket}, {_EACH_SUM}
    """  # noqa: S608  # All statements here are built from constants.


def sums_sql(source: str) -> str:
    """Return the query that sums the counts of keys for each key, each project and all projects.

    ``source`` is a table with the columns of ``KEY`` and ``count``; so is the result.
    """
    return f"""
    SELECT period, start, {_KEYS}, model, measure, bucket, sum(count) AS count FROM {source}
    GROUP BY period, start, model, measure, bucket, {_EACH_SUM}
    """  # noqa: S608


def add_sql(counts: str) -> str:
    """Return the statement that adds the result of the query ``counts`` to the stored counts."""
    return f"""
    INSERT INTO usage_latencyhistogram AS kept ({KEY}, count) {counts}
    ON CONFLICT ({KEY}) DO UPDATE SET count = kept.count + excluded.count
    """


MOVE_LATE = "WITH late AS (DELETE FROM usage_latencyrollup RETURNING *) " + add_sql(  # noqa: S608
    sums_sql("late")
)
"""Moves counts that processes of the previous release have written since the migration."""


def bucket_of(value: float) -> int:
    """Return the bucket of a value; ``bucket_sql`` computes the same."""
    return math.floor(2 * math.log2(max(value, MIN_VALUE)))


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the value below which this share (0…1) of the values lies; None without values.

    Within a bucket, interpolate on a logarithmic scale.
    """
    total = sum(counts.values())
    if not total:
        return None
    rank = share * total
    below = 0
    for bucket in sorted(counts):
        count = counts[bucket]
        if below + count >= rank:
            fraction = (rank - below) / count if count else 0.0
            return float(2 ** ((bucket + fraction) / 2))
        below += count
    return float(2 ** ((max(counts) + 1) / 2))


class Period(models.TextChoices):
    """The length of time that a roll-up row covers; periods begin at UTC boundaries."""

    # ``pruning.KEPT_DAYS`` says how long each is kept.
    MINUTE = "minute", "minute"
    HOUR = "hour", "hour"
    DAY = "day", "day"


class Rollup(models.Model):
    """The usage of one model by one key in one period.

    A generation counts in the period in which it ended.
    """

    period = models.CharField(max_length=8, choices=Period.choices)
    start = models.DateTimeField()
    project = models.ForeignKey(
        Project, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    api_key = models.ForeignKey(
        ApiKey, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    model = models.CharField(max_length=200)

    class Meta:
        abstract = True


class UsageSums(Rollup):
    """Sums of requests by final status, of tokens, of milliseconds and of cost."""

    requests = models.PositiveBigIntegerField(default=0)
    completed = models.PositiveBigIntegerField(default=0)
    failed = models.PositiveBigIntegerField(default=0)
    cancelled = models.PositiveBigIntegerField(default=0)
    input_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    reasoning_tokens = models.PositiveBigIntegerField(default=0)
    queue_ms = models.FloatField(default=0)
    prefill_ms = models.FloatField(default=0)
    decode_ms = models.FloatField(default=0)
    cost = models.DecimalField(max_digits=24, decimal_places=9, default=0)

    class Meta:
        abstract = True


class UsageRollup(UsageSums):
    """The usage of all kinds together."""

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["period", "start", "project", "api_key", "model"], name="usage_rollup_once"
            ),
        ]
        indexes = [
            models.Index(fields=["project", "period", "start"], name="usage_rollup_by_project"),
        ]

    def __str__(self) -> str:
        return f"{self.period} of {self.start}"


EMBEDDINGS = ("embedding", "ollama.embedding", "vector_store.embedding", "vector_store.search")
MODERATIONS = ("moderation",)
SPEECHES = ("speech", "speech.events")
TRANSCRIPTIONS = ("transcription", "translation")
NAMED_APART = (*EMBEDDINGS, *MODERATIONS, *SPEECHES, *TRANSCRIPTIONS)
"""The kinds of generations that reports name apart; all others are completions."""


class KindRollup(UsageSums):
    """The usage of one of the kinds that reports name apart. ``UsageRollup`` contains it.

    A table of its own: processes of the previous release add to ``UsageRollup`` by its key.
    """

    kind = models.CharField(max_length=32)

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["period", "start", "project", "api_key", "model", "kind"],
                name="kind_rollup_once",
            ),
        ]
        indexes = [
            models.Index(fields=["project", "period", "start"], name="kind_rollup_by_project"),
        ]

    def __str__(self) -> str:
        return f"{self.period} of {self.start}, {self.kind}"


LONGEST_VALUE = 200
"""Longer values count as their first characters."""
OTHERS = ""
"""The value of a row that has the usage of all values without a row of their own."""


class DimensionRollup(UsageSums):
    """The usage of one end user, or of one value of a tag, in one period.

    Requests without an end user or without the tag are not in it; ``UsageRollup`` has all. Only the
    values with the highest costs of a project and period have rows (see ``dimensions.bound``).
    """

    dimension = models.CharField(max_length=LONGEST_DIMENSION)
    value = models.CharField(max_length=LONGEST_VALUE)

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=[
                    *("period", "start", "dimension", "project"),
                    *("value", "api_key", "model"),
                ],
                name="dimension_rollup_once",
            ),
        ]
        indexes = [
            models.Index(
                fields=["project", "period", "start", "dimension"],
                name="dimension_rollup_by_project",
            ),
            models.Index(
                fields=["value", "dimension", "period", "start"],
                name="dimension_rollup_by_value",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.period} of {self.start}, {self.dimension} {self.value}"


class Measure(models.TextChoices):
    """The quantity of a histogram."""

    QUEUE = "queue", "queue wait (ms)"
    TTFT = "ttft", "time to first token (ms)"
    PREFILL = "prefill", "time to first token without the queue wait (ms)"
    SPEED = "speed", "tokens per second"


class LatencyHistogram(Rollup):
    """One bucket of a histogram: how many generations had a measure in this range.

    Sums over all keys of a project have their own rows, with ``EVERY`` as the key, and so do sums
    over all projects. Without them a report of a week would add up a million rows.
    """

    EVERY = 0
    """Means all keys, or all projects; no key and no project has this primary key."""

    measure = models.CharField(max_length=8, choices=Measure.choices)
    # ``bucket_sql`` defines the bounds of buckets.
    bucket = models.SmallIntegerField()
    count = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [
            # The key and the project come first: a report reads one range of this index.
            models.UniqueConstraint(
                fields=["period", "api_key", "project", "start", "model", "measure", "bucket"],
                name="latency_histogram_once",
            ),
        ]
        indexes = [
            models.Index(fields=["period", "start"], name="latency_histogram_by_age"),
        ]

    def __str__(self) -> str:
        return f"{self.measure} {self.bucket} of {self.start}"


class PrunedLog(models.Model):
    """From when on the usage log of a project is complete; no row if nothing was deleted of it.

    ``complete_since`` is a midnight of UTC. Roll-ups of days before it contain generations that may
    have been deleted, so they are neither compared with the log nor rebuilt from it.
    """

    project_id = models.BigIntegerField(primary_key=True)
    complete_since = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.project_id} since {self.complete_since}"


class LatencyRollup(Rollup):
    """Histograms as processes of the previous release write them; accounting moves the rows.

    To be dropped in the next release.
    """

    measure = models.CharField(max_length=8, choices=Measure.choices)
    bucket = models.SmallIntegerField()
    count = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["period", "start", "project", "api_key", "model", "measure", "bucket"],
                name="latency_rollup_once",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.measure} {self.bucket} of {self.start}"
