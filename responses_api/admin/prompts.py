"""Admin of prompt templates: saving other messages makes a new version, which can be tried."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import path, reverse
from django.views.decorators.http import require_POST
from unfold.admin import TabularInline
from unfold.widgets import UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from inference_site.core.admin_pages.base_admin import (
    RelatedFilter,
    SiteAdmin,
    TextField,
    id_of,
    name_without_link,
    require_free_name,
)
from inference_site.core.admin_pages.labels import preview, time_label
from inference_site.core.errors.api_errors import InvalidRequestError
from responses_api.models import LONGEST_PROMPT, PromptTemplate, PromptVersion
from responses_api.prompt_templates import tried_id, variables_of

_OF_VERSION = ("developer_message", "user_message", "model")
_VARIABLE = "variable."
"""The beginning of the names of the inputs with which a prompt is tried."""
_LONGEST_OPENED = 6_000
"""Characters of an id with values. The page requests it with its own address, which has it too, as
``Referer``, and the head of a request may have 16 KiB."""


class _MessageArea(UnfoldAdminTextareaWidget):
    """An area that keeps a line break at the beginning: Unfold's template loses it to browsers."""

    template_name = "django/forms/widgets/textarea.html"


def _message(label: str, rows: int) -> forms.CharField:
    area = _MessageArea(attrs={"rows": rows})
    # Not stripped: white space around a message is a part of the prompt.
    return TextField(
        label=label, required=False, max_length=LONGEST_PROMPT, widget=area, strip=False
    )


class PromptForm(forms.ModelForm[PromptTemplate]):
    """The form of a prompt, with the messages of its newest version."""

    developer_message = _message("Developer message", 10)
    user_message = _message("User message", 5)
    model = forms.CharField(
        required=False,
        max_length=200,
        widget=UnfoldAdminTextInputWidget,
        help_text="For requests that name no model.",
    )

    class Meta:
        model = PromptTemplate
        fields = ("project", "name", "default_version")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.newest = self.instance.newest if self.instance.pk else None
        for name in _OF_VERSION:
            if name in self.fields and self.newest is not None:
                self.initial[name] = getattr(self.newest, name)

    def clean(self) -> dict[str, Any]:
        """Demand a message, and a default version that there is."""
        given: dict[str, Any] = super().clean() or {}
        require_free_name(self, "prompt")
        texts = (given.get("developer_message") or "", given.get("user_message") or "")
        if not any(text.strip() for text in texts):
            raise forms.ValidationError("Write a developer message or a user message.")
        number = given.get("default_version")
        known = self.instance.versions.values_list("number", flat=True) if self.instance.pk else ()
        if number is not None and number not in known:
            self.add_error("default_version", f"There is no version {number}.")
        return given


class VersionInline(TabularInline):
    """The versions of a prompt, the newest first."""

    model = PromptVersion
    extra = 0
    fields = readonly_fields = ("number", "shown_time", "shown_author", "model", "shown_messages")
    verbose_name_plural = "versions"
    shown_author = name_without_link("created_by")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("created_by")

    @admin.display(description="time")
    def shown_time(self, version: PromptVersion) -> str:
        return time_label(version.created_at)

    @admin.display(description="messages")
    def shown_messages(self, version: PromptVersion) -> str:
        return preview(f"{version.developer_message} {version.user_message}".strip())


@admin.register(PromptTemplate)
class PromptTemplateAdmin(SiteAdmin):
    """Admin of prompts. Deleting one makes requests with its id fail."""

    form = PromptForm
    inlines = (VersionInline,)
    change_form_template = "responses_api/admin/prompt.html"
    list_display = ("name", "public_id", "project", "default_version", "created_at")
    list_filter = (("project", RelatedFilter),)
    list_select_related = ("project",)
    search_fields = ("name", "public_id")
    autocomplete_fields = ("project",)
    readonly_fields = ("public_id", "created_at")
    fieldsets = (
        (None, {"fields": ("public_id", "project", "name", "default_version")}),
        (
            "Messages",
            {
                "fields": _OF_VERSION,
                "description": (
                    "{{name}} is a variable, whose value requests give. Other messages or another "
                    "model make a new version; earlier ones stay as they are."
                ),
            },
        ),
    )
    how_to_add = "Requests use a prompt by its ID, in the field prompt of POST /v1/responses."

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Hide the ID of a prompt that is not saved: it gets another one."""
        if obj is not None:
            return self.fieldsets
        return ((None, {"fields": ("project", "name", "default_version")}), *self.fieldsets[1:])

    def get_readonly_fields(self, request: HttpRequest, obj: PromptTemplate | None = None) -> Any:
        """Make the project read-only after creation: only its requests know the id."""
        return (*self.readonly_fields, "project") if obj else self.readonly_fields

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save the prompt, and a new version if its messages or its model have changed."""
        super().save_model(request, obj, form, change)
        if not change or set(_OF_VERSION) & set(form.changed_data):
            # Of two at the same moment one fails, and its form says that the other was saved.
            obj.versions.create(
                number=1 if form.newest is None else form.newest.number + 1,
                created_by_id=request.user.pk,
                **{name: form.cleaned_data[name] for name in _OF_VERSION},
            )

    def get_urls(self) -> list[Any]:
        """Add the address that opens a prompt in the playground."""
        try_it = self.admin_site.admin_view(require_POST(self.try_view))
        own = path("<path:object_id>/try/", try_it, name="responses_api_prompttemplate_try")
        return [own, *super().get_urls()]

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Add the variables of the newest version, with which it can be tried."""
        shown: PromptTemplate | None = kwargs.get("obj")
        newest = None if shown is None else shown.newest
        if newest is not None:
            names = variables_of(newest)
            context["tried"] = [(name, f"{_VARIABLE}{name}") for name in names]
            context["newest"] = newest
        return super().render_change_form(request, context, *args, **kwargs)

    def try_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Open the newest version in the playground, with the values that the form has."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        pk = id_of(object_id)
        prompt = get_object_or_404(PromptTemplate, pk=pk)
        newest = prompt.newest
        if newest is None:
            return redirect("admin:responses_api_prompttemplate_change", pk)
        names = [name for name in request.POST if name.startswith(_VARIABLE)]
        values = {name.removeprefix(_VARIABLE): request.POST[name] for name in names}
        try:
            opened = tried_id(newest, values)
        except InvalidRequestError as exc:
            messages.error(request, exc.message)
            return redirect("admin:responses_api_prompttemplate_change", pk)
        if len(opened) > _LONGEST_OPENED:
            messages.error(request, "The values are too long to be tried here.")
            return redirect("admin:responses_api_prompttemplate_change", pk)
        return redirect(f"{reverse('admin:playground')}?{urlencode({'open': opened})}")
