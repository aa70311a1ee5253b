"""Deletes responses and conversations: when a client asks, and after their retention.

A row that others build on is hidden (``deleted_at``), and deleted together with the last of these.
A row is locked before the query for rows that build on it: a transaction that adds one holds a lock
on the row until it commits, so the query sees the new row. A conversation is locked before those of
its responses that have ended; of a chain, the last response is locked first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.db import connection, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from inference_site.accounts.models import retention_cutoffs
from inference_site.core.storage.postgresql import end_transaction_if_idle
from inference_site.gateway.idempotency.models import forget_answers
from inference_site.outbox.models import forget_arguments
from inference_site.runs.streams.request_documents import drop_document, drop_documents
from responses_api.models import ENDED, Conversation, Item, StoredResponse

_BATCH = 500
_DELETE_ROWS = """
WITH deleted AS (SELECT unnest(%(pks)s::bigint[]) AS pk), approvals AS (
    DELETE FROM responses_api_mcpapproval WHERE item_id IN (
        SELECT id FROM responses_api_item WHERE response_id IN (SELECT pk FROM deleted)
    )
), items AS (
    DELETE FROM responses_api_item WHERE response_id IN (SELECT pk FROM deleted)
)
DELETE FROM responses_api_storedresponse WHERE id IN (SELECT pk FROM deleted)
"""
"""The foreign keys are checked when the transaction is committed."""
_DELETED = "[deleted]"
"""What is in the place of a content that was removed."""
_KEPT_TEXTS = frozenset({"type", "role", "status", "call_id", "name", "namespace", "phase"})
"""Fields of an item that stay when its content is removed: a later prompt needs its form."""


def delete(stored: StoredResponse) -> None:
    """Delete a response and its stream, or hide the response while others build on it.

    Raise redis.RedisError when Redis is down; then nothing is deleted.
    """
    drop_document(stored.public_id)
    with transaction.atomic():
        if _lock(stored.pk) is not None:
            _hide(StoredResponse.objects.filter(pk=stored.pk))
            forget_answers([stored.public_id])
            _sweep(stored.pk)


def _hide(rows: QuerySet[StoredResponse]) -> None:
    rows.update(deleted_at=timezone.now(), rating="", feedback=[])


def delete_conversation(conversation: Conversation) -> None:
    """Delete a conversation, or hide it while it has a response that is not deleted."""
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
    """Delete a hidden response that nothing builds on, then those before it likewise."""
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
    """Delete a hidden conversation, if its responses are hidden and nothing builds on them."""
    conversation = _lock_conversation(pk)
    if conversation is None or conversation.deleted_at is None:
        return
    # A running response is not hidden. So only ended ones are locked below; the end of a running
    # one locks its row before the conversation, which would be the other order.
    if conversation.responses.filter(deleted_at=None).exists():
        return
    list(conversation.responses.select_for_update().order_by("pk"))
    if StoredResponse.objects.filter(previous__conversation=pk).exists():
        return
    Item.objects.filter(conversation=pk).delete()
    conversation.responses.all().delete()
    conversation.delete()


def remove_item(item: Item) -> None:
    """Remove an item from its conversation, whose row is locked; a response keeps its item.

    A hidden response is deleted with the last of its items that the conversation had.
    """
    if item.response_id is None:
        item.delete()
    else:
        rows = Item.objects.filter(pk=item.pk)
        rows.update(conversation=None, conversation_position=None)
        _sweep(item.response_id)


def prune(until: float) -> int:
    """Delete rows that are older than their project keeps them, until ``until``; return how many.

    ``until`` is a time of the monotonic clock. See ``inference_site.runs.kinds.Retention``. The
    order is random, as that of the projects, because many projects take all of the time. Some of
    what was found is deleted in any case, because that may have taken all of the time, too.
    """
    kinds = [_prune_responses, _prune_conversations]
    random.shuffle(kinds)
    return sum(prune_kind(until) for prune_kind in kinds)


def _prune_responses(until: float) -> int:
    deleted = 0
    for project, since in retention_cutoffs("responses_days", until):
        ended = StoredResponse.objects.filter(project=project, status__in=ENDED, deleted_at=None)
        rows = ended.filter(created_at__lt=since).order_by("created_at", "pk")
        while found := list(rows[:_BATCH]):
            deleted += _delete_old([stored for stored in found if stored.conversation_id is None])
            for stored in found:
                if stored.conversation_id is not None:
                    delete(stored)
                    deleted += 1
                    if time.monotonic() >= until:
                        return deleted
            if time.monotonic() >= until:
                return deleted
    return deleted


def _prune_conversations(until: float) -> int:
    deleted = 0
    for project, since in retention_cutoffs("conversations_days", until):
        # Those without a running or newer response.
        own = StoredResponse.objects.filter(conversation=OuterRef("pk"))
        later, running = own.filter(created_at__gte=since), own.exclude(status__in=ENDED)
        rows = Conversation.objects.filter(project=project, created_at__lt=since, deleted_at=None)
        rows = rows.exclude(Exists(later)).exclude(Exists(running)).order_by("pk")
        while found := list(rows[:_BATCH]):
            for conversation in found:
                with transaction.atomic():
                    _lock_conversation(conversation.pk)
                    # It may have been continued since it was found.
                    if rows.filter(pk=conversation.pk).exists():
                        delete_conversation(conversation)
                deleted += 1
                if time.monotonic() >= until:
                    return deleted
    return deleted


def _delete_old(found: Sequence[StoredResponse]) -> int:
    """Delete responses without a conversation in one transaction; return how many there were."""
    drop_documents([stored.public_id for stored in found])
    with transaction.atomic():
        rows = StoredResponse.objects.filter(pk__in=[stored.pk for stored in found])
        ids = dict(rows.select_for_update().order_by("-pk").values_list("pk", "public_id"))
        children = StoredResponse.objects.filter(previous__in=ids).exclude(pk__in=ids)
        used = Item.objects.filter(response__in=ids, conversation__isnull=False)
        hidden: set[int | None] = {*children.values_list("previous", flat=True)}
        hidden |= {*used.values_list("response", flat=True)}
        previous = dict(rows.values_list("pk", "previous"))
        for pk in ids:  # The last of a chain first.
            if pk in hidden and previous[pk] in ids:
                hidden.add(previous[pk])
        deleted = [pk for pk in ids if pk not in hidden]
        _hide(rows.exclude(pk__in=deleted))
        forget_answers(ids.values())
        with connection.cursor() as cursor:
            cursor.execute(_DELETE_ROWS, {"pks": deleted})
        before = {previous[pk] for pk in deleted} - ids.keys()
        for hidden_pk in sorted((pk for pk in before if pk), reverse=True):
            _sweep(hidden_pk)
    return len(ids)


def results_naming(end_user: str, project_id: int | None) -> Collection[str]:
    """Return ended ones with this ``user_id``; see ``inference_site.runs.kinds.Naming``."""
    rows = StoredResponse.objects.filter(status__in=ENDED, metadata__contains={"user_id": end_user})
    own = rows if project_id is None else rows.filter(project=project_id)
    return list(own.values_list("public_id", flat=True))


def forget(
    end_user: str, project_id: int | None, generation_ids: Sequence[str]
) -> Mapping[str, int]:
    """Delete the responses and conversations of an end user.

    A conversation is the user's if its metadata name the user, or all of its responses are the
    user's. Of a response that others build on, or in a conversation of others too, and of the
    user's conversation with responses of others, the content is removed and the hidden row stays.
    See ``inference_site.runs.kinds.Forgetting``.
    """
    named = Q(metadata__contains={"user_id": end_user})
    own = {} if project_id is None else {"project": project_id}
    ended = StoredResponse.objects.filter(status__in=ENDED, **own)
    rows = ended.filter(public_id__in=generation_ids)
    responses = list(rows.exclude(request={}).order_by("-pk"))
    others = StoredResponse.objects.filter(conversation=OuterRef("pk"), deleted_at=None)
    others = others.exclude(pk__in=[stored.pk for stored in responses])
    touched = Q(pk__in={stored.conversation_id for stored in responses})
    theirs = Conversation.objects.filter(named | (touched & ~Exists(others)), **own)
    conversations = list(theirs)
    # Messages outlive responses that clients have deleted: the generations have the same ids.
    forget_arguments(generation_ids)
    for stored in responses:
        delete(stored)
    for conversation in conversations:
        delete_conversation(conversation)
    pks = [stored.pk for stored in responses]
    conversation_pks = [conversation.pk for conversation in conversations]
    # Those that others build on were only hidden: their rows lose the content.
    added = Q(response=None, conversation__in=conversation_pks)
    with transaction.atomic():  # Rows are read in pieces only in a transaction.
        for item in Item.objects.filter(Q(response__in=pks) | added).iterator(_BATCH):
            # Its client may delete it now.
            Item.objects.filter(pk=item.pk).update(data=_without_content(item.data))
    kept = StoredResponse.objects.filter(pk__in=pks)
    kept.update(request={}, metadata={}, error=None, deltas=None)
    Conversation.objects.filter(pk__in=conversation_pks).update(metadata={})
    return {"responses": len(responses), "conversations": len(conversations)}


def _without_content(data: dict[str, Any]) -> dict[str, Any]:
    """Return an item of the same type and form whose texts, arguments and results are empty."""
    if data.get("type") == "reasoning":
        return {**data, "content": [], "summary": [], "encrypted_content": None}
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name in _KEPT_TEXTS or not isinstance(value, str | list | dict):
            kept[name] = value
        elif name == "arguments":
            kept[name] = "{}"
        elif name == "content":
            part: dict[str, Any] = {"type": "input_text", "text": _DELETED}
            if data.get("role") == "assistant":
                part |= {"type": "output_text", "annotations": [], "logprobs": []}
            kept[name] = [part]
        elif isinstance(value, str):
            kept[name] = ""
        else:
            kept[name] = type(value)()
    return kept
