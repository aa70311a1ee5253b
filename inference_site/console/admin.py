"""Admin and forms of models in the database and of pulls; the audit log and failed logins.

The admin of projects, keys and budgets is in ``accounts_admin.py``.

The form of a model has a field for each common setting; "More settings" has the others as YAML. An
entry is a mapping as in the models file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson
import redis.exceptions
import yaml
from axes.models import AccessFailureLog
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST
from unfold.widgets import (
    UnfoldAdminDecimalFieldWidget,
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import ENGINES, LIBRARIES
from inference_site.catalogue.fleet.leases import live_workers
from inference_site.catalogue.hub import HubError, Reference
from inference_site.catalogue.model_store.entries import (
    ALLOWED_OPTIONS,
    check_resolved_addresses,
    encrypt_secrets,
    entry_error,
    read_stored_entry,
)
from inference_site.catalogue.model_store.models import Pull, StoredModel
from inference_site.catalogue.models_file import Route
from inference_site.catalogue.operator_settings import InvalidSetting
from inference_site.console import accounts_admin  # noqa: F401  # It registers its models.
from inference_site.console.model_estimate import estimate, offered_files, offered_servers
from inference_site.console.model_states import BROKEN, ModelCondition, file_condition
from inference_site.console.people import login_log
from inference_site.core.admin_pages.base_admin import (
    KeysetAdmin,
    RelatedFilter,
    SiteAdmin,
    name_without_link,
)
from inference_site.core.admin_pages.labels import status_label, time_label

HIDDEN = "(hidden)"
"""Shown in place of a secret; a form that is sent with it keeps the stored secret."""
PLAIN = ("engine", "file", "base_url", "slots", "context_length", "gpu_layers", "keep_alive")
LISTS = ("aliases", "projects")
_PRICE = {"price_input": "input", "price_cached": "cached", "price_output": "output"}
_SECRETS = ("api_key", "headers")
_ADDRESSES = ("base_url", "base_urls")
_FIELD_OF = {"listed": "is_listed", "price": "price_input"}
_MAX_YAML_CHARACTERS = 20_000
_MAX_YAML_DEPTH = 20
_UNSTORABLE = re.compile(r"[\0\ud800-\udfff]")
"""What PostgreSQL stores in no text; YAML may have it as an escape."""


def form_values(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the form's fields for an entry, without its secrets."""
    rest = hide_secrets(entry)
    price = rest.pop("price", {})
    values = {name: rest.pop(name) for name in PLAIN if name in rest}
    values |= {name: ", ".join(rest.pop(name, ())) for name in LISTS}
    values |= {name: price.get(key) for name, key in _PRICE.items()}
    values["is_listed"] = rest.pop("listed", True)
    values["more"] = yaml.safe_dump(rest, sort_keys=False, allow_unicode=True) if rest else ""
    return values


