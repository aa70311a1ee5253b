"""Counting a request in the limits of its key and its project, or refusing it."""

from __future__ import annotations

from inference_site.accounts import rate_limits
from inference_site.accounts.keys import Caller
from inference_site.errors.api_errors import RateLimitError


def counted(caller: Caller, tokens: int | None = None) -> dict[str, str]:
    """Count a request of so many tokens, or of none; return headers for its answer.

    Raise RateLimitError when there are too many a minute.
    """
    try:
        return rate_limits.headers(rate_limits.hit(caller, tokens))
    except rate_limits.RateLimited as exc:
        wait_s = max(1, round(exc.window.reset_s))
        raise RateLimitError(
            f"Rate limit reached: {exc}. Please try again in {rate_limits.duration(wait_s)}.",
            retry_after_s=wait_s,
            headers=rate_limits.headers(exc.windows),
        ) from exc
