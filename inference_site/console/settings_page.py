"""The settings page: settings that operators change here, and the variables of the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.auth.decorators import permission_required
from django.core.exceptions import PermissionDenied
from django.forms import BoundField
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from unfold.widgets import (
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from inference_site.core import environment
from inference_site.core.admin_pages.base_admin import (
    SHOWN,
    log_action,
    require_as_shown,
    shown_state,
)
from inference_site.core.site_settings.models import SiteSettings, forget

VIEW, CHANGE = "site_settings.view_sitesettings", "site_settings.change_sitesettings"
_SECRET = re.compile(r"SECRET|TOKEN(?!S)|PASSWORD|KEY(?!S)|_URLS?$")
_ROW = re.compile(
    r"\| `(?P<name>[A-Z_]+)`[^|]*\| (?P<default>[^|]*) \|(?:[^|]*\|)*? (?P<meaning>[^|]+) \|$"
)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_GROUPS = {
    "Clients": ("disconnect_grace_s",),
    "Retention": (
        *("responses_days", "conversations_days", "completions_days", "files_days"),
        *("batches_days", "usage_log_days", "refusals_days"),
    ),
    "Usage": ("usage_tags",),
    "Content": ("show_content", "debug_content_hours"),
}
_FIELDS = tuple(chain.from_iterable(_GROUPS.values()))


class SettingsForm(forms.ModelForm[SiteSettings]):
    """The settings that can be changed on the page."""

    class Meta:
        model = SiteSettings
        fields = _FIELDS
        widgets = {
            **dict.fromkeys(_FIELDS, UnfoldAdminIntegerFieldWidget),
            "usage_tags": UnfoldAdminTextInputWidget,
            "show_content": UnfoldBooleanSwitchWidget,
        }

    def clean(self) -> dict[str, Any] | None:
        """Raise ValidationError if the settings were changed since the page has shown them."""
        require_as_shown(self.data, SHOWN, [self], self.instance)
        return super().clean()

    def groups(self) -> Iterator[tuple[str, list[tuple[BoundField, bool]]]]:
        """Yield each group with its fields, and whether what is stored for one is no default."""
        default = SiteSettings()
        for title, names in _GROUPS.items():
            yield (
                title,
                [(self[name], self.initial[name] != getattr(default, name)) for name in names],
            )


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable; ``source`` says where its value comes from, or "default".

    The value of a secret or an address is only whether it is set.
    """

    name: str
    value: str
    source: str
    default: str
    meaning: str


@cache
def documented() -> dict[str, dict[str, tuple[str, str]]]:
    """Return default and meaning of each variable of docs/settings.md, by its sections' headings.

    There are none where the document is not installed beside the packages.
    """
    document = settings.BASE_DIR / "docs" / "settings.md"
    sections: dict[str, dict[str, tuple[str, str]]] = {}
    title = ""
    for line in document.read_text().splitlines() if document.exists() else ():
        if line.startswith("## "):
            title = line[3:]
        elif row := _ROW.match(line):
            default, meaning = (
                _LINK.sub(r"\1", row[cell]).replace("`", "") for cell in ("default", "meaning")
            )
            meanings = sections.setdefault(title, {})
            meanings[row["name"]] = (default, meaning[:1].upper() + meaning[1:])
    return sections


def variables_by_section() -> list[tuple[str, list[Variable]]]:
    """Return what this process has read from the environment, as docs/settings.md groups it."""
    asked, sections = environment.asked(), documented()
    others = asked.keys() - set().union(*sections.values())
    sections = {**sections, "Others": dict.fromkeys(sorted(others), ("", ""))}
    found = []
    for title, meanings in sections.items():
        rows = []
        for name, (default, meaning) in meanings.items():
            value, source = asked.get(name, ("", ""))
            if source:
                shown = ("set" if value else "not set") if _SECRET.search(name) else value
                rows.append(Variable(name, shown, source, default, meaning))
        if rows:
            found.append((title, rows))
    return found


@permission_required(VIEW, raise_exception=True)
def settings_page(request: HttpRequest) -> HttpResponse:
    """Show the settings, or save them and log the changes."""
    may_change = request.user.has_perm(CHANGE)
    stored = SiteSettings.objects.first() or SiteSettings(pk=1)
    before = {name: getattr(stored, name) for name in _FIELDS}
    form = SettingsForm(request.POST or None, instance=stored)
    if request.method == "POST":
        if not may_change:
            raise PermissionDenied
        if form.is_valid():
            saved = form.save()
            forget()
            after = {name: getattr(saved, name) for name in _FIELDS}
            changes = [
                f"{name}: {_text(before[name])} → {_text(after[name])}"
                for name in _FIELDS
                if before[name] != after[name]
            ]
            if changes:
                log_action(request, saved, "; ".join(changes))
            messages.success(request, "Saved. All processes use it within seconds.")
            return HttpResponseRedirect(reverse("admin:settings"))
    for field in form.fields.values():
        field.disabled = not may_change
    context = {
        **admin.site.each_context(request),
        "title": "Settings",
        "form": form,
        "shown_states": {SHOWN: request.POST.get(SHOWN) or shown_state([form])},
        "may_change": may_change,
        "sections": variables_by_section(),
    }
    return TemplateResponse(request, "console/settings.html", context)


def _text(value: Any) -> Any:
    """Return the value of a setting as the audit log has it."""
    if value is None or value == []:
        return "empty"
    return ", ".join(value) if isinstance(value, list) else value
