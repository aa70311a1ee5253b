"""The forms of API keys and projects: the administrators', and that of users for own keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from django import forms
from django.utils import timezone
from unfold.widgets import (
    UnfoldAdminCheckboxSelectMultipleWidget,
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextInputWidget,
)

from inference_site.accounts.models import LIMITS, Project, Scope, default_scopes
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.models_file import Route
from inference_site.core.domain.model_spec import ModelSpec

_SCOPES = {
    Scope.INFERENCE: "Generate, and read, change and delete stored objects of the project.",
    Scope.USAGE: "Read the usage of the project.",
    Scope.DEBUG: "Render chat templates to prompts.",
    Scope.MODELS: "Load and unload models, for the whole site.",
    Scope.ADMIN: (
        "Read the usage of all projects; make, rename, limit and archive projects, and make, limit "
        "and revoke their keys."
    ),
}
_ALL_MODELS = "None chosen: all models, also those that are added later."


class ExplainedChoices(UnfoldAdminCheckboxSelectMultipleWidget):
    """Checkboxes with a sentence below each; ``explanations`` has the sentences by value."""

    template_name = "console/choices.html"
    explanations: Mapping[str, str]

    def __init__(self, explanations: Mapping[str, str]) -> None:
        super().__init__()
        self.explanations = explanations

    def create_option(self, name: str, value: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the context of one checkbox."""
        option = super().create_option(name, value, *args, **kwargs)
        return {**option, "explanation": self.explanations.get(str(value), "")}


def explained_models(
    kept: Iterable[str] = (), projects: Collection[str] | None = None
) -> dict[str, str]:
    """Return what is said of each model and route that a key may be limited to.

    ``kept`` are models that a key has already, which the catalogue may have no more. With
    ``projects``, nothing is said of other projects and of models that are for them only.
    """
    known = {}
    for spec in catalogue().models.values():
        if not _is_for(spec, projects):
            continue
        facts = [spec.engine, f"context of {spec.context_length:,} tokens"]
        if owners := [name for name in spec.projects if projects is None or name in projects]:
            facts.append(f"only for {', '.join(owners)}")
        known[spec.id] = "; ".join(facts)
    for route in catalogue().routes.values():
        targets = [one.spec.id for one in route.targets if _is_for(one.spec, projects)]
        if targets or _is_for(route, projects):
            known[route.id] = f"route to {', '.join(targets)}"
    return known | {name: "not in the catalogue now" for name in kept if name not in known}


def _is_for(model: ModelSpec | Route, projects: Collection[str] | None) -> bool:
    return projects is None or any(map(model.is_for, projects))


def _models_field(explanations: Mapping[str, str]) -> forms.MultipleChoiceField:
    return forms.MultipleChoiceField(
        label="Models",
        choices=[(name, name) for name in explanations],
        required=False,
        help_text=_ALL_MODELS,
        widget=ExplainedChoices(explanations),
    )


class ModelsForm(forms.ModelForm[Any]):
    """The administrators' form of a project or key, with a checkbox for each model."""

    allowed_models = _models_field({})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The form of a user who may only view has no fields.
        if "allowed_models" in self.fields:
            models = _models_field(explained_models(self.instance.allowed_models))
            self.fields["allowed_models"] = models


class ApiKeyForm(ModelsForm):
    """The administrators' form of a key, also with a checkbox for each scope."""

    scopes = forms.MultipleChoiceField(
        label="Permissions",
        choices=Scope.choices,
        initial=default_scopes,
        error_messages={"required": "Choose at least one permission."},
        widget=ExplainedChoices({scope.value: does for scope, does in _SCOPES.items()}),
    )


class OwnKeyForm(forms.Form):
    """The form for a key of the user's own, in one of the projects whose members may make keys.

    A limit of the key may be at most that of its project.
    """

    project = forms.ModelChoiceField(
        Project.objects.none(), empty_label=None, widget=UnfoldAdminSelectWidget
    )
    name = forms.CharField(
        max_length=100,
        widget=UnfoldAdminTextInputWidget,
        help_text="What it is for, such as the name of a program.",
    )
    expires_on = forms.DateField(
        label="Expires on (UTC)",
        required=False,
        help_text="The key is refused from this day on. Empty: it does not expire.",
        widget=UnfoldAdminTextInputWidget(attrs={"type": "date"}),
    )

    def __init__(self, user: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        project: Any = self.fields["project"]
        project.queryset = user.projects.filter(is_active=True).order_by("name")
        names = set(project.queryset.values_list("name", flat=True))
        self.fields["allowed_models"] = _models_field(explained_models(projects=names))
        for name in LIMITS:
            self.fields[name] = forms.IntegerField(
                label=name.replace("_", " ").capitalize(),
                required=False,
                min_value=1,
                max_value=2**31 - 1,
                widget=UnfoldAdminIntegerFieldWidget,
                help_text="Empty: only the limit of the project.",
            )

    def clean_expires_on(self) -> Any:
        """Return the day. Raise ValidationError for one that has begun."""
        day = self.cleaned_data["expires_on"]
        if day is not None and day <= timezone.now().date():
            raise forms.ValidationError("Choose a day after today.")
        return day

    def clean(self) -> dict[str, Any]:
        """Return the values. Add an error to each limit above that of the project."""
        values: dict[str, Any] = super().clean() or self.cleaned_data
        project = values.get("project")
        for name in LIMITS if project else ():
            most, asked = getattr(project, name), values.get(name)
            if most is not None and asked is not None and asked > most:
                self.add_error(name, f"The project has a limit of {most:,}.")
        return values
