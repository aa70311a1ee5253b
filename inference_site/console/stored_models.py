"""Between the fields of the model form and an entry as the models file has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis.exceptions
import yaml
from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from unfold.widgets import (
    UnfoldAdminDecimalFieldWidget,
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from inference_site.admin_pages.base_admin import SiteAdmin
from inference_site.admin_pages.labels import status_label, time_label
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.hub import HubError, Reference
from inference_site.catalogue.operator_settings import BadKey
from inference_site.catalogue.routes import Route
from inference_site.fleet import fleet
from inference_site.model_store.entries import (
    ALLOWED_OPTIONS,
    check_names_of_servers,
    fault_of_entry,
    read_stored_entry,
)
from inference_site.model_store.models import Pull, StoredModel
from inference_site.model_store.sealed_entries import sealed

HIDDEN = "(hidden)"
"""Stands for a secret in what is shown; written back, it means the secret that is kept."""
_SECRETS = ("api_key", "headers")
_ADDRESSES = ("base_url", "base_urls")
_PRICE = {"price_input": "input", "price_cached": "cached", "price_output": "output"}
PLAIN = ("engine", "file", "slots", "context_length", "gpu_layers", "keep_alive")
LISTS = ("aliases", "projects")
_MOST_YAML = 20_000
_DEEPEST_YAML = 20


def form_values(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the form's fields for an entry, without its secrets."""
    shown = hidden(entry)
    price = shown.pop("price", {})
    values = {name: shown.pop(name) for name in PLAIN if name in shown}
    values |= {name: ", ".join(shown.pop(name, ())) for name in LISTS}
    values |= {name: price.get(key) for name, key in _PRICE.items()}
    values["is_listed"] = shown.pop("listed", True)
    values["more"] = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True) if shown else ""
    return values


