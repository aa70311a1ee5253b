"""The forms of a model in the database and of a pull."""

from __future__ import annotations

from typing import Any

import redis.exceptions
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
from inference_site.catalogue.hub import HubError, Reference
from inference_site.catalogue.operator_settings import InvalidSetting
from inference_site.catalogue.routes import Route
from inference_site.console.model_pages.entry_fields import entry_of, form_values
from inference_site.fleet import fleet
from inference_site.model_store.entries import (
    ALLOWED_OPTIONS,
    check_resolved_addresses,
    encrypt_secrets,
    read_stored_entry,
)
from inference_site.model_store.models import Pull, StoredModel

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
            check_resolved_addresses(spec)
        except (InvalidSetting, ValueError, TypeError) as exc:
            self._blame(exc)
            return values
        self._check_names(spec.id, spec.aliases)
        self.instance.entry, self.instance.any_address = encrypt_secrets(entry), False
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
        """Refuse what is no reference to a model of a hub; return it in one form."""
        try:
            return str(Reference.read(str(self.cleaned_data["reference"]).strip()))
        except HubError as exc:
            raise ValidationError(str(exc)) from exc

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
