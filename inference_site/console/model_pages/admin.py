"""Admin of the models in the database, and of pulls from the hub."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse

from inference_site.admin_pages.labels import status_label, time_label
from inference_site.admin_pages.site_admin import SiteAdmin
from inference_site.console.model_pages.entry_fields import changes
from inference_site.console.model_pages.forms import PullForm, StoredModelForm
from inference_site.model_store.entries import entry_error
from inference_site.model_store.models import Pull, StoredModel

_SOON = "Workers and the API take it up within seconds."


@admin.register(StoredModel)
class StoredModelAdmin(SiteAdmin):
    """Models that operators keep in the database, beside those of the models file."""

    form = StoredModelForm
    list_display = ("model_id", "engine", "fault", "updated")
    search_fields = ("model_id",)
    fieldsets = (
        (None, {"fields": ("model_id", "engine", "file")}),
        ("Size", {"fields": ("slots", "context_length", "gpu_layers", "keep_alive")}),
        ("Access", {"fields": ("aliases", "projects", "is_listed")}),
        ("Price", {"fields": ("price_input", "price_cached", "price_output")}),
        ("More", {"fields": ("more",)}),
    )

    @admin.display(description="engine")
    def engine(self, stored: StoredModel) -> str:
        return str(stored.entry.get("engine", "llama_cpp"))

    @admin.display(description="fault")
    def fault(self, stored: StoredModel) -> str:
        return entry_error(stored) or "—"

    @admin.display(description="changed (UTC)", ordering="updated_at")
    def updated(self, stored: StoredModel) -> Any:
        return time_label(stored.updated_at)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Keep the ID: requests and usage refer to it."""
        return ("model_id",) if obj else ()

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # Without the form there is nothing to show: its fields are no columns.
        return self.has_change_permission(request, obj)

    def render_change_form(
        self,
        request: HttpRequest,
        context: Any,
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        """Say of an entry that is not served why that is so."""
        if request.method == "GET" and obj is not None and (fault := entry_error(obj)):
            messages.warning(request, f"This model is not served: {fault}.")
        return super().render_change_form(request, context, add, change, form_url, obj)

    def construct_change_message(
        self, request: HttpRequest, form: Any, formsets: Any, add: bool = False
    ) -> Any:
        """Return what the audit log says: old and new values, without secrets."""
        return changes({} if add else form._before, form.instance.entry)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save it, and say when that is heeded."""
        super().save_model(request, obj, form, change)
        messages.info(request, _SOON)

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> Any:
        """Show the models and workers, where it appears."""
        messages.success(request, f"Added the model {obj.model_id}.")
        return _to_fleet()

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Delete the entry; say that the file stays."""
        super().delete_model(request, obj)
        if obj.entry.get("file"):
            messages.info(request, f"The file of {obj.model_id} stays where it is.")


@admin.register(Pull)
class PullAdmin(SiteAdmin):
    """Pulls of models from the hub: what was asked for, how far it is, and what became of it."""

    form = PullForm
    list_display = ("reference", "status", "progress", "error", "requested_by", "created")
    list_filter = ("state",)
    list_select_related = ("requested_by",)
    fields = ("reference", "revision", "model_id", "host")

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Show also what became of it, once it was asked for."""
        told = ("state", "error", "worker", "progress", "requested_by")
        return (*self.fields, *told) if obj else self.fields

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Note who asks for it."""
        obj.requested_by = request.user
        super().save_model(request, obj, form, change)

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> Any:
        """Show the models and workers, where its progress is."""
        messages.success(request, f"Pulling {obj.reference}…")
        return _to_fleet()

    @admin.display(description="state", ordering="state")
    def status(self, pull: Pull) -> Any:
        return status_label(pull.state)

    @admin.display(description="fetched")
    def progress(self, pull: Pull) -> str:
        return f"{pull.have_bytes / pull.size_bytes:.0%}" if pull.size_bytes else "—"

    @admin.display(description="asked for (UTC)", ordering="created_at")
    def created(self, pull: Pull) -> Any:
        return time_label(pull.created_at)


def _to_fleet() -> HttpResponse:
    return HttpResponseRedirect(reverse("admin:fleet"))
