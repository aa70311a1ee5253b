"""Admission: whether a request fits the limits and budgets of its key and its project.

Requests and tokens a minute are counted before anything is written, and given back when the
request is refused after all. Runs at one time and budgets are held in the transaction that accepts
the generation, so that however many come at once, no more get in than may.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal

from django.conf import settings
from django.db import connection
from django.utils import timezone

from inference_site.accounts import rate_limits
from inference_site.accounts.budgets import BudgetExhausted, Estimate, reserve
from inference_site.accounts.keys import Caller
from inference_site.api.counting import counted
from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.messages import TextPart
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from inference_site.errors.api_errors import QuotaError, RateLimitError
from inference_site.generations.queue import WithRow
from inference_site.submission.model_access import BYTES_PER_TOKEN, unknown_model

_TOKENS_PER_MESSAGE = 10
_GENERATES = ("chat", "complete")
_LOCK_RUNS = """
SELECT pg_advisory_xact_lock(0x1F5A0001, (%(key_id)s %% 2147483647)::int),
    pg_advisory_xact_lock(0x1F5A0002, (%(project_id)s %% 2147483647)::int)
"""
"""Locks under which the runs of a key and of its project are counted."""
_COUNT_RUNS = """
SELECT count(*) FILTER (WHERE api_key_id = %(key_id)s), count(*) FROM generations_generation
WHERE project_id = %(project_id)s AND finished_at IS NULL
"""


@dataclass(frozen=True, slots=True)
class Admission:
    """What was counted of a request and when, and what its answer's headers say of it.

    ``with_row`` is what the request itself has written with its row. An admission is written with
    the row, too: what it holds is what the key and the project may not exceed together.
    """

    caller: Caller
    estimate: Estimate
    at: dt.datetime
    headers: dict[str, str] = field(default_factory=dict)
    with_row: WithRow | None = None

    @property
    def has_more_to_write(self) -> bool:
        """Whether anything is to be written or checked in the transaction of the row."""
        has_limit = _run_limits(self.caller) != (None, None)
        return self.with_row is not None or self.caller.has_budget or has_limit

    def write(self) -> None:
        """Write what belongs to the row, check the runs and reserve in budgets.

        Raise RateLimitError or BudgetExhausted (see ``generations.queue.WithRow``).
        """
        if self.with_row is not None:
            self.with_row.write()
        _check_runs(self.caller)
        if self.caller.has_budget:
            reserve(self.caller.project_id, self.caller.api_key_id, self.estimate, self.at)


@contextmanager
def admitted(
    caller: Caller, request: GenerationRequest, with_row: WithRow | None = None
) -> Iterator[Admission]:
    """Count a request; give back what was counted when it is not accepted.

    Raise RateLimitError when there are too many a minute, QuotaError when a budget has no room.
    """
    estimate = estimate_of(caller, request)
    headers = counted(caller, estimate.tokens)
    try:
        yield Admission(caller, estimate, timezone.now(), headers, with_row)
    except BudgetExhausted as exc:
        rate_limits.give_back(caller, estimate.tokens)
        message = f"You exceeded your current quota: {exc} is used up."
        raise QuotaError(message, retry_after_s=exc.retry_after_s, headers=headers) from exc
    except BaseException:
        rate_limits.give_back(caller, estimate.tokens)
        raise


def estimate_of(caller: Caller, request: GenerationRequest) -> Estimate:
    """Return what a request may come to use; nothing where nobody counts it.

    The web process has no tokenizer: three bytes count as a token, and a message as ten more, which
    is rather too much than too little. An answer without a bound counts as
    ``RESERVED_OUTPUT_TOKENS``; none counts as more than the model's context.
    """
    if not caller.has_budget and not rate_limits.has_token_limit(caller):
        return Estimate(0, Decimal(0))
    spec = catalogue().models.get(request.model)
    if spec is None:  # It has been removed since this request was checked.
        raise unknown_model(request.model)
    input_tokens, output_tokens = _input_tokens(request), _output_tokens(request, spec)
    cost = spec.price.cost(input_tokens, 0, output_tokens)
    return Estimate(max(1, input_tokens + output_tokens), cost)


def _input_tokens(request: GenerationRequest) -> int:
    ready = sum(len(prompt) for prompt in request.prompts if not isinstance(prompt, str))
    size = sum(len(text.encode()) for text in _texts(request))
    return ready + len(request.messages) * _TOKENS_PER_MESSAGE + -(-size // BYTES_PER_TOKEN)


def _texts(request: GenerationRequest) -> Iterator[str]:
    for message in request.messages:
        yield message.text or ""
        yield message.reasoning or ""
        yield from (part.text for part in message.parts if isinstance(part, TextPart))
        yield from (repr(call.arguments) for call in message.tool_calls)
    yield from (prompt for prompt in request.prompts if isinstance(prompt, str))
    yield from (repr(tool) for tool in request.tools)


def _output_tokens(request: GenerationRequest, spec: ModelSpec) -> int:
    if request.operation not in _GENERATES:
        return 0
    bound = request.max_output_tokens
    each = settings.RESERVED_OUTPUT_TOKENS if bound is None else bound
    return request.answers * min(each, spec.context_length)


def _check_runs(caller: Caller) -> None:
    """Raise RateLimitError when more runs of the key or project are under way than may be.

    Called when the new one is written; what others wrote is counted after they committed.
    """
    limits = _run_limits(caller)
    if limits == (None, None):
        return
    owners = {"key_id": caller.api_key_id, "project_id": caller.project_id}
    with connection.cursor() as cursor:
        cursor.execute(_LOCK_RUNS, owners)
        cursor.execute(_COUNT_RUNS, owners)
        counts = cursor.fetchone()
    for owner, limit, count in zip(("key", "project"), limits, counts, strict=True):
        if limit is not None and count > limit:
            raise RateLimitError(
                f"Rate limit reached: {limit} runs at one time of this {owner}. "
                "Please try again when one has ended.",
                retry_after_s=1,
            )


def _run_limits(caller: Caller) -> tuple[int | None, int | None]:
    """Return how many runs there may be of the key and of the project; None is no limit."""
    return caller.key_limits.concurrent_runs, caller.project_limits.concurrent_runs
