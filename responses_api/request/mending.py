"""What is stored of a response and contradicts its generation: found, counted and ended.

Both end in one transaction, so there should be nothing to find. If there is after all (an earlier
release, an end that the database refused), a client would wait for it for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet

from inference_site.generations.models import TERMINAL, Generation, Status
from inference_site.storage.postgresql import cached_sql, transaction_with_timeouts
from inference_site.streams.batches import Sent
from responses_api.models import ENDED, Conversation, ResponseStatus, StoredResponse

_MOST_AT_ONCE = 100
_OPEN = (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)


def contradictions() -> Mapping[str, int]:
    """Return how many responses and locks there are whose generation has ended."""
    return {
        "responses that have not ended, though their generation has": _torn().count(),
        "conversations locked by a response that has ended": _stale_locks().count(),
    }


def mend() -> None:
    """End such responses like their generations, and such locks."""
    for (public_id,) in _some_torn():
        _end(public_id)
    for (pk,) in _some_stale_locks():
        _unlock(pk)


@cached_sql
def _some_torn() -> QuerySet[Any, Any]:
    return _torn().values_list("public_id")[:_MOST_AT_ONCE]


@cached_sql
def _some_stale_locks() -> QuerySet[Any, Any]:
    return _stale_locks().values_list("pk")[:_MOST_AT_ONCE]


def _running(public_id: OuterRef) -> QuerySet[Generation]:
    return Generation.objects.filter(public_id=public_id).exclude(status__in=TERMINAL)


def _torn() -> QuerySet[StoredResponse]:
    unended = StoredResponse.objects.filter(status__in=_OPEN)
    return unended.exclude(Exists(_running(OuterRef("public_id")))).order_by("pk")


def _stale_locks() -> QuerySet[Conversation]:
    locked = Conversation.objects.filter(~Q(locked_by=""))
    return locked.exclude(Exists(_running(OuterRef("locked_by")))).order_by("pk")


@transaction_with_timeouts()
def _end(public_id: str) -> None:
    """End a response whose output is lost, like its generation, or as failed."""
    # All that makes requests and answers; there is hardly ever anything to end.
    from responses_api.request.recovery import recover
    from responses_api.state.storage import store_result

    stored = StoredResponse.objects.select_for_update().filter(public_id=public_id).first()
    assembler = recover(public_id, Sent())
    if stored is None or stored.status in ENDED or assembler is None:
        return
    ended = Generation.objects.filter(public_id=public_id, status=Status.CANCELLED)
    if ended.exists():
        status = Status.CANCELLED
        assembler.cancel()
    else:
        status = Status.FAILED
        assembler.fail(RuntimeError("Its end was not stored."))
    store_result(public_id, status, assembler, None)


@transaction_with_timeouts()
def _unlock(pk: int) -> None:
    """Take a stale lock away, unless another response has taken it meanwhile."""
    found = Conversation.objects.select_for_update().filter(pk=pk).first()
    if found is not None and _stale_locks().filter(pk=pk).exists():
        Conversation.objects.filter(pk=pk).update(locked_by="")
