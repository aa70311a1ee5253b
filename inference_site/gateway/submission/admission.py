"""Admission: whether a request fits the limits and budgets of its key and project, and its tier.

Requests and tokens per minute are counted before anything is written, and given back when the
request is refused after all. Concurrent runs and budgets are checked in the transaction that
accepts the generation, so that requests that come at once do not exceed them together.
"""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import Literal

from django.conf import settings
from django.db import connection
from django.utils import timezone

from inference_site.accounts import rate_limits
from inference_site.accounts.budgets import BudgetExhausted, Estimate, reserve
from inference_site.accounts.keys import Caller, Limits, shown_owner
from inference_site.accounts.rate_limits import count_request, takes_priority
from inference_site.catalogue.catalogue import catalogue
from inference_site.core.domain.request import AudioFile, GenerationRequest, TextPart
from inference_site.core.errors.api_errors import QuotaError, RateLimitError
from inference_site.core.errors.exceptions import api_error
from inference_site.gateway.submission.model_access import BYTES_PER_TOKEN, unknown_model
from inference_site.runs.models import IS_INDEXING, ServiceClass
from inference_site.runs.queue import WithRow
from inference_site.runs.usage.accounting import settle_for_request

_TOKENS_PER_MESSAGE = 10
"""Also for each pair of texts that is compared."""
_TOKENS_PER_VERDICT = 100
"""Of a guard, for each text that it judges: the longest that ``worker.runtime.guards`` allows."""
_SOUND_TOKENS_PER_SECOND, _WORD_TOKENS_PER_SECOND = 10, 5
"""Tokens of a transcript for each second: of the sound, as usage counts it, and of the words."""
_SOUND_TOKENS_PER_BYTE = 2
"""Of a speech as events, for each byte of its text: servers report the tokens of those only."""
_LEAST_BYTES_PER_SECOND, _MOST_BYTES_PER_SECOND = 2_000, 768_000
"""Bytes of a second of sound: compressed to 16 kbit/s, and the most that a WAV file may claim."""
_GENERATES = ("chat", "complete")
_LOCK_RUNS = f"""
SELECT pg_advisory_xact_lock({0x1F5A0001}, (%(key_id)s %% 2147483647)::int),
    pg_advisory_xact_lock({0x1F5A0002}, (%(project_id)s %% 2147483647)::int)
"""
"""Locks under which the runs of a key and of its project are counted."""
_COUNT_RUNS = f"""
SELECT count(*) FILTER (WHERE api_key_id = %(key_id)s), count(*),
    count(*) FILTER (WHERE api_key_id = %(key_id)s AND model = %(model)s),
    count(*) FILTER (WHERE model = %(model)s)
FROM generations_generation
WHERE project_id = %(project_id)s AND finished_at IS NULL
    AND NOT {IS_INDEXING}
"""  # noqa: S608  # A constant.
_COUNTED_RUNS = ("key", False), ("project", False), ("key", True), ("project", True)
"""Whose runs each column counts, and whether those of the model alone."""

TierName = Literal["default", "flex", "priority"]


@dataclass(frozen=True, slots=True)
class ServiceTier:
    """The tier that a request is served with, as its answer says, and its class in the queue."""

    name: TierName
    service_class: ServiceClass


def service_tier(caller: Caller, asked: str | None, *, background: bool = False) -> ServiceTier:
    """Return the tier for a request that asks for this one; a priority request is counted.

    ``flex`` waits behind all others. ``priority`` goes before them, for keys that have priority
    requests left in the current minute; any other request for it is served as usual, and its answer
    says so, as OpenAI's does. A response in the background waits in the background.
    """
    if asked == "flex":
        return ServiceTier("flex", ServiceClass.BACKGROUND)
    if background:
        return ServiceTier("default", ServiceClass.BACKGROUND)
    if asked in ("priority", "fast") and takes_priority(caller):
        return ServiceTier("priority", ServiceClass.PRIORITY)
    return ServiceTier("default", ServiceClass.FOREGROUND)


@dataclass(frozen=True, slots=True)
class Admission:
    """An admitted request: what was counted for it and when, and the headers that report it.

    ``with_row`` is what the request itself writes with its row, ``values`` are its end user and
    tags by dimension. An admission is a ``WithRow`` too.
    """

    caller: Caller
    model: str
    estimate: Estimate
    at: dt.datetime
    headers: dict[str, str]
    with_row: WithRow | None
    values: Mapping[str, str]

    @property
    def has_more_to_write(self) -> bool:
        """Whether anything is to be written or checked in the transaction of the row."""
        has_limit = bool(_run_limits(self.caller, self.model))
        return self.with_row is not None or self.estimate.tokens > 0 or has_limit

    def write(self) -> None:
        """Write what belongs to the row, check the concurrent runs and reserve in budgets.

        Raise RateLimitError or BudgetExhausted (see ``runs.queue.WithRow``).
        """
        if self.with_row is not None:
            self.with_row.write()
        _check_runs(self.caller, self.model)
        # Also without a known budget: accounting releases the row's estimate in each that is older.
        if self.estimate.tokens:
            owners = self.caller.project_id, self.caller.api_key_id
            reserve(*owners, self.estimate, self.at, self.values, self.model)


