"""Admin of the models in the database, of pulls, of the audit log and of failed logins."""

from __future__ import annotations

from typing import Any

from axes.models import AccessFailureLog
from django.contrib import admin, messages
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from inference_site.catalogue.model_store.entries import entry_error
from inference_site.catalogue.model_store.models import Pull, StoredModel
from inference_site.console.forms import PullForm, StoredModelForm, entry_changes
from inference_site.console.people import login_log
from inference_site.core.admin_pages.base_admin import KeysetAdmin, SiteAdmin
from inference_site.core.admin_pages.labels import status_label, time_label


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
        """Make the ID of a stored model read-only: requests and usage refer to it."""
        return ("model_id",) if obj else ()

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # A page without the form would be empty: the form's fields are no columns.
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
        """Warn with the reason if the model is not served."""
        if request.method == "GET" and obj is not None and (fault := entry_error(obj)):
            messages.warning(request, f"This model is not served: {fault}.")
        return super().render_change_form(request, context, add, change, form_url, obj)

    def construct_change_message(
        self, request: HttpRequest, form: Any, formsets: Any, add: bool = False
    ) -> Any:
        """Return the text for the audit log: old and new values, without secrets."""
        return entry_changes({} if add else form.entry_before, form.instance.entry)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save the entry, and say when it takes effect."""
        super().save_model(request, obj, form, change)
        messages.info(request, "Workers and the API take it up within seconds.")

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> Any:
        """Redirect to the page of models and workers."""
        messages.success(request, f"Added the model {obj.model_id}.")
        return HttpResponseRedirect(reverse("admin:fleet"))

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Delete the entry; say that the file stays."""
        super().delete_model(request, obj)
        if obj.entry.get("file"):
            messages.info(request, f"The file of {obj.model_id} stays where it is.")


@admin.register(Pull)
class PullAdmin(SiteAdmin):
    """Pulls of models from the hub, with their progress and result."""

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
        """Add progress and result for a pull that exists."""
        results = ("state", "error", "worker", "progress", "requested_by")
        return (*self.fields, *results) if obj else self.fields

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save the pull with the user who requests it."""
        obj.requested_by = request.user
        super().save_model(request, obj, form, change)

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> Any:
        """Redirect to the page of models and workers, which shows the progress."""
        messages.success(request, f"Pulling {obj.reference}…")
        return HttpResponseRedirect(reverse("admin:fleet"))

    @admin.display(description="state", ordering="state")
    def status(self, pull: Pull) -> Any:
        return status_label(pull.state)

    @admin.display(description="fetched")
    def progress(self, pull: Pull) -> str:
        return f"{pull.have_bytes / pull.size_bytes:.0%}" if pull.size_bytes else "—"

    @admin.display(description="asked for (UTC)", ordering="created_at")
    def created(self, pull: Pull) -> Any:
        return time_label(pull.created_at)


@admin.register(AccessFailureLog)
class LoginFailureAdmin(KeysetAdmin):
    """Failed logins, read-only: each up to the one that locked the user."""

    list_display = ("time", "username", "ip_address", "locked_out", "user_agent")
    list_display_links = None  # The page of a row would show the same columns.
    list_filter = ("locked_out",)
    search_fields = ("username__exact", "ip_address")
    search_help_text = "Search by the user name or the address"

    @admin.display(description="time (UTC)")
    def time(self, failure: AccessFailureLog) -> str:
        return time_label(failure.attempt_time)


class ActionFilter(admin.SimpleListFilter):
    """Filter by action: those of Django, and logins."""

    title, parameter_name = "action", "done"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        labels = {ADDITION: "Addition", CHANGE: "Change", DELETION: "Deletion", **login_log.LABELS}
        return [(str(flag), label) for flag, label in labels.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value() or ""
        known = {value for value, _ in self.lookup_choices}
        return queryset.filter(action_flag=chosen) if chosen in known else queryset


@admin.register(LogEntry)
class AuditAdmin(KeysetAdmin):
    """The audit log, read-only: every action in the admin, with its user."""

    list_display = ("time", "user", "action", "kind", "target", "change")
    list_display_links = None  # The list shows all columns, and links to the changed object.
    list_filter = (ActionFilter, "user")
    list_select_related = ("user", "content_type")
    search_fields = ("object_id__exact",)
    search_help_text = "Search by the number of the changed object"

    @admin.display(description="time (UTC)")
    def time(self, entry: LogEntry) -> str:
        return time_label(entry.action_time)

    @admin.display(description="action")
    def action(self, entry: LogEntry) -> str:
        return login_log.LABELS.get(entry.action_flag) or entry.get_action_flag_display()

    @admin.display(description="kind")
    def kind(self, entry: LogEntry) -> str:
        return "—" if entry.content_type is None else str(entry.content_type.name)

    @admin.display(description="object")
    def target(self, entry: LogEntry) -> SafeString | str:
        address = None if entry.is_deletion() else entry.get_admin_url()
        if not address:
            return entry.object_repr
        return format_html('<a href="{}">{}</a>', address, entry.object_repr)

    @admin.display(description="change")
    def change(self, entry: LogEntry) -> SafeString:
        return format_html('<span class="long-text">{}</span>', entry.get_change_message())
