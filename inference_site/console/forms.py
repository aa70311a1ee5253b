"""Forms of models in the database and of pulls from the hub.

The form of a model has a field for each common setting; "More settings" has the others as YAML. An
entry is a mapping as in the models file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis.exceptions
import yaml
from django import forms
from django.core.exceptions import ValidationError
from unfold.widgets import (
    UnfoldAdminDecimalFieldWidget,
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.hub import HubError, Reference
from inference_site.catalogue.model_store.entries import (
    ALLOWED_OPTIONS,
    check_resolved_addresses,
    encrypt_secrets,
    read_stored_entry,
)
from inference_site.catalogue.model_store.models import Pull, StoredModel
from inference_site.catalogue.operator_settings import InvalidSetting
from inference_site.catalogue.routes import Route

HIDDEN = "(hidden)"
"""Shown in place of a secret; a form that is sent with it keeps the stored secret."""
PLAIN = ("engine", "file", "slots", "context_length", "gpu_layers", "keep_alive")
LISTS = ("aliases", "projects")
_PRICE = {"price_input": "input", "price_cached": "cached", "price_output": "output"}
_SECRETS = ("api_key", "headers")
_ADDRESSES = ("base_url", "base_urls")
_FIELD_OF = {"listed": "is_listed", "price": "price_input"}
_MAX_YAML_CHARACTERS = 20_000
_MAX_YAML_DEPTH = 20


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

    Raise BadKey if the YAML is not acceptable, or a secret is missing.
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
    if twice := more.keys() & {*PLAIN, *LISTS, "price", "listed"}:
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
    """Return the mapping in a YAML text. Raise BadKey if it is none.

    Aliases and deep nesting are refused: a short text could take minutes to load.
    """
    if len(text) > _MAX_YAML_CHARACTERS:
        raise InvalidSetting(("more",), f"it has more than {_MAX_YAML_CHARACTERS:,} characters")
    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise InvalidSetting(("more",), "aliases of YAML (*name) are not taken")
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
    return {str(name): value for name, value in (found or {}).items()}


def _restore_secrets(entry: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``HIDDEN`` by the stored secrets.

    Raise BadKey if the server's address has changed: the stored secrets are of another server.
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
        help_text="YAML, as in the models file: sampling, chat_template, base_url, …",
        widget=UnfoldAdminTextareaWidget,
    )

    class Meta:
        model = StoredModel
        fields = ("model_id",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entry_before = dict(self.instance.entry)
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
            self._add_error_of_entry(exc)
            return values
        self._check_names(spec.id, spec.aliases)
        self.instance.entry, self.instance.any_address = encrypt_secrets(entry), False
        return values

    def _add_error_of_entry(self, exc: Exception) -> None:
        """Show an error at the field of its key, or at "More settings" with the key's path."""
        path: tuple[str, ...] = getattr(exc, "path", ())
        key = path[0] if path else "more"
        if key == "price" and path[1:]:
            key = f"price_{path[1]}"
        field = _FIELD_OF.get(key, key)
        prefix = "" if key in self.fields else f"{'.'.join(path)}: "
        self.add_error(field if field in self.fields else "more", f"{prefix}{exc}.")

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
            hosts = sorted({worker.host for worker in fleet.workers() if worker.host})
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
