"""Responses whose worker, document or log is gone: what is left of them, and how they go on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.generations.models import Generation, Status
from inference_site.streams.event_log import frames_of, read_log
from inference_site.streams.request_documents import Document
from inference_site.submission.model_access import resolved
from responses_api.assembler import ResponseAssembler
from responses_api.context import Context
from responses_api.creation import ResponseAssembly, to_document
from responses_api.events import decode
from responses_api.history import history_of, items_before
from responses_api.items import IdentifiedItem
from responses_api.models import ENDED, Item, StoredResponse
from responses_api.objects import stored_object
from responses_api.transcript import Transcript
from responses_api.wire.request import ResponseRequest


def recover(generation_id: str, frames: Sequence[bytes]) -> ResponseAssembler | None:
    """Return an assembler that ends a response after these frames (see ``generations.kinds.Kind``).

    Its object is in the first of them; when they are lost it is made from what is stored.
    """
    if frames:
        assembler = _assembler(decode(frames[0])["response"])
        assembler.recover(frames)
        return assembler
    stored = _find(generation_id)
    return None if stored is None else _assembler(stored_object(stored, []))


def _assembler(response: dict[str, Any]) -> ResponseAssembler:
    return ResponseAssembler(response, sends_done=settings.RESPONSES_SEND_DONE)


def rebuild(generation_id: str) -> Document[ResponseAssembly] | None:
    """Return the request document of a stored response anew."""
    stored = _find(generation_id)
    spec = None if stored is None else catalogue().find(stored.model)
    if stored is None or spec is None:
        return None
    new = [
        IdentifiedItem(item.public_id, item.data)
        for item in stored.items.filter(is_output=False).order_by("position")
    ]
    before = history_of(stored.previous) if stored.previous else items_before(stored)
    context = Context(new, before, stored.previous, stored.conversation)
    body = ResponseRequest.model_validate(stored.request)
    return to_document(stored.project_id, body, context, resolved(spec), stored_object(stored, []))


def shown(stored: StoredResponse) -> dict[str, Any]:
    """Return the object of a response in any state, with what there is of its output."""
    return shown_many([stored])[0]


def shown_many(rows: Sequence[StoredResponse]) -> list[dict[str, Any]]:
    """Return the objects of responses, in order; the output of all of them is one query."""
    items = Item.objects.filter(response__in=[row.pk for row in rows], is_output=True)
    output: dict[int | None, list[dict[str, Any]]] = defaultdict(list)
    ordered = items.order_by("response_id", "position")
    for response_id, public_id, data in ordered.values_list("response_id", "public_id", "data"):
        output[response_id].append({"id": public_id, **data})
    return [
        stored_object(row, output[row.pk]) if row.status in ENDED else _running(row) for row in rows
    ]


def _running(stored: StoredResponse) -> dict[str, Any]:
    status = _status(stored)
    if status == "queued":  # What an earlier attempt has said is no part of the output.
        return stored_object(stored, [], status)
    frames = frames_of(read_log(stored.public_id))
    return stored_object(stored, Transcript(frames).shown_output(), status)


def _status(stored: StoredResponse) -> str:
    """Return the status of one that has not ended."""
    if not stored.background:
        return "in_progress"
    waits = Generation.objects.filter(public_id=stored.public_id, status=Status.QUEUED).exists()
    return "queued" if waits else "in_progress"


def _find(public_id: str) -> StoredResponse | None:
    rows = StoredResponse.objects.select_related("previous", "conversation")
    return rows.filter(public_id=public_id).first()
