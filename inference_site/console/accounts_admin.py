"""Admin of projects with their limits of models, API keys and budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, cast, get_args

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.views.decorators.http import require_POST
from unfold.admin import TabularInline
from unfold.forms import PaginationInlineFormSet
from unfold.views import ChangeList
from unfold.widgets import UnfoldAdminSelectWidget

from inference_site.accounts.budgets import Spent, spent_of
from inference_site.accounts.keys import end_old_secrets, issue_key, revoke_key, rotate_key
from inference_site.accounts.models import (
    BOUNDED,
    LIMITS,
    ApiKey,
    Budget,
    ModelLimit,
    Project,
)
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.key_forms import ApiKeyForm, ModelsForm
from inference_site.console.key_states import (
    OTHERS_KEY,
    REVOKED,
    ROTATION_OVERLAP,
    may_rotate,
    spends_of,
    states_of,
)
from inference_site.console.usage_table import dimensions
from inference_site.core.admin_pages.base_admin import (
    SHOWN,
    RelatedFilter,
    SiteAdmin,
    id_of,
    name_without_link,
    require_as_shown,
    require_stored,
)
from inference_site.core.admin_pages.labels import status_label
from inference_site.core.site_settings.models import RetentionKind, retention_days
from inference_site.runs.usage.accounting import lock_budgets

RETENTION = get_args(RetentionKind)
_MAX_KEYS = 200
"""Keys that the form of a budget or a limit offers, besides those that have one."""


class UndeletedAdmin(SiteAdmin):
    """Admin of objects that the usage log refers to; they are deactivated, never deleted."""

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class AmountField(forms.DecimalField):
    """A decimal field that shows no trailing zeros."""

    def prepare_value(self, value: Any) -> Any:
        return f"{value.normalize():f}" if isinstance(value, Decimal) else value


class OnceForm(forms.ModelForm[Any]):
    """A form of which a project has one object with the same values of the fields ``once``."""

    once: tuple[str, ...]
    twice: str
    """The error for a second one."""

    def clean(self) -> dict[str, Any]:
        """Raise ValidationError if the project has an object like this one.

        Django checks no constraint of which a form has only some of the fields.
        """
        values: dict[str, Any] = super().clean() or self.cleaned_data
        if self.has_changed() and not self.errors:
            like = {name: values.get(name, getattr(self.instance, name)) for name in self.once}
            others = type(self.instance).objects.filter(project=self.instance.project_id, **like)
            if others.exclude(pk=self.instance.pk).exists():
                raise forms.ValidationError(self.twice)
        return values

    def choose(self, name: str, choices: Sequence[tuple[str, str]]) -> None:
        """Let a field have one of these values."""
        label = self.fields[name].label
        self.fields[name] = forms.ChoiceField(
            choices=choices,
            required=self.fields[name].required,
            label=label,
            widget=UnfoldAdminSelectWidget(attrs={"aria-label": capfirst(str(label))}),
        )


class BudgetForm(OnceForm):
    """The form of a budget, on its own page and on the page of its project."""

    once = BOUNDED
    twice = "The project has a budget for this already: change its amount instead."

    class Meta:
        model = Budget
        fields = ("project", "api_key", "model", "each", "unit", "every", "amount")
        field_classes = {"amount": AmountField}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "model" in self.fields:
            self.choose("model", [("", "all models"), *_models(self.instance.model)])
        if "each" in self.fields:
            # Its choices are the settings', and what the budget has.
            names = dimensions(self.instance.each).items()
            labels = [(each, f"each {label[:1].lower()}{label[1:]}") for each, label in names]
            self.choose("each", [("", "all together"), *labels])


class ModelLimitForm(OnceForm):
    """The form of the limits of a model, on the page of its project."""

    once = ("api_key", "model")
    twice = "The project has limits for this already: change them instead."

    class Meta:
        model = ModelLimit
        fields = ("project", "api_key", "model", *LIMITS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "model" in self.fields:
            self.choose("model", _models(self.instance.model))


def _models(kept: str) -> list[tuple[str, str]]:
    """Return the choices of a model: those of the catalogue, and what the row has already."""
    ids = (*catalogue().models, *filter(None, [kept]))
    return [(id_, id_) for id_ in dict.fromkeys(ids)]


class OnceFormSet(PaginationInlineFormSet):
    """The forms of the budgets of a project, or of its limits of models."""

    def get_page_num(self) -> int:
        """Return the number of the page; 1 for any text that is none."""
        key, request = self.get_pagination_key(), cast(HttpRequest, self.request)
        given = (id_of(data.get(key, "")) for data in (request.GET, request.POST))
        return next(filter(None, given), 1)

    def clean(self) -> None:
        """Raise ValidationError if two are alike, or one was deleted or changed meanwhile."""
        super().clean()
        require_stored(self)
        require_as_shown(self.data, f"{self.prefix}-{SHOWN}", self.initial_forms, self.instance)
        kept = [one for one in self.forms if one.is_valid() and one not in self.deleted_forms]
        once = cast(type[OnceForm], self.form)
        alike = Counter(tuple(getattr(one.instance, name) for name in once.once) for one in kept)
        if any(count > 1 for count in alike.values()):
            raise forms.ValidationError(once.twice)


class OfKeysInline(TabularInline):
    """Objects of a project, each for all of its keys or for one."""

    formset = OnceFormSet
    extra = 0
    per_page: Any = 20  # Each has a choice of keys.

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request)
        return rows.order_by("pk")

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Label each input for screen readers; remove the icons beside the key."""
        field: Any = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None:
            field.widget = getattr(field.widget, "widget", field.widget)
            field.widget.attrs["aria-label"] = capfirst(db_field.verbose_name)
        return field

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Offer only keys of this project, which are read once for all rows."""
        if db_field.name != "api_key" or request.resolver_match is None:
            return super().formfield_for_foreignkey(db_field, request, **kwargs)
        project = request.resolver_match.kwargs.get("object_id")
        of_project = ApiKey.objects.filter(project=project)
        newest = of_project.filter(revoked_at=None).values("pk")[:_MAX_KEYS]
        named = self.model._default_manager.filter(project=project).values("api_key")
        kwargs["queryset"] = of_project.filter(Q(pk__in=newest) | Q(pk__in=named))
        field: Any = super().formfield_for_foreignkey(db_field, request, **kwargs)
        field.empty_label = "all keys"  # The theme replaces one that it is given.
        field.choices = list(field.choices)
        return field


class BudgetInline(OfKeysInline):
    """The budgets of a project."""

    model = Budget
    form = BudgetForm


class ModelLimitInline(OfKeysInline):
    """The limits of a project for single models: as its other limits, a part of the project."""

    model = ModelLimit
    form = ModelLimitForm

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.has_perm("accounts.view_project"))

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.has_perm("accounts.change_project"))

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_change_permission(request, obj)


@admin.register(Project)
class ProjectAdmin(UndeletedAdmin):
    """Admin of projects with their limits and budgets."""

    form = ModelsForm

    list_display = ("name", "is_active", *LIMITS, "created_at")
    list_filter = ("is_active",)
    search_fields = ("name",)
    autocomplete_fields = ("members",)
    fieldsets = (
        (None, {"fields": ("name", "is_active", "disconnect_grace_s")}),
        ("Access", {"fields": ("allowed_models", "mcp_hosts")}),
        ("Project-wide limits", {"fields": LIMITS}),
        ("Retention", {"fields": RETENTION}),
        ("Own keys", {"fields": ("members",)}),
    )
    inlines = (ModelLimitInline, BudgetInline)

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Say beside each retention what the site's settings are now."""
        field: Any = super().formfield_for_dbfield(db_field, request, **kwargs)
        if db_field.name in RETENTION:
            days = retention_days(db_field.name)
            now = "until they are deleted" if days is None else f"{days} days"
            field.help_text = f"Empty: as the site's settings say, now {now}. 0: until deleted."
        return field

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save a project; say which models still name one that has a new name."""
        super().save_model(request, obj, form, change)
        old = form.initial.get("name")
        if old in (None, obj.name):
            return
        if models := [one.id for one in catalogue().models.values() if old in one.projects]:
            messages.warning(
                request,
                f"Models for the project “{old}” are not for “{obj.name}” until they name it: "
                f"{', '.join(models)}.",
            )


class KeyStateFilter(admin.SimpleListFilter):
    """Filter by whether a key is accepted."""

    title, parameter_name = "status", "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("active", "Active"), ("expired", "Expired"), ("revoked", "Revoked")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        has_expired = Q(expires_at__lte=timezone.now())
        match self.value():
            case "active":
                return queryset.filter(~has_expired | Q(expires_at=None), revoked_at=None)
            case "expired":
                return queryset.filter(has_expired, revoked_at=None)
            case "revoked":
                return queryset.exclude(revoked_at=None)
        return queryset


class KeyChangeList(ChangeList):
    """A list of keys with the state and the spend of each."""

    def get_results(self, request: HttpRequest) -> None:
        """Read the page, and with a fixed number of queries what it shows of its keys."""
        super().get_results(request)
        self.result_list = keys = list(self.result_list)
        may_see_usage = request.user.has_perm("usage.view_usagerollup")
        states, spends = states_of(keys), spends_of(keys) if may_see_usage else {}
        for key in keys:
            key.state, key.spend = states[key.pk], spends.get(key.pk, "—")


@admin.register(ApiKey)
class ApiKeyAdmin(UndeletedAdmin):
    """Admin of keys; a secret is shown once, after creation or rotation, later only its prefix."""

    form = ApiKeyForm
    list_display = (
        *("name", "shown_state", "shown_prefix", "project", "shown_spend"),
        *("last_used_at", "expires_at"),
    )
    list_filter = (KeyStateFilter, ("project", RelatedFilter))
    list_select_related = ("project", "owner")
    search_fields = ("name", "prefix")
    autocomplete_fields = ("project",)
    fieldsets = (
        (None, {"fields": ("project", "name", "shown_prefix", "shown_owner")}),
        ("Access", {"fields": ("scopes", "allowed_models", "expires_at")}),
        ("Limits", {"fields": (*LIMITS, "priority_requests_per_minute")}),
        ("Times", {"fields": ("created_at", "last_used_at", "revoked_at")}),
    )
    readonly_fields = ("shown_prefix", "shown_owner", "created_at", "last_used_at", "revoked_at")
    actions = ("rotate", "revoke")
    shown_owner = name_without_link("owner")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return KeyChangeList

    def get_urls(self) -> list[URLPattern]:
        """Add the buttons of a key's page."""
        view = self.admin_site.admin_view(require_POST(self.act))
        return [
            path("<int:pk>/<str:action>/now/", view, name="accounts_apikey_act"),
            *super().get_urls(),
        ]

    def act(self, request: HttpRequest, pk: int, action: str) -> HttpResponse:
        """Rotate or revoke one key, or end its old secrets; the page has asked before."""
        if not self.has_change_permission(request):
            raise PermissionDenied
        key = get_object_or_404(ApiKey, pk=pk)
        page = reverse("admin:accounts_apikey_change", args=[pk])
        if action == "rotate" and not may_rotate(key, request.user):
            messages.error(request, OTHERS_KEY.format(name=key.name))
        elif action == "rotate" and key.revoked_at is None and key.user_id is None:
            secret = rotate_key(key, ROTATION_OVERLAP)
            self.log_change(request, key, "Rotated.")
            return self.secrets_page(request, [(f"Key {key.name}", secret)], page)
        elif action == "revoke" and revoke_key(key):
            self.log_change(request, key, REVOKED)
            messages.success(request, "Revoked. The key stops working everywhere within 5 seconds.")
        elif action == "end-old" and end_old_secrets(key):
            self.log_change(request, key, "Ended the old secret.")
            messages.success(request, "The old secret stops working within 5 seconds.")
        else:
            messages.error(request, "Nothing was changed: the key has changed meanwhile.")
        return HttpResponseRedirect(page)

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """Return the values of the query that the form begins with; its widget takes no text."""
        given = super().get_changeform_initial_data(request)
        return {name: value for name, value in given.items() if name != "expires_at"}

    @admin.display(description="status")
    def shown_state(self, record: Any) -> SafeString:
        return status_label(record.state.label, record.state.sentence)

    @admin.display(description="spend in 30 days")
    def shown_spend(self, record: Any) -> str:
        spend: str = record.spend
        return spend

    @admin.display(description="key", ordering="prefix")
    def shown_prefix(self, record: ApiKey) -> str:
        return f"{record.prefix}…" if record.prefix else "—"

    def get_readonly_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        """Make the project read-only after creation: the key's usage was accounted to it."""
        return (*self.readonly_fields, "project") if obj else self.readonly_fields

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Create the key on the first save; ``response_add`` shows its secret."""
        if change:
            # Not the rest of the row: it would take back that the key was revoked meanwhile.
            obj.save(update_fields=form.changed_data)
        else:
            obj.secret = issue_key(obj)

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> Any:
        """Show the secret of the new key."""
        page = reverse("admin:accounts_apikey_change", args=[obj.pk])
        return self.secrets_page(request, [(f"Key {obj.name}", obj.secret)], page)

    @admin.action(
        description="Rotate: issue a new secret; the old one expires in 24 hours",
        permissions=["change"],
    )
    def rotate(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> HttpResponse | None:
        """Issue new secrets and show them."""
        if queryset.exclude(user=None).exists():
            messages.error(request, "Playground keys have no secret and were not rotated.")
        secrets = []
        for record in queryset:
            if not may_rotate(record, request.user):
                messages.error(request, OTHERS_KEY.format(name=record.name))
            elif record.revoked_at is None and record.user_id is None:
                secrets.append((f"Key {record.name}", rotate_key(record, ROTATION_OVERLAP)))
                self.log_change(request, record, "Rotated.")
        return self.secrets_page(request, secrets) if secrets else None

    @admin.action(description="Revoke the selected keys", permissions=["change"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> TemplateResponse | None:
        """Revoke the selected keys after a confirmation page.

        The page has all of their ids in one field, because a form has a most of fields.
        """
        if "confirmed" not in request.POST:
            context = {
                **self.admin_site.each_context(request),
                "title": "Revoke API keys",
                "keys": list(queryset.select_related("project")),
            }
            return TemplateResponse(request, "console/revoke_keys.html", context)
        if "shown" in request.POST:
            queryset = queryset.filter(pk__in=map(id_of, request.POST["shown"].split()))
        for record in queryset:
            if revoke_key(record):
                self.log_change(request, record, REVOKED)
        messages.success(request, "Revoked. The keys stop working everywhere within 5 seconds.")
        return None


class BudgetChangeList(ChangeList):
    """A list of budgets with what is spent of each."""

    def get_results(self, request: HttpRequest) -> None:
        """Read the page, and with one query what is spent of its budgets."""
        super().get_results(request)
        self.result_list = budgets = list(self.result_list)
        spends = spent_of(budgets, timezone.now())
        for budget in budgets:
            budget.spent = spends.get(budget.pk, Spent())


@admin.register(Budget)
class BudgetAdmin(SiteAdmin):
    """Admin of budgets, with the amount spent in the current period."""

    list_display = (
        *("project", "shown_key", "shown_model", "shown_each"),
        *("unit", "every", "shown_amount", "spent"),
    )
    list_filter = (("project", RelatedFilter), "unit", "every")
    list_select_related = ("project", "api_key")
    readonly_fields = ("project", "shown_key", "shown_model", "shown_each")
    fields = ("project", "shown_key", "shown_model", "shown_each", "unit", "every", "amount")
    form = BudgetForm
    how_to_add = "A budget is added on the page of its project."

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False  # Budgets are added on the page of their project, which offers its keys.

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save a budget; the accounting lock is taken before its row, to avoid deadlocks."""
        lock_budgets(obj.project_id)
        super().save_model(request, obj, form, change)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return BudgetChangeList

    @admin.display(description="API key")
    def shown_key(self, budget: Budget) -> str:
        return "all keys" if budget.api_key is None else str(budget.api_key)

    @admin.display(description="model")
    def shown_model(self, budget: Budget) -> str:
        return budget.model or "all models"

    @admin.display(description="for each")
    def shown_each(self, budget: Budget) -> str:
        return budget.shown_each or "all together"

    @admin.display(description="spent this period")
    def spent(self, budget: Any) -> str:
        shown = str(budget.shown(budget.spent.highest))
        if not budget.each:
            return shown
        return f"{shown} by the highest; {budget.spent.used_up:,} used up"

    @admin.display(description="amount", ordering="amount")
    def shown_amount(self, budget: Budget) -> str:
        return budget.shown(budget.amount)
