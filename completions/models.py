"""Stored chat completions: what ``store: true`` keeps."""

from __future__ import annotations

from django.contrib.postgres.indexes import GinIndex
from django.db import models
from django.utils import timezone

from inference_site.core.storage.fields import ContentField
from inference_site.gateway.feedback import Rated


class StoredCompletion(Rated):
    """A finished chat completion and the messages it answered, as they were sent.

    ``completion`` is the object that the client got, without its metadata, which may change.
    ``streamed`` is how it was streamed (see ``replay``); null if it was not, or if that is unknown.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, db_index=False)
    model = models.CharField(max_length=200)
    metadata = ContentField(default=dict)
    messages = ContentField()
    completion = ContentField()
    streamed = models.JSONField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        verbose_name = "chat completion"
        indexes = [
            models.Index(fields=["project", "id"], name="stored_completion_list"),
            models.Index(fields=["project", "model", "id"], name="stored_completion_by_model"),
            models.Index(
                fields=["project", "rating", "id"],
                name="stored_completion_rated",
                condition=~models.Q(rating=""),
            ),
            GinIndex(fields=["metadata"], name="stored_completion_metadata"),
        ]

    def __str__(self) -> str:
        return self.public_id
