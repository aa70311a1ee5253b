"""Stored responses, items, conversations and prompt templates.

An item is stored once, with the response or the conversation that it was added by. The history of a
response is found by following ``previous``; nothing is copied.
"""

from __future__ import annotations

import secrets

from django.conf import settings
from django.contrib.postgres.indexes import GinIndex
from django.db import models
from django.utils import timezone

from inference_site.core.storage.fields import ContentField
from inference_site.gateway.feedback import Rated
from responses_api.search import contains_words, item_words


class ResponseStatus(models.TextChoices):
    """Status of a response. The row is not updated when the response starts to run."""

    QUEUED = "queued"  # In the background, waiting for a worker.
    IN_PROGRESS = "in_progress"  # In the foreground, waiting or running.
    COMPLETED = "completed"  # The model reached its end.
    INCOMPLETE = "incomplete"  # The token limit or a content filter ended it.
    FAILED = "failed"  # An error ended it; its output so far is stored.
    CANCELLED = "cancelled"  # The client or an operator stopped it; its output so far is stored.


ENDED = frozenset(
    {
        ResponseStatus.COMPLETED,
        ResponseStatus.INCOMPLETE,
        ResponseStatus.FAILED,
        ResponseStatus.CANCELLED,
    }
)


class Conversation(models.Model):
    """An ordered list of items, to which responses add theirs.

    ``locked_by`` is the id of the response that runs on it. The lock holds as long as the
    generation of that response has not ended.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, db_index=False)
    metadata = ContentField(default=dict)
    next_position = models.PositiveIntegerField(default=0)
    locked_by = models.CharField(max_length=64, blank=True, default="")
    created_at = models.DateTimeField(default=timezone.now)
    # A deleted conversation stays, hidden, while responses use its items.
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
    """Queries for responses."""

    def find(self, public_id: str) -> StoredResponse | None:
        """Return the response with this id, with its previous response and conversation."""
        rows = self.select_related("previous", "conversation")
        return rows.filter(public_id=public_id).first()

    def mentioning(self, text: str, project_id: int | None = None) -> StoredResponseQuerySet:
        """Return the responses with an item that contains these words (see ``search``).

        ``project_id`` is set if the search is for one project. Call it, and evaluate the result,
        within ``search.search_timeout``.
        """
        return self.filter(contains_words(text, project_id))


class StoredResponse(Rated):
    """One response; its input and output are items.

    ``request`` holds the fields of the request without its input and metadata. The response object
    is built from it, and the request document when that was lost. ``error`` is the error that the
    client gets, with type and parameter. ``deltas`` says how the output was divided into events, so
    that the stream can be rebuilt after its event log has expired: ``end`` is the number of the
    last event, ``items`` has an ``output.SentDeltas`` for each item. It is null if no event was
    sent.
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
    # The response was given the items of the conversation below this position.
    conversation_position = models.PositiveIntegerField(null=True, blank=True)
    metadata = ContentField(default=dict)
    request = ContentField(default=dict)
    usage = ContentField(null=True, blank=True)
    deltas = ContentField(null=True, blank=True)
    error = ContentField(null=True, blank=True)
    # The moderation model's results for the input and the output, if the request asks for them.
    moderation = ContentField(null=True, blank=True)
    incomplete_reason = models.CharField(max_length=32, blank=True, default="")
    created_at = models.DateTimeField(default=timezone.now)
    completed_at = models.DateTimeField(null=True, blank=True)
    # A deleted response stays, hidden, while other responses build on it.
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
            models.Index(
                fields=["project", "rating", "id"],
                name="response_rated",
                condition=~models.Q(rating=""),
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
    """One item. ``data`` is the item as the API shows it, without its id.

    ``position`` orders the items of a response, input before output; ``conversation_position``
    orders those of a conversation.
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


class McpApproval(models.Model):
    """The request to approve a call of an MCP tool, and its answer.

    ``item`` is the output item that asks; ``arguments_sha256`` is the hash of its arguments, as hex
    digits. ``approve`` is null until it is answered, by the response ``answered_by``.
    """

    item = models.OneToOneField(
        Item, on_delete=models.CASCADE, primary_key=True, related_name="approval"
    )
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, db_index=False)
    server_label = models.CharField(max_length=64)
    name = models.CharField(max_length=128)
    arguments_sha256 = models.CharField(max_length=64)
    asked_at = models.DateTimeField(default=timezone.now)
    approve = models.BooleanField(null=True)
    answered_by = models.CharField(max_length=64, blank=True, default="")
    answered_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name = "approval"
        default_permissions = ("view",)
        indexes = [
            models.Index(
                fields=["item"],
                name="approval_waiting",
                condition=models.Q(answered_at__isnull=True),
            )
        ]

    def __str__(self) -> str:
        return f"{self.server_label}.{self.name}"


LONGEST_PROMPT = 50_000
"""Characters of one message of a prompt template."""


def new_prompt_id() -> str:
    """Return the id of a new prompt template."""
    return f"pmpt_{secrets.token_hex(24)}"


class PromptTemplate(models.Model):
    """A prompt that requests of its project use by its id (see ``prompt_templates``)."""

    public_id = models.CharField(
        "ID", max_length=64, unique=True, default=new_prompt_id, editable=False
    )
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT)
    name = models.CharField(max_length=100)
    default_version = models.PositiveIntegerField(
        null=True,
        blank=True,
        help_text="The version for requests that name none. Leave empty for the newest.",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["name", "id"]
        constraints = [
            models.UniqueConstraint(fields=["project", "name"], name="prompt_name_once"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def newest(self) -> PromptVersion | None:
        """The version that was saved last."""
        return self.versions.order_by("-number").first()


class PromptVersion(models.Model):
    """One version of a prompt template. It is never changed: requests name it by its number."""

    template = models.ForeignKey(PromptTemplate, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    developer_message = models.TextField(max_length=LONGEST_PROMPT, blank=True)
    user_message = models.TextField(max_length=LONGEST_PROMPT, blank=True)
    # For requests that name no model.
    model = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
    )

    class Meta:
        ordering = ["-number"]
        constraints = [
            models.UniqueConstraint(fields=["template", "number"], name="prompt_version_once"),
        ]

    def __str__(self) -> str:
        return f"version {self.number}"
