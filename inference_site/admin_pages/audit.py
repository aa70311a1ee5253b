"""Audit log entries for actions that are no form of Django's admin."""

from __future__ import annotations

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model
from django.http import HttpRequest


def log_action(request: HttpRequest, target: Model | str, message: str) -> None:
    """Write an audit log entry; ``target`` is an object, or the id of a worker or served model."""
    log_entry(int(request.user.pk or 0), target, message)


def log_entry(user_id: int, target: Model | str, message: str, flag: int = CHANGE) -> None:
    """Write an audit log entry by a user; ``flag`` says what was done."""
    record = target if isinstance(target, Model) else None
    LogEntry.objects.create(
        user_id=user_id,
        content_type=None if record is None else ContentType.objects.get_for_model(record),
        object_id=None if record is None else str(record.pk),
        object_repr=str(target)[:200],
        action_flag=flag,
        change_message=message,
    )
