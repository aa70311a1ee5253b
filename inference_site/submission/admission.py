"""Admission: whether a request fits the limits and budgets of its key and its project.

Requests and tokens a minute are counted before anything is written, and given back when the
request is refused after all. Runs at one time and budgets are held in the transaction that accepts
the generation, so that however many come at once, no more get in than may.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NoReturn

from django.conf import settings
from django.db import connection
from django.utils import timezone

from inference_site.accounts import rate_limits
from inference_site.accounts.budgets import BudgetExhausted, Estimate, reserve
from inference_site.accounts.keys import Caller
from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.messages import TextPart
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from inference_site.errors.api_errors import QuotaError, RateLimitError
from inference_site.usage.settlement import settle_for_request

_BYTES_PER_TOKEN, _TOKENS_PER_MESSAGE = 3, 10
_GENERATES = ("chat", "complete")
_LOCK_RUNS = """
SELECT pg_advisory_xact_lock(0x1F5A0001, (%(key_id)s %% 2147483647)::int),
    pg_advisory_xact_lock(0x1F5A0002, (%(project_id)s %% 2147483647)::int)
"""
"""Locks under which the runs of a key and of its project are counted."""
_COUNT_RUNS = """
SELECT count(*) FILTER (WHERE api_key_id = %(key_id)s), count(*) FROM generations_generation
WHERE project_id = %(project_id)s AND status IN ('queued', 'running')
"""


@dataclass(frozen=True, slots=True)
class Admission:
    """What was counted of a request and when, and what its answer's headers say of it."""

    caller: Caller
    estimate: Estimate
    at: dt.datetime
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether something is to be held in the transaction that accepts the generation."""
        caller = self.caller
        runs = (caller.key_limits.concurrent_runs, caller.project_limits.concurrent_runs)
        return caller.has_budget or runs != (None, None)


@contextmanager
def admitted(caller: Caller, request: GenerationRequest) -> Iterator[Admission]:
    """Count a request; give back what was counted when it is not accepted.

    Raise RateLimitError when there are too many a minute.
    """
    estimate = estimate_of(caller, request)
    try:
        windows = rate_limits.hit(caller, estimate.tokens)
    except rate_limits.RateLimited as exc:
        _refuse_rate(exc)
    try:
        yield Admission(caller, estimate, timezone.now(), rate_limits.headers(windows))
    except BaseException:
        rate_limits.give_back(caller, estimate.tokens)
        raise


def accepting(admission: Admission, record: Callable[[], None] | None) -> Callable[[], None] | None:
    """Return what is to be done in the transaction that accepts the generation, if anything is."""
    if not admission.holds:
        return record

    def hold() -> None:
        if record is not None:
            record()
        _check_runs(admission.caller)
        if admission.caller.has_budget:
            _reserve(admission)

    return hold


def retried(admission: Admission, accept: Callable[[], None]) -> None:
    """Accept a generation; when a budget refuses it, account what has ended and try once more.

    Raise QuotaError when the budget still has no room.
    """
    if not admission.caller.has_budget:
        accept()
        return
    try:
        accept()
    except BudgetExhausted:
        settle_for_request()
        try:
            accept()
        except BudgetExhausted as exc:
            _refuse_quota(exc, admission)


def estimate_of(caller: Caller, request: GenerationRequest) -> Estimate:
    """Return what a request may come to use; nothing where nobody counts it.

    The web process has no tokenizer: three bytes count as a token, and a message as ten more, which
    is rather too much than too little. An answer without a bound counts as
    ``RESERVED_OUTPUT_TOKENS``; none counts as more than the model's context.
    """
    if not caller.has_budget and not rate_limits.has_token_limit(caller):
        return Estimate(0, Decimal(0))
    spec = catalogue().models[request.model]
    input_tokens, output_tokens = _input_tokens(request), _output_tokens(request, spec)
    cost = spec.price.cost(input_tokens, 0, output_tokens)
    return Estimate(max(1, input_tokens + output_tokens), cost)


def _input_tokens(request: GenerationRequest) -> int:
    ready = sum(len(prompt) for prompt in request.prompts if not isinstance(prompt, str))
    size = sum(len(text.encode()) for text in _texts(request))
    return ready + len(request.messages) * _TOKENS_PER_MESSAGE + -(-size // _BYTES_PER_TOKEN)


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
    limits = (caller.key_limits.concurrent_runs, caller.project_limits.concurrent_runs)
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


def _reserve(admission: Admission) -> None:
    caller = admission.caller
    reserve(caller.project_id, caller.api_key_id, admission.estimate, admission.at)


def _refuse_rate(exc: rate_limits.RateLimited) -> NoReturn:
    wait_s = max(1, round(exc.window.reset_s))
    raise RateLimitError(
        f"Rate limit reached: {exc}. Please try again in {rate_limits.duration(wait_s)}.",
        retry_after_s=wait_s,
        headers=rate_limits.headers(exc.windows),
    ) from exc


def _refuse_quota(exc: BudgetExhausted, admission: Admission) -> NoReturn:
    raise QuotaError(
        f"You exceeded your current quota: {exc} is used up.",
        retry_after_s=exc.retry_after_s,
        headers=admission.headers,
    ) from exc
