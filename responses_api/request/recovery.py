"""Responses whose worker, document or log is gone: how they go on from what is left."""

from __future__ import annotations

from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.streams.batches import Sent
from inference_site.streams.request_documents import Document
from inference_site.submission.context_bound import ContextBound
from inference_site.submission.model_access import with_capabilities
from responses_api.models import StoredResponse
from responses_api.output.assembler import ResponseAssembler, ResponseAssembly
from responses_api.output.events import decode
from responses_api.request.creation import to_document
from responses_api.state.context import Context
from responses_api.state.history import Room, history_of, items_before
from responses_api.state.items import IdentifiedItem
from responses_api.state.reading import stored_response
from responses_api.wire.request import ResponseRequest


def recover(generation_id: str, sent: Sent) -> ResponseAssembler | None:
    """Return an assembler that ends a response after these frames (see ``generations.kinds.Kind``).

    Its object is in the first of them; when they are lost it is made from what is stored.
    """
    if sent.frames:
        response = decode(sent.frames[0])["response"]
    elif stored := _find(generation_id):
        response = stored_response(stored, []).model_dump()
    else:
        return None
    assembler = ResponseAssembler(response, sends_done=settings.RESPONSES_SEND_DONE)
    assembler.recover(sent)
    return assembler


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
    body = ResponseRequest.model_validate(stored.request)
    room = Room(ContextBound.of(spec), may_cut=body.truncation == "auto")
    previous = stored.previous
    before = history_of(previous, room) if previous else items_before(stored, room)
    context = Context(new, before, previous, stored.conversation)
    response = stored_response(stored, []).model_dump()
    return to_document(stored.project_id, body, context, with_capabilities(spec), response)


def _find(public_id: str) -> StoredResponse | None:
    rows = StoredResponse.objects.select_related("previous", "conversation")
    return rows.filter(public_id=public_id).first()
