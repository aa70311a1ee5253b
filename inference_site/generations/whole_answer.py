"""Answers that come in one piece: what the assemblers that never stream have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from inference_site.domain.errors import Cancelled
from inference_site.errors.exceptions import api_error
from inference_site.generations.kinds import Assembler
from inference_site.streams.batches import Ending


class WholeAnswerAssembler(Assembler):
    """Assembles one answer (see ``generations.kinds.Assembler``)."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the answer, once all deltas have come."""

    def complete(self) -> Ending:
        """End with the answer."""
        return Ending([], 200, orjson.dumps(self.answer()), finish_reason="stop")

    def cancel(self) -> Ending:
        """End because it was stopped."""
        return cancelled(self.fail(Cancelled()))

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return failure(error)


def cancelled(refusal: Ending, frames: Sequence[bytes] = ()) -> Ending:
    """End what was cancelled, with these frames; ``refusal`` is the kind's failure of Cancelled.

    Who cancels has left or was answered already. Somebody who sent the same request again, under
    one idempotency key, reads the error, and may try again.
    """
    return replace(refusal, frames=frames, error_code="", is_early=False)


DONE = b"data: [DONE]\n\n"
"""The last frame of every stream."""


def failure(error: Exception, partial: dict[str, Any] | None = None, *, first: int = 0) -> Ending:
    """End a completion of either kind: a status before the first byte, an event after it.

    ``partial`` is the object with what was answered until then. Events of completions have no
    numbers, so ``first`` has no meaning here (see ``generations.kinds.Failure``).
    """
    answer = api_error(error)
    envelope = answer.envelope
    if partial is not None:
        envelope["error"]["partial_response"] = partial
    body = orjson.dumps(envelope)
    event = b"data: " + body + b"\n\n"
    return Ending(
        [event, DONE],
        answer.status,
        body,
        error_code=answer.code or answer.type,
        is_early=True,
        retry_after_s=answer.retry_after_s,
    )
