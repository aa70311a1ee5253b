"""Histograms: percentiles that are read from them are near the true ones."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from inference_site.runs.usage.models import bucket_of, bucket_sql, percentile

values = st.floats(0.02, 1e7)


@given(st.lists(values, min_size=1, max_size=50), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_is_within_a_bucket_of_the_true_one(found: list[float], share: float) -> None:
    read = percentile(Counter(map(bucket_of, found)), share)
    true = sorted(found)[math.ceil(share * len(found)) - 1]
    assert read is not None
    assert true / 1.4143 <= read <= true * 1.4143


def test_an_empty_histogram_has_no_percentile() -> None:
    assert percentile({}, 0.5) is None


def test_the_spread_within_a_bucket_is_interpolated() -> None:
    assert percentile({20: 100}, 0.5) == pytest.approx(2**10.25)


@pytest.mark.django_db
@pytest.mark.parametrize("value", [0, 0.001, 0.02, 0.9, 1, 1.5, 17, 1000, 123456.7, 9e8])
def test_postgresql_puts_values_into_the_same_buckets(value: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {bucket_sql('%s')}", [value])
        assert cursor.fetchone()[0] == bucket_of(value)
