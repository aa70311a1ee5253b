"""Noting in the audit log what the admin's own forms do not."""

from __future__ import annotations

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model
from django.http import HttpRequest


def note(request: HttpRequest, what: Model | str, done: str) -> None:
    """Note that this user has done something to an object, or to a worker or model by its id."""
    target = what if isinstance(what, Model) else None
    LogEntry.objects.create(
        user_id=int(request.user.pk or 0),
        content_type=None if target is None else ContentType.objects.get_for_model(target),
        object_id=None if target is None else str(target.pk),
        object_repr=str(what)[:200],
        action_flag=CHANGE,
        change_message=done,
    )
