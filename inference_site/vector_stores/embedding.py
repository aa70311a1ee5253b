"""Embeddings for the site itself: generations of the queue, for the key that pays for them."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson
from django.utils import timezone

from inference_site.accounts.budgets import BudgetExhausted, Estimate, reserve
from inference_site.accounts.keys import caller_of_key
from inference_site.catalogue.catalogue import catalogue
from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.runs.cancellation import cancel
from inference_site.runs.models import Generation, ServiceClass
from inference_site.runs.queue import enqueue, new_id
from inference_site.runs.streams.batches import Ending
from inference_site.runs.streams.event_log import log_position, read_log
from inference_site.runs.streams.request_documents import Assembly, Document
from inference_site.vector_stores.kinds import EMBEDDING

_BYTES_PER_TOKEN = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
_LOOK_AT_ROW_S = 5.0
_TOO_LONG = "context_length_exceeded"


class TextTooLong(Exception):
    """A text has more tokens than the model takes."""


class EmbeddingRefused(Exception):
    """The model has failed to embed the texts."""


class NoBudget(Exception):
    """A budget of the key or its project is used up."""


class NotPossible(Exception):
    """These texts cannot be embedded, also not later. The message is for the client."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    """Reserves the estimated usage in the budgets, in the transaction of the row."""

    row: Generation = field(repr=False)
    estimate: Estimate

    def write(self) -> None:
        """Reserve. Raise BudgetExhausted (see ``runs.queue.WithRow``)."""
        reserve(self.row.project_id, self.row.api_key_id or 0, self.estimate, self.row.created_at)


def embed(
    api_key_id: int,
    model: str,
    texts: Sequence[str],
    *,
    timeout_s: float,
    is_cancelled: Callable[[], bool],
    in_background: bool = False,
    request_id: str = "",
) -> list[array[float]]:
    """Return the vectors of texts, in their order, computed by a worker that serves the model.

    Blocks. Raise TextTooLong, NoBudget, NotPossible for a key or model that is gone,
    EmbeddingRefused, and the errors of ``enqueue``; TimeoutError after ``timeout_s``, or when
    ``is_cancelled`` returns true: the generation is then cancelled.
    """
    with release_connection_after():
        caller = caller_of_key(api_key_id)
    if caller is None:
        raise NotPossible("The API key is not valid any more.")
    spec = catalogue().models.get(model)
    if spec is None:
        raise NotPossible(f"The embedding model `{model}` does not exist any more.")
    row = Generation(
        public_id=new_id("embd-"),
        kind=EMBEDDING,
        project_id=caller.project_id,
        api_key_id=caller.api_key_id,
        model=model,
        request_id=request_id,
        service_class=ServiceClass.BACKGROUND if in_background else ServiceClass.FOREGROUND,
        background=in_background,
        created_at=timezone.now(),
    )
    document = Document(
        GenerationRequest(model, operation="embed", prompts=tuple(texts)), Assembly()
    )
    reservation = None
    if caller.has_budget:
        tokens = -(-sum(len(text.encode()) for text in texts) // _BYTES_PER_TOKEN)
        estimate = Estimate(max(1, tokens), spec.price.cost(tokens, 0, 0))
        row.reserved_tokens, row.reserved_cost = estimate.tokens, estimate.cost
        reservation = _Reservation(row, estimate)
    with release_connection_after():
        try:
            enqueue(row, document, None, with_row=reservation)
        except BudgetExhausted as exc:
            raise NoBudget(f"{exc} is used up.") from exc
    try:
        ending = _ending_of(row.public_id, time.monotonic() + timeout_s, is_cancelled)
    except BaseException:
        cancel([row.public_id])
        raise
    if ending.error_code == _TOO_LONG:
        raise TextTooLong
    if ending.error_code or not ending.body:
        raise EmbeddingRefused(f"The model `{model}` could not embed: {ending.error_code}.")
    vectors = orjson.loads(ending.body)["vectors"]
    return [array("f", base64.b64decode(vector)) for vector in vectors]


def _ending_of(generation_id: str, deadline: float, is_cancelled: Callable[[], bool]) -> Ending:
    """Wait for the end of a generation."""
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
                    raise GenerationFailed("The embeddings were lost.")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
