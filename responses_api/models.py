"""Responses, their items and conversations, as PostgreSQL keeps them.

An item is stored once, with the response or the conversation it came with. What a response builds
on is found by following ``previous``; nothing is copied.
"""

from __future__ import annotations

from django.contrib.postgres.indexes import GinIndex
from django.db import models
from django.utils import timezone

from inference_site.storage.fields import ContentField
from responses_api.search import is_mentioned, item_words


class ResponseStatus(models.TextChoices):
    """A response moves forward only. While it is queued, its generation says if it runs."""

    QUEUED = "queued"  # In the background, waiting for a worker.
    IN_PROGRESS = "in_progress"  # In the foreground, waiting or running.
    COMPLETED = "completed"  # The model reached its end.
    INCOMPLETE = "incomplete"  # The token limit cut it.
    FAILED = "failed"  # An error ended it; what it had said until then is kept.
    CANCELLED = "cancelled"  # The client or an operator stopped it; likewise.


ENDED = frozenset(
    {
        ResponseStatus.COMPLETED,
        ResponseStatus.INCOMPLETE,
        ResponseStatus.FAILED,
        ResponseStatus.CANCELLED,
    }
)


class Conversation(models.Model):
    """Items in order, to which responses add theirs.

    ``locked_by`` is the response that runs on it, which counts for as long as its generation does.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, db_index=False)
    metadata = ContentField(default=dict)
    next_position = models.PositiveIntegerField(default=0)
    locked_by = models.CharField(max_length=64, blank=True, default="")
    created_at = models.DateTimeField(default=timezone.now)
    # A deleted conversation stays, hidden: responses build on its items.
    deleted_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["project", "id"], name="conversation_list"),
            models.Index(
                fields=["id"], name="conversation_locked", condition=~models.Q(locked_by="")
            ),
        ]

    def __str__(self) -> str:
        return self.public_id


class StoredResponseQuerySet(models.QuerySet["StoredResponse"]):
    """The way to look for responses."""

    def mentioning(self, text: str, project_id: int | None = None) -> StoredResponseQuerySet:
        """Return those of which an item has these words (see ``search.is_mentioned``).

        The project is that of all of them, if they are of one. To be called and evaluated within
        ``search.search_time``.
        """
        return self.filter(is_mentioned(text, project_id))


class StoredResponse(models.Model):
    """One response; its input and output are items.

    ``request`` holds the fields of the request but for its input and metadata: enough to show them
    again, and to run a response in the background once more. ``error`` is what a client is told,
    with its type and parameter. ``deltas`` is how the output was sent, so that its stream can be
    made again when its log has gone: ``end`` is the number of the last event, ``items`` has the
    fields of ``sent_output.Cut`` for each item. It is null if nothing was sent.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, db_index=False)
    model = models.CharField(max_length=200)
    status = models.CharField(max_length=16, choices=ResponseStatus.choices)
    background = models.BooleanField(default=False)
    previous = models.ForeignKey(
        "self", on_delete=models.PROTECT, null=True, blank=True, related_name="children"
    )
    conversation = models.ForeignKey(
        Conversation, on_delete=models.PROTECT, null=True, blank=True, related_name="responses"
    )
    # Its items below this position are the context.
    conversation_position = models.PositiveIntegerField(null=True, blank=True)
    metadata = ContentField(default=dict)
    request = ContentField(default=dict)
    usage = ContentField(null=True, blank=True)
    deltas = ContentField(null=True, blank=True)
    error = ContentField(null=True, blank=True)
    incomplete_reason = models.CharField(max_length=32, blank=True, default="")
    created_at = models.DateTimeField(default=timezone.now)
    completed_at = models.DateTimeField(null=True, blank=True)
    # A deleted response stays, hidden, while others build on it.
    deleted_at = models.DateTimeField(null=True, blank=True)

    objects = StoredResponseQuerySet.as_manager()

    class Meta:
        verbose_name = "response"
        permissions = [("view_content", "Can see prompts and answers")]
        indexes = [
            models.Index(fields=["project", "created_at", "id"], name="response_in_time"),
            models.Index(fields=["project", "model", "created_at", "id"], name="response_of_model"),
            models.Index(
                fields=["project", "status", "created_at", "id"], name="response_in_status"
            ),
            models.Index(
                fields=["id"],
                name="response_open",
                condition=models.Q(status__in=["queued", "in_progress"]),
            ),
            GinIndex(fields=["metadata"], name="response_metadata", opclasses=["jsonb_path_ops"]),
        ]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(previous__isnull=True) | models.Q(conversation__isnull=True),
                name="response_has_one_context",
            ),
            models.CheckConstraint(
                condition=models.Q(completed_at__isnull=True) | models.Q(status="completed"),
                name="response_completed_at",
            ),
        ]

    def __str__(self) -> str:
        return self.public_id


class Item(models.Model):
    """One item. ``data`` is it as the API shows it, but for its id.

    The input of a response comes before its output, in the order of ``position``. An item of a
    conversation also has its place there.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, db_index=False)
    response = models.ForeignKey(
        StoredResponse,
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="items",
        db_index=False,
    )
    position = models.PositiveIntegerField(default=0)
    is_output = models.BooleanField(default=False)
    conversation = models.ForeignKey(
        Conversation,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="items",
        db_index=False,
    )
    conversation_position = models.PositiveIntegerField(null=True, blank=True)
    data = ContentField()

    class Meta:
        indexes = [
            GinIndex(item_words(), name="item_words", fastupdate=True, gin_pending_list_limit=512)
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["response", "position"],
                name="item_place_in_response",
                condition=models.Q(response__isnull=False),
            ),
            models.UniqueConstraint(
                fields=["conversation", "conversation_position"],
                name="item_place_in_conversation",
                condition=models.Q(conversation__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return self.public_id