def entry_of(values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry that the form's values describe; ``before`` has the secrets they hide.

    Raise BadKey.
    """
    entry = {name: values[name] for name in PLAIN if values.get(name) not in (None, "")}
    for name in LISTS:
        given = [part.strip() for part in (values.get(name) or "").split(",")]
        if names := [part for part in given if part]:
            entry[name] = names
    price = {key: values[name] for name, key in _PRICE.items() if values.get(name) is not None}
    if price:
        entry["price"] = price
    if not values.get("is_listed"):
        entry["listed"] = False
    more = _mapping(values.get("more") or "")
    if twice := more.keys() & {*PLAIN, *LISTS, "price", "listed"}:
        raise BadKey((min(twice),), "it has a field of its own above")
    return _with_secrets({**entry, **more}, before)


def hidden(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry with its secrets hidden."""
    shown = dict(entry)
    if "api_key" in shown:
        shown["api_key"] = HIDDEN
    if isinstance(headers := shown.get("headers"), dict):
        shown["headers"] = dict.fromkeys(headers, HIDDEN)
    return shown


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return what has changed, for the audit log; secrets are named only."""
    old, new = hidden(before), hidden(after)
    told = []
    for name in sorted({*before, *after}):
        if before.get(name) == after.get(name):
            continue
        if name in _SECRETS:
            told.append(f"{name} changed")
        else:
            told.append(f"{name}: {old.get(name, '—')} → {new.get(name, '—')}")
    return "; ".join(told) or "No changes."


def _mapping(text: str) -> dict[str, Any]:
    if len(text) > _MOST_YAML:
        raise BadKey(("more",), f"it has more than {_MOST_YAML:,} characters")
    try:
        _bounded(text)
        found = yaml.safe_load(text)
    except BadKey:
        raise
    except (yaml.YAMLError, ValueError) as exc:
        problem = getattr(exc, "problem", None) or type(exc).__name__
        raise BadKey(("more",), f"it is not YAML: {problem}") from exc
    if found is not None and not isinstance(found, dict):
        raise BadKey(("more",), "it must map names of settings to values")
    return {str(name): value for name, value in (found or {}).items()}


def _bounded(text: str) -> None:
    """Refuse what YAML reads into more than was written, and what it takes minutes to read."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise BadKey(("more",), "aliases of YAML (*name) are not taken")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML:
            raise BadKey(("more",), f"it is nested more than {_DEEPEST_YAML} deep")


def _with_secrets(entry: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Put kept secrets back; not for another address, whose server must not learn them."""
    is_moved = any(entry.get(name) != before.get(name) for name in _ADDRESSES)
    kept = {} if is_moved else before
    if entry.get("api_key") == HIDDEN:
        entry["api_key"] = _kept(kept.get("api_key"), "api_key")
    if isinstance(headers := entry.get("headers"), dict):
        old = kept.get("headers") or {}
        entry["headers"] = {
            name: _kept(old.get(name), "headers") if value == HIDDEN else value
            for name, value in headers.items()
        }
    return entry


def _kept(secret: Any, key: str) -> Any:
    if secret is None:
        raise BadKey((key,), "write it again: the server's address has changed")
    return secret


_PRICES = ("price_input", "price_cached", "price_output")
_FIELD_OF = {"listed": "is_listed", "price": "price_input"}


def _text(label: str, help_text: str = "") -> forms.CharField:
    return forms.CharField(
        label=label, required=False, help_text=help_text, widget=UnfoldAdminTextInputWidget
    )


def _whole(label: str, help_text: str, minimum: int = 1) -> forms.IntegerField:
    return forms.IntegerField(
        label=label,
        required=False,
        min_value=minimum,
        max_value=2**31 - 1,
        help_text=help_text,
        widget=UnfoldAdminIntegerFieldWidget,
    )


def _number(label: str, help_text: str = "") -> forms.FloatField:
    return forms.FloatField(
        label=label,
        required=False,
        min_value=0,
        help_text=help_text,
        widget=UnfoldAdminDecimalFieldWidget,
    )


class StoredModelForm(forms.ModelForm[StoredModel]):
    """The fields of an entry; the models that check the models file check what comes of them."""

    engine = forms.ChoiceField(
        choices=[(name, name) for name in ENGINES if name in ALLOWED_OPTIONS],
        initial="llama_cpp",
        widget=UnfoldAdminSelectWidget,
    )
    file = _text(
        "File",
        "Below MODELS_DIR: owner/name/file.gguf, .ggml or .bin. Not for openai_upstream.",
    )
    slots = _whole("Slots", "How many requests run at the same time.")
    context_length = _whole(
        "Context length",
        "Tokens for each slot. Empty: as the file says, at most 8,192 and what fits.",
    )
    gpu_layers = _whole("GPU layers", "Empty or -1: all that fit.", -1)
    keep_alive = _number(
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
    price_input = _number("Input price", "For a million tokens.")
    price_cached = _number("Cached input price", "Empty: as other input.")
    price_output = _number("Output price")
    more = forms.CharField(
        label="More settings",
        required=False,
        help_text="YAML, as in the models file: sampling, chat_template, base_url, …",
        widget=UnfoldAdminTextareaWidget,
    )

    class Meta:
        model = StoredModel
        fields = ("model_id",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before = dict(self.instance.entry)
        if self.instance.pk:
            self.initial = {**self.initial, **form_values(self._before)}

    def clean(self) -> dict[str, Any]:
        """Check the entry as the models file is checked."""
        values = super().clean() or {}
        id_ = values.get("model_id") or self.instance.model_id
        if self.errors or not id_:
            return values
        try:
            entry = entry_of(values, self._before)
            spec = read_stored_entry(id_, entry)
            check_names_of_servers(spec)
        except (BadKey, ValueError, TypeError) as exc:
            self._blame(exc)
            return values
        self._check_names(spec.id, spec.aliases)
        self.instance.entry, self.instance.any_address = sealed(entry), False
        return values

    def _blame(self, exc: Exception) -> None:
        path: tuple[str, ...] = getattr(exc, "path", ())
        top = path[0] if path else "more"
        if top == "price" and path[1:]:
            top = f"price_{path[1]}"
        field = _FIELD_OF.get(top, top)
        name = "" if top in self.fields else f"{'.'.join(path)}: "
        self.add_error(field if field in self.fields else "more", f"{name}{exc}.")

    def _check_names(self, id_: str, aliases: tuple[str, ...]) -> None:
        known = catalogue()
        if known.is_fixed(id_):
            self.add_error("model_id", "The models file or the product has a model of this ID.")
        elif isinstance(known.named(id_), Route):
            self.add_error("model_id", "The models file has a route of this name.")
        for alias in aliases:
            other = known.named(alias)
            if other is not None and other.id != id_:
                self.add_error("aliases", f"{alias} is a name of the model {other.id}.")


class PullForm(forms.ModelForm[Pull]):
    """What to fetch, and where."""

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
        if "host" in self.fields:
            names = [("", "any"), *((host, host) for host in _hosts())]
            self.fields["host"].choices = names  # type: ignore[attr-defined]  # A ChoiceField.

    def clean_reference(self) -> str:
        """Refuse what is no reference to a model of a hub."""
        reference = str(self.cleaned_data["reference"]).strip()
        try:
            Reference.read(reference)
        except HubError as exc:
            raise ValidationError(str(exc)) from exc
        return reference

    def clean_model_id(self) -> str:
        """Refuse the ID of a model that is there already."""
        id_ = str(self.cleaned_data["model_id"]).strip()
        if id_ and catalogue().named(id_) is not None:
            raise ValidationError("There is a model of this name.")
        return id_


def _hosts() -> list[str]:
    try:
        return sorted({worker.host for worker in fleet.workers() if worker.host})
    except redis.exceptions.RedisError:
        return []


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
        return fault_of_entry(stored) or "—"

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
        if request.method == "GET" and obj is not None and (fault := fault_of_entry(obj)):
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
