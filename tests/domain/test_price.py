"""What tokens cost."""

from __future__ import annotations

from decimal import Decimal

import pytest

from inference_site.core.domain.model_spec import HIGHEST_PRICE, Price


def test_cached_tokens_are_not_paid_as_others() -> None:
    assert Price(input=2, cached=1, output=10).cost(100, 40, 7) == Decimal("0.000230")


@pytest.mark.parametrize("price", [1e15, 1e300])
def test_a_cost_never_exceeds_its_column(price: float) -> None:
    """No request fails for it: an entry that was accepted before prices had a bound still runs."""
    assert Price(price, price, price).cost(2**31, 2**30, 2**31) == Decimal("999999999.999999999")


def test_the_highest_price_of_a_long_request_is_exact() -> None:
    assert Price(HIGHEST_PRICE, 0, 0).cost(999_999, 0, 0) == 99_999_900
