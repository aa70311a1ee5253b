"""Generations that the site makes for a request, and waits for: for the key that pays for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.utils import timezone

from inference_site.accounts.budgets import BudgetExhausted, Estimate, reserve, values_of
from inference_site.accounts.keys import caller_of_key
from inference_site.catalogue.catalogue import catalogue
from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.runs.cancellation import cancel
from inference_site.runs.models import Generation, ServiceClass
from inference_site.runs.queue import enqueue
from inference_site.runs.streams.batches import Ending
from inference_site.runs.streams.event_log import log_position, read_log
from inference_site.runs.streams.request_documents import Document

_BYTES_PER_TOKEN = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
_LOOK_AT_ROW_S = 5.0


class NoBudget(Exception):
    """A budget of the key or its project has no room."""


class NotPossible(Exception):
    """The generation can never be run. The message is for the client."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    """Reserves the estimated usage in the budgets, in the transaction of the row."""

    row: Generation = field(repr=False)
    estimate: Estimate

    def write(self) -> None:
        """Reserve. Raise BudgetExhausted (see ``runs.queue.WithRow``)."""
        row = self.row
        values = values_of(row.end_user, row.tags)
        owners = row.project_id, row.api_key_id or 0
        reserve(*owners, self.estimate, row.created_at, values, row.model)


def run_and_wait(
    generation_id: str,
    kind: str,
    document: Document[Any],
    api_key_id: int,
    *,
    size_bytes: int,
    timeout_s: float,
    is_cancelled: Callable[[], bool],
    in_background: bool = False,
    request_id: str = "",
    route: str = "",
    end_user: str = "",
    tags: Sequence[str] = (),
) -> Ending:
    """Return the ending of a generation without output tokens, run by a worker of its model.

    ``size_bytes`` is the size of its texts, for budgets and token limits. These count what runs for
    an accepted request, and not what runs ``in_background``; they refuse neither. ``route`` is the
    name by which the request chose the model, which the key may allow instead of the model.
    ``end_user`` and ``tags`` are those of the request: they use it, and it is forgotten with them.
    Blocks.
    Raise NoBudget; NotPossible for a key or model that no longer exists, or not for it; the errors
    of ``enqueue``; TimeoutError after ``timeout_s``, or when ``is_cancelled`` returns true: the
    generation is then cancelled.
    """
    # Here, so that a worker starts without the library of limits.
    from inference_site.accounts.rate_limits import add_tokens, has_token_limit

    with release_connection_after():
        caller = caller_of_key(api_key_id)
    if caller is None:
        raise NotPossible("The API key is not valid any more.")
    model = document.request.model
    if not caller.allows(model, route):
        raise NotPossible(f"The API key or its project does not allow the model `{model}`.")
    spec = catalogue().models.get(model)
    if spec is None or not spec.is_for(caller.project_name):
        raise NotPossible(f"The model `{model}` does not exist any more.")
    row = Generation(
        public_id=generation_id,
        kind=kind,
        project_id=caller.project_id,
        api_key_id=caller.api_key_id,
        model=model,
        request_id=request_id,
        service_class=ServiceClass.BACKGROUND if in_background else ServiceClass.FOREGROUND,
        background=in_background,
        end_user=end_user,
        tags=list(tags),
        created_at=timezone.now(),
    )
    counts_tokens = has_token_limit(caller, model) and not in_background
    reservation = None
    if caller.has_budget or counts_tokens:
        tokens = -(-size_bytes // _BYTES_PER_TOKEN)
        estimate = Estimate(max(1, tokens), spec.price.cost(tokens, 0, 0))
        row.reserved_tokens, row.reserved_cost = estimate.tokens, estimate.cost
        reservation = _Reservation(row, estimate) if caller.has_budget else None
    with release_connection_after():
        try:
            enqueue(row, document, None, with_row=reservation)
        except BudgetExhausted as exc:
            raise NoBudget(f"{exc}.") from exc
    if counts_tokens:  # Once it is accepted; accounting corrects it after the end.
        add_tokens(caller, row.reserved_tokens, model)
    try:
        return _ending_of(generation_id, time.monotonic() + timeout_s, is_cancelled)
    except BaseException:
        cancel([generation_id])
        raise


def _ending_of(generation_id: str, deadline: float, is_cancelled: Callable[[], bool]) -> Ending:
    """Wait for the end of a generation, whose log may be lost while it waits."""
    pause_s, looks_at = _FIRST_PAUSE_S, time.monotonic() + _LOOK_AT_ROW_S
    while True:
        position = log_position(generation_id, 0)
        if position.has_ended and (ending := read_log(generation_id)[-1].ending) is not None:
            return ending
        now = time.monotonic()
        if now >= deadline or is_cancelled():
            raise TimeoutError
        if position.is_empty and now >= looks_at:
            looks_at = now + _LOOK_AT_ROW_S
            with release_connection_after():
                is_over = Generation.objects.filter(public_id=generation_id).exclude(
                    finished_at=None
                )
                if is_over.exists() and log_position(generation_id, 0).is_empty:
                    raise GenerationFailed("The result was lost.")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
