"""Audit log entries for actions that are no form of Django's admin."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from typing import Any

from django import forms
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model, QuerySet
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


_SECRET = re.compile(r"secret|password|token(?!s)|api_key$|headers", re.IGNORECASE)
_LONGEST = 200
"""Characters of a value."""


def form_changes(form: Any) -> list[str]:
    """Return a text for each field that a valid form has changed."""
    return [_told(form, name) for name in form.changed_data]


def formset_changes(formset: Any) -> Iterator[str]:
    """Yield a text for each object that was added, changed or deleted with its parent."""
    for form in formset.forms:
        what = f"{form.instance._meta.verbose_name} “{form.instance}”"
        if form in formset.deleted_forms:
            yield f"deleted {what}"
        elif form.has_changed():
            is_new = form.instance in formset.new_objects
            told = "; ".join(form_changes(form))
            yield f"added {what}" if is_new else f"{what}: {told}"


def _told(form: Any, name: str) -> str:
    field = form.fields.get(name)
    label = name if field is None or not field.label else str(field.label)
    if field is None or _is_secret(name, field):
        return f"{label} changed"
    old = _shown(form.get_initial_for_field(field, name), field)
    return f"{label}: {old} → {_shown(form.cleaned_data.get(name), field)}"


def _is_secret(name: str, field: forms.Field) -> bool:
    # A key is a model too: a field that refers to one shows its name.
    is_reference = isinstance(field, forms.ModelChoiceField)
    is_hidden = isinstance(field.widget, forms.PasswordInput)
    return is_hidden or (not is_reference and bool(_SECRET.search(name)))


def _shown(value: Any, field: forms.Field) -> str:
    text = _text(value, field)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _text(value: Any, field: forms.Field) -> str:
    match value:
        case None | "" | [] | ():
            return "empty"
        case bool():
            return "yes" if value else "no"
        case dt.datetime():
            return f"{value:%Y-%m-%d %H:%M:%S}"
        case list() | tuple() | set() | QuerySet():
            return ", ".join(sorted(_text(one, field) for one in value)) or "empty"
        case Model():
            return str(value)
    if isinstance(field, forms.ModelChoiceField) and field.queryset is not None:
        found = field.queryset.model._default_manager.filter(pk=value).first()
        return str(value if found is None else found)
    return str(_labels(field).get(value, value))


def _labels(field: forms.Field) -> Mapping[Any, Any]:
    """Return the labels of the values that a field offers; none if it offers groups of them."""
    choices = getattr(field, "choices", None) or ()
    try:
        return {value: label for value, label in choices if isinstance(label, str) and value}
    except (TypeError, ValueError):
        return {}