@contextmanager
def admit(
    caller: Caller,
    request: GenerationRequest,
    with_row: WithRow | None,
    values: Mapping[str, str],
) -> Iterator[Admission]:
    """Count a request; give the count back if the block raises: it was not accepted.

    Raise RateLimitError for too many requests per minute, and while requests that have not ended
    reserve the rest of a budget; QuotaError when a budget is used up.
    """
    estimate, model = estimate_usage(caller, request), request.model
    headers = _count(caller, estimate.tokens, model)
    try:
        yield Admission(caller, model, estimate, timezone.now(), headers, with_row, values)
    except BudgetExhausted as exc:
        rate_limits.give_back(caller, estimate.tokens, model)
        headers, retry_after_s = rate_limits.current_headers(caller, model), exc.retry_after_s
        if exc.is_used_up:
            message = f"You exceeded your current quota: {exc}."
            raise QuotaError(message, retry_after_s=retry_after_s, headers=headers) from exc
        message = f"Rate limit reached: {exc}. Please try again when one has ended."
        raise RateLimitError(message, retry_after_s=retry_after_s, headers=headers) from exc
    except Exception as exc:
        rate_limits.give_back(caller, estimate.tokens, model)
        error = api_error(exc)
        if isinstance(error, RateLimitError):
            error.headers.update(rate_limits.current_headers(caller, model))
            if error is not exc:  # The queue's: it knows no headers.
                raise error from exc
        raise


def _count(caller: Caller, tokens: int, model: str) -> dict[str, str]:
    """Count a request as ``count_request`` does.

    Before a limit of tokens refuses it, the estimates of what has ended are corrected.
    """
    try:
        return count_request(caller, tokens, model)
    except RateLimitError as exc:
        if exc.type != "tokens":
            raise
        settle_for_request(caller.project_id)
        return count_request(caller, tokens, model)


def estimate_usage(caller: Caller, request: GenerationRequest) -> Estimate:
    """Return an upper estimate of a request's tokens and cost; zero if no limit needs it."""
    if not caller.has_budget and not rate_limits.has_token_limit(caller, request.model):
        return Estimate(0, Decimal(0))
    return most_usage(request)


def most_usage(request: GenerationRequest) -> Estimate:
    """Return an upper estimate of a request's tokens and cost.

    The web process has no tokenizer: three bytes count as one token, and each message as ten more.
    An answer without a bound counts as ``RESERVED_OUTPUT_TOKENS``; none counts as more than the
    model's context. The length of a sound is taken from the size of its file.
    """
    spec = catalogue().models.get(request.model)
    if spec is None:  # It has been removed since this request was checked.
        raise unknown_model(request.model)
    input_tokens = sum(len(prompt) for prompt in request.prompts if not isinstance(prompt, str))
    messages = len(request.messages) + len(request.query_of_each)
    input_tokens += messages * _TOKENS_PER_MESSAGE
    size = sum(len(text.encode()) for text in _texts(request))
    size += len((request.suffix or "").encode()) * len(request.prompts)
    input_tokens += -(-size // BYTES_PER_TOKEN)
    output_tokens = 0
    if request.operation in _GENERATES:
        bound = request.max_output_tokens
        each = settings.RESERVED_OUTPUT_TOKENS if bound is None else bound
        output_tokens = request.answers * min(each, spec.context_length)
    elif request.guard:
        output_tokens = _TOKENS_PER_VERDICT * max(1, len(request.prompts))
    elif request.audio is not None:
        seconds = _most_seconds(request.audio)
        input_tokens += seconds * _SOUND_TOKENS_PER_SECOND
        output_tokens = seconds * _WORD_TOKENS_PER_SECOND
    elif request.operation == "speak" and request.streams:
        output_tokens = size * _SOUND_TOKENS_PER_BYTE
    cost = spec.price.cost(input_tokens, 0, output_tokens)
    return Estimate(max(1, input_tokens + output_tokens), cost)


def _most_seconds(audio: AudioFile) -> int:
    """Return the most seconds that a sound may last.

    A WAV file names its bytes per second; others count as speech compressed to 16 kbit/s.
    """
    head, rate = base64.b64decode(audio.content[:4096]), 0
    if audio.ending == "wav" and (start := head.find(b"fmt ")) >= 0:
        rate = int.from_bytes(head[start + 16 : start + 20], "little")
    rate = max(_LEAST_BYTES_PER_SECOND, min(rate, _MOST_BYTES_PER_SECOND))
    return -(-len(audio.content) * 3 // 4 // rate)


def _texts(request: GenerationRequest) -> Iterator[str]:
    for message in request.messages:
        yield message.text or ""
        yield message.reasoning or ""
        yield from (part.text for part in message.parts if isinstance(part, TextPart))
        yield from (repr(call.arguments) for call in message.tool_calls)
    yield from (prompt for prompt in request.prompts if isinstance(prompt, str))
    yield from chain.from_iterable(request.other_files)
    yield from request.query_of_each
    yield from (repr(tool) for tool in request.tools)


def _check_runs(caller: Caller, model: str) -> None:
    """Raise RateLimitError when the key or project has more concurrent runs than it may.

    The new row is written already, and the locks make others wait for its commit.
    """
    limits = _run_limits(caller, model)
    if not limits:
        return
    row: dict[str, int | str]
    row = {"key_id": caller.api_key_id, "project_id": caller.project_id, "model": model}
    with connection.cursor() as cursor:
        cursor.execute(_LOCK_RUNS, row)
        cursor.execute(_COUNT_RUNS, row)
        counts = dict(zip(_COUNTED_RUNS, cursor.fetchone(), strict=True))
    for limit, most in limits:
        if counts[limit.owner, bool(limit.model)] > most:
            raise RateLimitError(
                f"Rate limit reached: {most} runs at one time of "
                f"{shown_owner(limit.owner, limit.model)}. "
                "Please try again when one has ended.",
                retry_after_s=1,
            )


def _run_limits(caller: Caller, model: str) -> list[tuple[Limits, int]]:
    """Return the limits on concurrent runs that hold for this model."""
    return [
        (limits, limits.concurrent_runs)
        for limits in caller.limits
        if limits.concurrent_runs is not None and limits.holds_for(model)
    ]