def entry_of(values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry for the form's values, with the secrets of the entry ``before``.

    Raise InvalidSetting if the YAML is not acceptable, or a secret is missing.
    """
    entry = {name: values[name] for name in PLAIN if values.get(name) not in (None, "")}
    for name in LISTS:
        parts = [part.strip() for part in (values.get(name) or "").split(",")]
        if names := [part for part in parts if part]:
            entry[name] = names
    price = {key: values[name] for name, key in _PRICE.items() if values.get(name) is not None}
    if price:
        entry["price"] = price
    if not values.get("is_listed"):
        entry["listed"] = False
    more = _parse_yaml(values.get("more") or "")
    only_above = {*PLAIN, *LISTS, "price", "listed"} - {"base_url"}
    if twice := more.keys() & (only_above | entry.keys()):
        raise InvalidSetting((min(twice),), "it has a field of its own above")
    return _restore_secrets({**entry, **more}, before)


def hide_secrets(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the entry with ``HIDDEN`` in place of its secrets."""
    shown = dict(entry)
    if "api_key" in shown:
        shown["api_key"] = HIDDEN
    if isinstance(headers := shown.get("headers"), dict):
        shown["headers"] = dict.fromkeys(headers, HIDDEN)
    return shown


def entry_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the changes for the audit log; of secrets only the names."""
    changes = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if name in _SECRETS:
            changes.append(f"{name} changed")
        else:
            changes.append(f"{name}: {before.get(name, '—')} → {after.get(name, '—')}")
    return "; ".join(changes) or "No changes."


def _parse_yaml(text: str) -> dict[str, Any]:
    """Return the mapping in a YAML text. Raise InvalidSetting if it is none.

    Aliases and deep nesting are refused: a short text could take minutes to load.
    """
    if len(text) > _MAX_YAML_CHARACTERS:
        raise InvalidSetting(("more",), f"it has more than {_MAX_YAML_CHARACTERS:,} characters")
    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise InvalidSetting(("more",), "aliases of YAML (*name) are not taken")
            if isinstance(event, yaml.ScalarEvent) and _UNSTORABLE.search(event.value):
                raise InvalidSetting(("more",), "it has a NUL, or half of a character")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_YAML_DEPTH:
                raise InvalidSetting(("more",), f"it is nested more than {_MAX_YAML_DEPTH} deep")
        found = yaml.safe_load(text)
    except InvalidSetting:
        raise
    except (yaml.YAMLError, ValueError) as exc:
        problem = getattr(exc, "problem", None) or type(exc).__name__
        raise InvalidSetting(("more",), f"it is not YAML: {problem}") from exc
    if found is not None and not isinstance(found, dict):
        raise InvalidSetting(("more",), "it must map names of settings to values")
    try:
        # The database keeps JSON: without dates, sets, NaN, or numbers that no float can hold.
        stored: dict[str, Any] = orjson.loads(json.dumps(found or {}, allow_nan=False))
    except (TypeError, ValueError) as exc:
        raise InvalidSetting(
            ("more",), f"a value cannot be stored as JSON, write it in quotes: {exc}"
        ) from exc
    return stored


def _restore_secrets(entry: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``HIDDEN`` by the stored secrets.

    Raise InvalidSetting if the server's address has changed: the stored secrets are of another
    server.
    """
    has_moved = any(entry.get(name) != before.get(name) for name in _ADDRESSES)
    stored = {} if has_moved else before

    def secret(value: Any, key: str) -> Any:
        if value is None:
            raise InvalidSetting((key,), "write it again: the server's address has changed")
        return value

    if entry.get("api_key") == HIDDEN:
        entry["api_key"] = secret(stored.get("api_key"), "api_key")
    if isinstance(headers := entry.get("headers"), dict):
        old = stored.get("headers") or {}
        entry["headers"] = {
            name: secret(old.get(name), "headers") if value == HIDDEN else value
            for name, value in headers.items()
        }
    return entry


def _text(label: str, help_text: str = "") -> forms.CharField:
    return forms.CharField(
        label=label, required=False, help_text=help_text, widget=UnfoldAdminTextInputWidget
    )


def _integer(label: str, help_text: str, minimum: int = 1) -> forms.IntegerField:
    return forms.IntegerField(
        label=label,
        required=False,
        min_value=minimum,
        max_value=2**31 - 1,
        help_text=help_text,
        widget=UnfoldAdminIntegerFieldWidget,
    )


def _decimal(label: str, help_text: str = "") -> forms.FloatField:
    return forms.FloatField(
        label=label,
        required=False,
        min_value=0,
        help_text=help_text,
        widget=UnfoldAdminDecimalFieldWidget,
    )


class StoredModelForm(forms.ModelForm[StoredModel]):
    """The form of an entry, validated in the same way as an entry of the models file."""

    engine = forms.ChoiceField(
        choices=[(name, name) for name in ENGINES if name in ALLOWED_OPTIONS],
        initial="llama_cpp",
        widget=UnfoldAdminSelectWidget,
    )
    file = _text(
        "File",
        "Below MODELS_DIR: owner/name/file.gguf, .ggml or .bin. Not for openai_upstream.",
    )
    base_url = _text("Server", "The address of a server, up to /v1. Only for openai_upstream.")
    slots = _integer("Slots", "How many requests run at the same time.")
    context_length = _integer(
        "Context length",
        "Tokens for each slot. Empty: as the file says, at most 8,192 and what fits.",
    )
    gpu_layers = _integer("GPU layers", "Empty or -1: all that fit.", -1)
    keep_alive = _decimal(
        "Keep alive (s)", "How long it stays without requests when it was loaded on demand."
    )
    aliases = _text("Aliases", "Other names, separated by commas.")
    projects = _text("Projects", "Names of the projects that may use it. Empty: all.")
    is_listed = forms.BooleanField(
        label="Listed",
        required=False,
        initial=True,
        help_text="Whether the list of models shows it.",
        widget=UnfoldBooleanSwitchWidget,
    )
    price_input = _decimal("Input price", "For a million tokens.")
    price_cached = _decimal("Cached input price", "Empty: as other input.")
    price_output = _decimal("Output price")
    more = forms.CharField(
        label="More settings",
        required=False,
        help_text="YAML, as in the models file: sampling, chat_template, api_key, …",
        widget=UnfoldAdminTextareaWidget,
    )

    class Meta:
        model = StoredModel
        fields = ("model_id",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entry_before = dict(self.instance.entry)
        self.file_condition: ModelCondition | None = None
        self.offered = {"files": offered_files(), "servers": offered_servers()}
        """What the template offers for the fields that have these lists."""
        for field, offered in (("file", "files"), ("base_url", "servers")):
            self.fields[field].widget.attrs["list"] = f"offered-{offered}"
        if self.instance.pk:
            self.initial = {**self.initial, **form_values(self.entry_before)}

    def clean(self) -> dict[str, Any]:
        """Validate the entry that the values describe, and set it on the instance."""
        values = super().clean() or {}
        id_ = values.get("model_id") or self.instance.model_id
        if self.errors or not id_:
            return values
        try:
            entry = entry_of(values, self.entry_before)
            spec = read_stored_entry(id_, entry)
            check_resolved_addresses(spec)
        except (InvalidSetting, ValueError, TypeError) as exc:
            # At the field of its key, or at "More settings" with the key's path.
            parts: tuple[str, ...] = getattr(exc, "path", ())
            key = parts[0] if parts else "more"
            if key == "price" and parts[1:]:
                key = f"price_{parts[1]}"
            field = _FIELD_OF.get(key, key)
            prefix = "" if key in self.fields else f"{'.'.join(parts)}: "
            self.add_error(field if field in self.fields else "more", f"{prefix}{exc}.")
            return values
        known = catalogue()
        holder, refusal = known.holder_of(spec.id), ""
        if known.is_fixed(spec.id):
            refusal = "The models file or the product has a model of this ID."
        elif isinstance(holder, Route):
            refusal = "The models file has a route of this name."
        elif (
            holder is not None
            and holder.id != spec.id
            # A model of a file without an entry gives way to one of the database.
            and (known.is_fixed(holder.id) or known.is_stored(holder.id))
        ):
            refusal = f"This is a name of the model {holder.id}."
        if refusal:
            # The ID of a model that is stored already is no field.
            self.add_error("model_id" if "model_id" in self.fields else None, refusal)
        for alias in spec.aliases:
            other = known.named(alias)
            if other is not None and other.id != spec.id:
                self.add_error("aliases", f"{alias} is a name of the model {other.id}.")
        self.file_condition = file_condition(spec)
        if self.file_condition is not None and self.file_condition.state == BROKEN:
            self.add_error("file", f"{self.file_condition.reason}.")
        self.instance.entry, self.instance.any_address = encrypt_secrets(entry), False
        return values


class PullForm(forms.ModelForm[Pull]):
    """The form of a pull: the model on the hub, and the host that fetches it."""

    host = forms.ChoiceField(
        required=False,
        help_text="The host that fetches it into its MODELS_DIR.",
        widget=UnfoldAdminSelectWidget,
    )

    class Meta:
        model = Pull
        fields = ("reference", "revision", "model_id", "host")
        help_texts = {
            "reference": "owner/name:Q4_K_M, owner/name/file.gguf, or owner/name for its only one.",
            "revision": "Branch, tag or commit.",
            "model_id": "The ID that clients use. Empty: the name of the file.",
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "host" not in self.fields:  # The page of a pull that exists has no fields.
            return
        try:
            hosts = sorted({worker.host for worker in live_workers() if worker.host})
        except redis.exceptions.RedisError:
            hosts = []
        choices = [("", "any"), *((host, host) for host in hosts)]
        self.fields["host"].choices = choices  # type: ignore[attr-defined]  # A ChoiceField.

    def clean_reference(self) -> str:
        """Return the reference in one form. Raise ValidationError if it names no model of a hub."""
        try:
            return str(Reference.read(str(self.cleaned_data["reference"]).strip()))
        except HubError as exc:
            raise ValidationError(str(exc)) from exc

    def clean_model_id(self) -> str:
        """Return the ID. Raise ValidationError if a model has it."""
        id_ = str(self.cleaned_data["model_id"]).strip()
        if id_ and catalogue().named(id_) is not None:
            raise ValidationError("There is a model of this name.")
        return id_


@admin.register(StoredModel)
class StoredModelAdmin(SiteAdmin):
    """Models that operators keep in the database, beside those of the models file."""

    form = StoredModelForm
    list_display = ("model_id", "engine", "fault", "updated")
    search_fields = ("model_id",)
    fieldsets = (
        (None, {"fields": ("model_id", "engine", "file", "base_url")}),
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

    @admin.display(description="changed", ordering="updated_at")
    def updated(self, stored: StoredModel) -> Any:
        return time_label(stored.updated_at)

    def get_urls(self) -> list[URLPattern]:
        """Add the estimate that the form shows before it is saved."""
        view = self.admin_site.admin_view(require_POST(self.estimate))
        own = path("estimate/", view, name="model_store_storedmodel_estimate")
        return [own, *super().get_urls()]

    def estimate(self, request: HttpRequest) -> HttpResponse:
        """Return what a model of the posted form would need, as a text. Nothing is stored."""
        if not (self.has_add_permission(request) or self.has_change_permission(request)):
            raise PermissionDenied
        if request.POST.get("engine") not in LIBRARIES:
            text = "It runs on its own server, or needs no weights: no memory is needed here."
        else:
            fields = StoredModelForm.base_fields
            try:
                values = {
                    name: fields[name].clean(request.POST.get(name)) for name in (*PLAIN, "more")
                }
                entry = entry_of({**values, "is_listed": True}, {})
                text = estimate(read_stored_entry("model", entry))
            except ValidationError as exc:
                text = " ".join(exc.messages)
            except (InvalidSetting, ValueError, TypeError) as exc:
                key = ".".join(getattr(exc, "path", ()))
                text = f"{key}: {exc}." if key else f"{exc}."
        return HttpResponse(text, content_type="text/plain; charset=utf-8")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Make the ID of a stored model read-only: requests and usage refer to it."""
        return ("model_id",) if obj else ()

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # A page without the form would be empty: the form's fields are no columns.
        if obj is not None:
            return self.has_change_permission(request, obj)
        return super().has_view_permission(request)

    def get_list_display_links(self, request: HttpRequest, list_display: Any) -> Any:
        """Link to the forms for users who may change models."""
        may_change = self.has_change_permission(request)
        return super().get_list_display_links(request, list_display) if may_change else None

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
        if form.file_condition is None:
            messages.info(request, "Workers and the API take it up within seconds.")
        else:
            why = f"{form.file_condition.reason} on this host"
            messages.warning(request, f"It is not served unless a worker has its file: {why}.")

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
    list_display = ("reference", "status", "progress", "error", "asked_by", "created")
    list_filter = ("state",)
    list_select_related = ("requested_by",)
    fields = ("reference", "revision", "model_id", "host")
    asked_by = name_without_link("requested_by")

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Add progress and result for a pull that exists."""
        results = ("state", "error", "worker", "progress", "asked_by")
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

    @admin.display(description="asked for", ordering="created_at")
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

    @admin.display(description="time")
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
    list_filter = (ActionFilter, ("user", RelatedFilter))
    list_select_related = ("user", "content_type")
    search_fields = ("object_id__exact",)
    search_help_text = "Search by the number of the changed object"

    @admin.display(description="time")
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
