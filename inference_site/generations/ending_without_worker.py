"""Ending a generation in place of a worker: it died, never came, or was not needed any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer

from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.deltas import Usage
from inference_site.domain.model_spec import Price
from inference_site.generations.kinds import Assembler, Kind, kind_of, recovered
from inference_site.generations.models import Generation, Status
from inference_site.observability.metrics import count_ended
from inference_site.storage.postgresql import transaction_with_timeouts
from inference_site.streams.batches import Sent
from inference_site.streams.ending import Ending
from inference_site.streams.event_log import channel_message, close_log, take_log
from inference_site.streams.log_scripts import Appended
from inference_site.streams.request_documents import drop_document, load_document


def end_in_place(
    generation: Generation, status: Status, move: Callable[[], bool], error: Exception | None
) -> bool:
    """End a generation and its stream; without an error it counts as cancelled.

    ``move`` is the guarded update of its row: when that finds that somebody else was first,
    nothing is done and False is returned.
    """
    kind = kind_of(generation.kind)
    with transaction_with_timeouts():
        if not move():  # From here to the commit a worker that lives after all waits with its own.
            return False
        assembler, ending, first = _ended(kind, generation, error)
        if assembler is not None and assembler.pieces:
            _account(generation, assembler.pieces)
        if kind.store_result is not None and assembler is not None:
            kind.store_result(generation.public_id, status, assembler, None)
    error_code = "" if ending is None else ending.error_code
    count_ended(generation.model, generation.kind, status, error_code)
    if ending is None:
        drop_document(generation.public_id)
        return True
    # Its worker appends nothing any more, unless it is of a release that does not ask.
    answer = close_log(generation.public_id, ending, first)
    if answer is None:
        answer = close_log(generation.public_id, ending)
    assert answer is not None
    _tell(generation.public_id, answer)
    return True


def _ended(
    kind: Kind[Any], generation: Generation, error: Exception | None
) -> tuple[Assembler | None, Ending | None, int | None]:
    """Return the ending, what made it, and the number of its first frame, if they depend on it."""
    # A worker that comes back much later, when the log has expired, may not begin it anew.
    sent = take_log(generation.public_id, generation.attempt + 1)
    if kind.recover is None:
        assembler, first = _of_document(kind, generation.public_id, sent), sent.next
        if assembler is None or error is None:
            return None, None if error is None else kind.failure(error), None
    else:
        assembler, first = recovered(kind, generation.public_id, sent)
    if assembler is None:
        return None, None if error is None else kind.failure(error, first=first), first
    if assembler.pieces:
        assembler.feed(Usage(output_tokens=assembler.pieces))
    return assembler, assembler.cancel() if error is None else assembler.fail(error), first


def _of_document(kind: Kind[Any], generation_id: str, sent: Sent) -> Assembler | None:
    """Return what ends a stream of which nothing is stored; None if it has nothing to go by."""
    document = load_document(generation_id, kind.assembly).document if sent.frames else None
    if document is None:
        return None
    assembler = kind.assembler(document.assembly)
    assembler.recover(sent)
    return assembler


def _account(generation: Generation, output_tokens: int) -> None:
    """Count what was sent: a piece is a token at least. The worker took the other counts along."""
    spec = catalogue().models.get(generation.model)
    price = Price() if spec is None else spec.price
    rows = Generation.objects.filter(public_id=generation.public_id)
    rows.update(output_tokens=output_tokens, cost=price.cost(0, 0, output_tokens))


def _tell(generation_id: str, answer: Appended) -> None:
    """Tell who follows; they read the log, which knows the numbers of the frames."""

    async def send() -> None:
        for channel in answer.followers:
            await get_channel_layer().send(channel, channel_message([(generation_id, b"")]))

    if answer.followers:
        # The loop that had this done in a thread may have ended, and would never do it.
        async_to_sync(send, force_new_loop=True)()
