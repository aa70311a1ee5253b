"""Noting in the audit log what the admin's own forms do not."""

from __future__ import annotations

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model
from django.http import HttpRequest


def note(request: HttpRequest, what: Model | str, done: str) -> None:
    """Note that this user has done something to an object, or to a worker or model by its id."""
    is_object = isinstance(what, Model)
    LogEntry.objects.create(
        user_id=int(request.user.pk or 0),
        content_type=ContentType.objects.get_for_model(what) if is_object else None,
        object_id=str(what.pk) if is_object else None,
        object_repr=str(what)[:200],
        action_flag=CHANGE,
        change_message=done,
    )
