"""Histograms of latencies and speeds, which can be added up, as percentiles cannot.

Bucket ``b`` holds the values from ``√2^b`` up to ``√2^(b+1)``, so a percentile read from it is
less than 20 % too high or too low.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

LEAST = 0.01
"""Smaller values count as this one (milliseconds, or tokens per second)."""


def bucket_sql(value: str) -> str:
    """Return the SQL expression of the bucket for the SQL expression of a value."""
    return f"floor(2 * ln(greatest({value}, {LEAST})::float) / ln(2::float))::smallint"


def bucket_of(value: float) -> int:
    """Return the bucket of a value."""
    return math.floor(2 * math.log2(max(value, LEAST)))


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the value below which this share (0…1) of the values lies; None without values.

    Values are assumed to be spread evenly on a logarithmic scale within a bucket.
    """
    total = sum(counts.values())
    if not total:
        return None
    wanted = share * total
    passed = 0
    for bucket in sorted(counts):
        count = counts[bucket]
        if passed + count >= wanted:
            part = (wanted - passed) / count if count else 0.0
            return float(2 ** ((bucket + part) / 2))
        passed += count
    return float(2 ** ((max(counts) + 1) / 2))
