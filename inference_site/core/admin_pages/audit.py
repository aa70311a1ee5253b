"""The audit log: its entries, and the texts that say which fields a form has changed."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from typing import Any

from django import forms
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model, QuerySet
from django.http import HttpRequest

_SECRET = re.compile(r"secret|password|token(?!s)|api_key$|headers", re.IGNORECASE)
_MAX_LENGTH = 200
"""Characters of a value."""


def log_action(request: HttpRequest, target: Model | str, message: str) -> None:
    """Write an entry by the user of a request; ``target`` may be the ID of a worker or model."""
    log_entry(int(request.user.pk or 0), target, message)


def log_entry(user_id: int, target: Model | str, message: str, flag: int = CHANGE) -> None:
    """Write an entry by a user; ``flag`` is the action, one of Django's or of the login log."""
    record = target if isinstance(target, Model) else None
    LogEntry.objects.create(
        user_id=user_id,
        content_type=None if record is None else ContentType.objects.get_for_model(record),
        object_id=None if record is None else str(record.pk),
        object_repr=str(target)[:200],
        action_flag=flag,
        change_message=message,
    )


def form_changes(form: Any) -> list[str]:
    """Return ``label: old → new`` for each changed field of a valid form; of a secret its label."""
    changes = []
    for name in form.changed_data:
        field = form.fields.get(name)
        label = name if field is None or not field.label else str(field.label)
        if field is None or _is_secret(name, field):
            changes.append(f"{label} changed")
            continue
        values = form.get_initial_for_field(field, name), form.cleaned_data.get(name)
        texts = [_value_text(value, field) for value in values]
        old, new = (t if len(t) <= _MAX_LENGTH else f"{t[:_MAX_LENGTH]}…" for t in texts)
        changes.append(f"{label}: {old} → {new}")
    return changes


def formset_changes(formset: Any) -> Iterator[str]:
    """Yield a text for each inline object that was added, changed or deleted."""
    for form in formset.forms:
        what = f"{form.instance._meta.verbose_name} “{form.instance}”"
        if form in formset.deleted_forms:
            yield f"deleted {what}"
        elif form.has_changed():
            is_new = form.instance in formset.new_objects
            yield f"added {what}" if is_new else f"{what}: {'; '.join(form_changes(form))}"


def _is_secret(name: str, field: forms.Field) -> bool:
    # A field that refers to an API key holds no secret, whatever its name.
    is_reference = isinstance(field, forms.ModelChoiceField)
    is_password = isinstance(field.widget, forms.PasswordInput)
    return is_password or (not is_reference and bool(_SECRET.search(name)))


def _value_text(value: Any, field: forms.Field) -> str:
    match value:
        case None | "" | [] | ():
            return "empty"
        case bool():
            return "yes" if value else "no"
        case dt.datetime():
            return f"{value:%Y-%m-%d %H:%M:%S}"
        case list() | tuple() | set() | QuerySet():
            return ", ".join(sorted(_value_text(one, field) for one in value)) or "empty"
        case Model():
            return str(value)
    if isinstance(field, forms.ModelChoiceField) and field.queryset is not None:
        found = field.queryset.model._default_manager.filter(pk=value).first()
        return str(value if found is None else found)
    for choice, label in getattr(field, "choices", None) or ():
        # The label of a group of choices is the list of these.
        if isinstance(label, str) and choice and choice == value:
            return label
    return str(value)
