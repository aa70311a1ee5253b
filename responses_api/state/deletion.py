"""Deleting responses and conversations, as far as nothing builds on them.

What others build on is hidden, and deleted with the last of them. A row is locked before it is
asked whether it is needed: who builds on one holds it until that is committed, and the next
statement sees it. A conversation is locked before those of its responses that have ended.
"""

from __future__ import annotations

from django.db import transaction
from django.utils import timezone

from inference_site.idempotency.models import forget_answer
from inference_site.storage.postgresql import end_transaction_if_idle
from inference_site.streams.request_documents import drop_document
from responses_api.models import Conversation, Item, StoredResponse


def delete(stored: StoredResponse) -> None:
    """Delete a response and its stream; while others build on it, it is hidden instead.

    Raise redis' errors when Redis is down; then nothing is deleted.
    """
    drop_document(stored.public_id)
    with transaction.atomic():
        if _lock(stored.pk) is not None:
            StoredResponse.objects.filter(pk=stored.pk).update(deleted_at=timezone.now())
            forget_answer(stored.public_id)
            _sweep(stored.pk)


def delete_conversation(conversation: Conversation) -> None:
    """Delete a conversation; while one of its responses is there, it is hidden instead."""
    with transaction.atomic():
        if _lock_conversation(conversation.pk) is not None:
            rows = Conversation.objects.filter(pk=conversation.pk)
            rows.update(deleted_at=timezone.now())
            _sweep_conversation(conversation.pk)


def _lock(pk: int) -> StoredResponse | None:
    rows = StoredResponse.objects.filter(pk=pk)
    conversation_pk = rows.values_list("conversation_id", flat=True).first()
    if conversation_pk is not None:
        _lock_conversation(conversation_pk)
    return rows.select_for_update().first()


def _lock_conversation(pk: int) -> Conversation | None:
    end_transaction_if_idle()
    return Conversation.objects.select_for_update().filter(pk=pk).first()


def _sweep(pk: int | None) -> None:
    """Delete the hidden response and those before it that nothing builds on any more."""
    while pk is not None and (found := _lock(pk)) is not None and found.deleted_at is not None:
        if found.conversation_id is not None:
            _sweep_conversation(found.conversation_id)
            if not StoredResponse.objects.filter(pk=pk).exists():
                return
        if found.children.exists() or found.items.filter(conversation__isnull=False).exists():
            return
        pk = found.previous_id
        found.delete()


def _sweep_conversation(pk: int) -> None:
    """Delete a hidden conversation with its responses, once all are hidden and none is built on."""
    conversation = _lock_conversation(pk)
    if conversation is None or conversation.deleted_at is None:
        return
    # One that runs is not hidden. It is not locked here: its end locks it before its conversation.
    if conversation.responses.filter(deleted_at=None).exists():
        return
    list(conversation.responses.select_for_update().order_by("pk"))
    if StoredResponse.objects.filter(previous__conversation=pk).exists():
        return
    Item.objects.filter(conversation=pk).delete()
    conversation.responses.all().delete()
    conversation.delete()
