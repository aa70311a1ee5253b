"""Latency histograms. Unlike percentiles, histograms of several periods can be added up.

Bucket ``b`` counts the values from ``√2^b`` up to ``√2^(b+1)``, so a percentile computed from the
buckets is off by less than 20 %. Each count is stored three times: for its key, for all keys of its
project, and for all projects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

MIN_VALUE = 0.01
"""Smaller values count as this one (milliseconds, or tokens per second)."""


def bucket_sql(value: str) -> str:
    """Return the SQL expression for the bucket of ``value``, an SQL expression."""
    return f"floor(2 * ln(greatest({value}, {MIN_VALUE})::float) / ln(2::float))::smallint"


_KEYS = "coalesce(project_id, 0) AS project_id, coalesce(api_key_id, 0) AS api_key_id"
_EACH_SUM = "GROUPING SETS ((project_id, api_key_id), (project_id), ())"

KEY = "period, start, project_id, api_key_id, model, measure, bucket"


def _milliseconds(start: str, end: str) -> str:
    return f"extract(epoch FROM {end} - {start})::float * 1000"


# For each generation: queue wait, time to first token, and tokens per second after that token.
_MEASURES = f"""LATERAL (VALUES
    ('queue', {_milliseconds("created_at", "claimed_at")}),
    ('ttft', {_milliseconds("created_at", "first_token_at")}),
    ('speed', CASE WHEN output_tokens > 1 AND finished_at > first_token_at THEN
        (output_tokens - 1) * 1000 / ({_milliseconds("first_token_at", "finished_at")}) END)
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
