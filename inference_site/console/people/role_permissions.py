"""Permissions as the pages of users and roles show them: in words, a row for each record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.auth.models import Permission
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget

ACTIONS = {"view": "See", "add": "Add", "change": "Change", "delete": "Delete"}
WITHOUT_PAGE = "Tables without a page of their own"
_OTHER_PAGES = ("site_settings.sitesettings", "usage.usagerollup")
"""Records with a page that is none of Django's admin."""


def action_of(permission: Permission) -> str:
    """Return what a permission lets a user do: ``See``, or the words of its name."""
    action = permission.codename.removesuffix(f"_{permission.content_type.model}")
    words = permission.name.removeprefix("Can ")
    return ACTIONS.get(action) or words[:1].upper() + words[1:]


def record_of(permission: Permission) -> str:
    """Return what a permission is about, in the words of the menu."""
    model = permission.content_type.model_class()
    name = permission.content_type.name if model is None else str(model._meta.verbose_name_plural)
    return name[:1].upper() + name[1:]


def has_page(permission: Permission) -> bool:
    """Return whether some page asks for a permission; most tables of Django itself have none."""
    model = permission.content_type.model_class()
    if model is None:
        return False
    return admin.site.is_registered(model) or model._meta.label_lower in _OTHER_PAGES


def in_words(permissions: Iterable[Permission]) -> list[tuple[str, str]]:
    """Return each action that these permissions allow, with the records that it is allowed on."""
    allowed: dict[str, list[str]] = {action: [] for action in ACTIONS.values()}
    for permission in filter(has_page, permissions):
        allowed.setdefault(action_of(permission), []).append(record_of(permission))
    return [(action, ", ".join(sorted(of))) for action, of in allowed.items() if of]


class _ByRecord(forms.models.ModelChoiceIterator[Permission]):
    """The choices of a field of permissions, in a group for each record; the last has the rest."""

    def __iter__(self) -> Iterator[Any]:
        def place_of(row: Permission) -> tuple[str, int, int]:
            action = action_of(row)
            return record_of(row), first.index(action) if action in first else len(first), row.pk

        first = list(ACTIONS.values())
        rows = sorted(self.queryset.select_related("content_type"), key=place_of)
        for record, permissions in groupby(filter(has_page, rows), record_of):
            yield record, [self.choice(permission) for permission in permissions]
        if rest := [self.choice(row) for row in rows if not has_page(row)]:
            yield WITHOUT_PAGE, rest


class PermissionsWidget(UnfoldAdminCheckboxSelectMultipleWidget):
    """Checkboxes, in a row for each record."""

    template_name = "people/permissions.html"

    def get_context(self, *args: Any) -> dict[str, Any]:
        return {**super().get_context(*args), "without_page": WITHOUT_PAGE}


class PermissionsField(forms.ModelMultipleChoiceField[Permission]):
    """Permissions of a role or a user."""

    iterator = _ByRecord
    widget = PermissionsWidget

    def label_from_instance(self, obj: Any) -> str:
        return action_of(obj) if has_page(obj) else f"{action_of(obj)} {record_of(obj).lower()}"
