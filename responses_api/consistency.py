"""Ends responses and locks whose generation has ended.

While a response is open, the row of its generation says whether it runs (``annotations``); the two
end in one transaction. The response keeps the final status itself: the row of its generation is
deleted after ``USAGE_LOG_DAYS``, and does not tell ``incomplete`` from ``completed``. They
contradict each other only if the end of a response could not be built or stored, so that its
generation failed alone (``worker.runtime.run``), or after an earlier release. Clients would wait
for such a response for ever. A pass that finds none takes 0.6 ms. See
``inference_site.runs.kinds.Mending``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet

from inference_site.core.storage.postgresql import cached_sql, transaction_with_timeouts
from inference_site.runs.models import TERMINAL, Generation, Status
from inference_site.runs.streams.batches import Sent
from responses_api.models import ENDED, Conversation, ResponseStatus, StoredResponse

_BATCH = 100


def contradictions() -> Mapping[str, int]:
    """Count the responses and locks whose generation has ended."""
    return {
        "responses that have not ended, though their generation has": _open_responses().count(),
        "conversations locked by a response that has ended": _stale_locks().count(),
    }


def mend() -> None:
    """End these responses like their generations, and remove these locks."""
    for (public_id,) in _read_open_responses():
        _end(public_id)
    for (pk,) in _read_stale_locks():
        with transaction_with_timeouts():
            found = Conversation.objects.select_for_update().filter(pk=pk).first()
            # Another response may have taken it meanwhile.
            if found is not None and _stale_locks().filter(pk=pk).exists():
                Conversation.objects.filter(pk=pk).update(locked_by="")


@cached_sql
def _read_open_responses() -> QuerySet[Any, Any]:
    return _open_responses().values_list("public_id")[:_BATCH]


@cached_sql
def _read_stale_locks() -> QuerySet[Any, Any]:
    return _stale_locks().values_list("pk")[:_BATCH]


def _open_responses() -> QuerySet[StoredResponse]:
    open_ = (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)
    rows = StoredResponse.objects.filter(status__in=open_)
    return rows.exclude(Exists(_running(OuterRef("public_id")))).order_by("pk")


def _stale_locks() -> QuerySet[Conversation]:
    locked = Conversation.objects.filter(~Q(locked_by=""))
    return locked.exclude(Exists(_running(OuterRef("locked_by")))).order_by("pk")


def _running(public_id: OuterRef) -> QuerySet[Generation]:
    return Generation.objects.filter(public_id=public_id).exclude(status__in=TERMINAL)


@transaction_with_timeouts()
def _end(public_id: str) -> None:
    """End a response, whose output is lost, as cancelled or failed."""
    # Imported here, because beat hardly ever needs these.
    from responses_api.storage import store_result
    from responses_api.stored_responses import recover

    stored = StoredResponse.objects.select_for_update().filter(public_id=public_id).first()
    assembler = recover(public_id, Sent())
    if stored is None or stored.status in ENDED or assembler is None:
        return
    if Generation.objects.filter(public_id=public_id, status=Status.CANCELLED).exists():
        status = Status.CANCELLED
        assembler.cancel()
    else:
        status = Status.FAILED
        assembler.fail(RuntimeError("Its end was not stored."))
    store_result(public_id, status, assembler, None)
