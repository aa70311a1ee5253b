"""Admin of rules and alarms: forms with a preview and a test, and how alarms are handled."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.core.validators import validate_email
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.safestring import SafeString
from django.views.decorators.http import require_GET, require_POST
from redis.exceptions import RedisError
from unfold.widgets import (
    UnfoldAdminCheckboxSelectMultipleWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextInputWidget,
)

from inference_site.accounts.models import ApiKey
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.alarms.bell import CHANGE, link_of
from inference_site.console.alarms.models import Alarm, Rule
from inference_site.console.alarms.preview import preview
from inference_site.core.admin_pages.base_admin import KeysetAdmin, require_stored
from inference_site.core.admin_pages.labels import status_label, time_label
from inference_site.outbox.admin import MailNote
from inference_site.outbox.models import TEST_EVENT, Endpoint, send, sends_mail, site_endpoints

_CONDITION = ("kind", "bound", "factor", "model", "project", "api_key")
_MAX_KEYS = 500
_MAX_EMAILS = 20
_HOURS = {"snooze-1": 1, "snooze-24": 24}


class RuleForm(forms.ModelForm[Rule]):
    """The form of a rule; ``emails`` makes endpoints that only this rule tells of its alarms."""

    emails = forms.CharField(
        label="More e-mail addresses",
        required=False,
        max_length=2_000,
        help_text="Separated by commas. They are told of the alarms of this rule only.",
        widget=UnfoldAdminTextInputWidget,
    )

    class Meta:
        model = Rule
        fields = (*_CONDITION, "recipients", "is_enabled")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "model" in self.fields:  # A user who may only view a rule has no fields.
            chosen = self.instance.model
            names = sorted({*catalogue().models, *([chosen] if chosen else [])})
            self.fields["model"].widget = UnfoldAdminSelectWidget(
                choices=[("", "each model"), *((name, name) for name in names)]
            )
            keys: Any = self.fields["api_key"]
            chosen_key = Q(pk=self.instance.api_key_id)
            newest = ApiKey.objects.filter(revoked_at=None, user=None).order_by("-pk")
            offered = newest.values("pk")[:_MAX_KEYS]
            keys.queryset = ApiKey.objects.filter(chosen_key | Q(pk__in=offered))
            keys.queryset = keys.queryset.select_related("project").order_by(
                "project__name", "name"
            )
            keys.label_from_instance = lambda key: f"{key.project}: {key.name}"

    def clean_emails(self) -> list[str]:
        """Return the addresses. Raise ValidationError for one that is none."""
        parts = [part.strip() for part in self.cleaned_data["emails"].split(",")]
        addresses = [part for part in parts if part]
        for address in addresses:
            try:
                validate_email(address)
            except ValidationError as exc:
                raise forms.ValidationError(f"{address[:100]} is no e-mail address.") from exc
        if len(addresses) > _MAX_EMAILS:
            raise forms.ValidationError(f"At most {_MAX_EMAILS} addresses.")
        return addresses


class PreviewForm(forms.ModelForm[Rule]):
    """The condition of a rule that may exist already; it is not saved."""

    class Meta:
        model = Rule
        fields = _CONDITION

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The rule in the form may exist already: its unique constraint is not asked.
        setattr(self.instance, "validate_constraints", lambda exclude=None: None)  # noqa: B010


class ListedRules(forms.BaseModelFormSet[Rule, forms.ModelForm[Rule]]):
    """The forms of the list of rules. Only what was changed on the page is saved."""

    def add_fields(self, form: Any, index: int | None) -> None:
        super().add_fields(form, index)
        form.fields["is_enabled"].show_hidden_initial = True

    def clean(self) -> None:
        """Raise ValidationError if a rule was deleted meanwhile."""
        super().clean()
        require_stored(self)


@admin.register(Rule)
class RuleAdmin(MailNote):
    """The conditions that raise alarms, and who is told of these."""

    form = RuleForm
    list_display = (
        *("kind", "shown_bound", "shown_factor", "shown_scope", "shown_recipients", "is_enabled"),
    )
    list_editable = ("is_enabled",)
    deleted_logs = frozenset({"alarm"})
    list_select_related = ("project", "api_key")
    autocomplete_fields = ("project",)
    fieldsets = (
        (None, {"fields": ("kind", "bound", "factor", "is_enabled")}),
        ("Only requests of", {"fields": ("model", "project", "api_key")}),
        ("Recipients", {"fields": ("recipients", "emails")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Rule]:
        """Read the recipients of all rules in one query."""
        rules: QuerySet[Rule] = super().get_queryset(request)
        return rules.prefetch_related("recipients")

    def get_changelist_formset(self, request: HttpRequest, **kwargs: Any) -> Any:
        return super().get_changelist_formset(request, formset=ListedRules, **kwargs)

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Offer new addresses to users who may add endpoints."""
        may_add = request.user.has_perm("outbox.add_endpoint")
        if may_add and (obj is None or self.has_change_permission(request, obj)):
            return self.fieldsets
        return (*self.fieldsets[:2], ("Recipients", {"fields": ("recipients",)}))

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Offer endpoints as checkboxes; remove the icons beside the choices."""
        field: Any = super().formfield_for_dbfield(db_field, request, **kwargs)
        if db_field.name in ("project", "api_key", "recipients"):
            field.widget = getattr(field.widget, "widget", field.widget)
        if db_field.name == "recipients":
            field.widget = UnfoldAdminCheckboxSelectMultipleWidget()
            field.label_from_instance = lambda endpoint: f"{endpoint} ({endpoint.way})"
        return field

    def get_urls(self) -> list[URLPattern]:
        """Add the preview and the test."""
        view = self.admin_site.admin_view
        test = view(require_POST(self.test))
        return [
            path("preview/", view(require_GET(self.preview)), name="alarms_rule_preview"),
            path("<int:pk>/test/", test, name="alarms_rule_test"),
            *super().get_urls(),
        ]

    def preview(self, request: HttpRequest) -> HttpResponse:
        """Answer with what the rule of the query would have done, as plain text.

        A form that is not filled in yet is no error: the answer says so.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        form = PreviewForm(request.GET)
        if not form.is_valid():
            text = "Fill in a valid condition to see how often it would have fired."
        else:
            try:
                text = preview(form.save(commit=False))
            except RedisError:
                text = "There is no preview now: Redis is not reachable."
        return HttpResponse(text, content_type="text/plain; charset=utf-8")

    def test(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Send a test to the recipients of a rule; their rows in the outbox have the answers."""
        rule = get_object_or_404(Rule, pk=pk)
        if not self.has_change_permission(request, rule):
            raise PermissionDenied
        named = rule.recipients.all()
        told = [one for one in named or site_endpoints() if one.is_enabled]
        send(told, TEST_EVENT, "test", {"text": f"This is a test of the rule “{rule}”."})
        Endpoint.objects.filter(pk__in=[one.pk for one in told]).update(rests_until=None)
        self.log_change(request, rule, "Sent a test.")
        if not told:
            messages.warning(request, "Nothing was sent: there is no recipient for this rule.")
        else:
            count = f"{len(told)} recipient{'s' if len(told) > 1 else ''}"
            text = f"The test is on its way to {count}; Messages has the answers in a moment."
            messages.success(request, text)
        if not sends_mail() and any(one.way == Endpoint.Way.EMAIL for one in told):
            messages.error(request, "Mail is not configured, so e-mail addresses get nothing.")
        return HttpResponseRedirect(reverse("admin:alarms_rule_change", args=[pk]))

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """Make endpoints of new addresses, and add them to the recipients."""
        super().save_related(request, form, formsets, change)
        if request.user.has_perm("outbox.add_endpoint"):
            for address in form.cleaned_data.get("emails") or ():
                endpoint, _ = Endpoint.objects.get_or_create(
                    project=None,
                    way=Endpoint.Way.EMAIL,
                    address=address,
                    defaults={"only_if_named": True},
                )
                form.instance.recipients.add(endpoint)

    @admin.display(description="bound", ordering="bound")
    def shown_bound(self, rule: Rule) -> str:
        return f"{rule.bound:,g}"

    @admin.display(description="times the usual", ordering="factor")
    def shown_factor(self, rule: Rule) -> str:
        return f"{rule.factor:g}" if rule.factor else "—"

    @admin.display(description="only requests of")
    def shown_scope(self, rule: Rule) -> str:
        return rule.scope or "—"

    @admin.display(description="recipients")
    def shown_recipients(self, rule: Rule) -> str:
        return ", ".join(map(str, rule.recipients.all())) or "the site's"


class AlarmStateFilter(admin.SimpleListFilter):
    """Filter by whether an alarm fires, and is handled, or is resolved."""

    title, parameter_name = "state", "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("firing", "Firing"), ("open", "Firing, and open"), ("resolved", "Resolved")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        match self.value():
            case "firing":
                return queryset.filter(resolved_at=None)
            case "open":
                is_awake = Q(snoozed_until=None) | Q(snoozed_until__lte=timezone.now())
                return queryset.filter(is_awake, resolved_at=None, acknowledged_at=None)
            case "resolved":
                return queryset.exclude(resolved_at=None)
        return queryset


@admin.register(Alarm)
class AlarmAdmin(KeysetAdmin):
    """Alarms, newest first."""

    list_display = ("time", "state", "text", "rule", "handled", "ended")
    list_filter = (AlarmStateFilter,)
    list_select_related = ("rule", "rule__project", "rule__api_key", "handled_by")
    search_fields = ("subject__exact",)
    search_help_text = "Search by the exact subject, such as a model"
    fields = ("state", "text", "subject", "rule", "time", "handled", "ended")

    def get_urls(self) -> list[URLPattern]:
        """Add the buttons of an alarm."""
        view = self.admin_site.admin_view(require_POST(self.handle))
        return [path("<int:pk>/handle/", view, name="alarms_alarm_handle"), *super().get_urls()]

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        """Link each alarm to what it is about, as far as this user may see it."""

        @admin.display(description="alarm")
        def text(alarm: Alarm) -> SafeString | str:
            link = link_of(alarm, request)
            return (
                format_html('<a class="link" href="{}">{}</a>', link, alarm.text)
                if link
                else alarm.text
            )

        return tuple(text if one == "text" else one for one in self.list_display)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.fields

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kw: Any) -> Any:
        """Show one alarm with the buttons to handle it."""
        context["may_handle"] = request.user.has_perm(CHANGE)
        return super().render_change_form(request, context, *args, **kw)

    def handle(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Acknowledge, snooze or reopen a firing alarm, and those with the same text."""
        if not request.user.has_perm(CHANGE):
            raise PermissionDenied
        alarm, action = get_object_or_404(Alarm, pk=pk), request.POST.get("action", "")
        now = timezone.now()
        changes: dict[str, Any] = {"acknowledged_at": None, "snoozed_until": None}
        if action == "acknowledge":
            changes |= {"acknowledged_at": now, "handled_by": request.user}
            said = "Acknowledged."
        elif action in _HOURS:
            until = now + dt.timedelta(hours=_HOURS[action])
            changes |= {"snoozed_until": until, "handled_by": request.user}
            said = f"Snoozed until {until:%Y-%m-%d %H:%M} UTC."
        elif action == "reopen":
            changes["handled_by"] = None
            said = "Reopened."
        else:
            messages.error(request, "There is no such action.")
            return HttpResponseRedirect(reverse("admin:alarms_alarm_changelist"))
        alike = Alarm.objects.filter(Q(pk=pk) | Q(text=alarm.text), resolved_at=None)
        if alike.update(**changes):
            self.log_change(request, alarm, said)
            messages.success(request, said)
        else:
            messages.error(request, "Nothing was changed: the alarm is over.")
        following = request.POST.get("next", "")
        is_local = url_has_allowed_host_and_scheme(following, {request.get_host()})
        back = following if is_local else reverse("admin:alarms_alarm_changelist")
        return HttpResponseRedirect(back)

    @admin.display(description="began")
    def time(self, alarm: Alarm) -> str:
        return time_label(alarm.started_at)

    @admin.display(description="state")
    def state(self, alarm: Alarm) -> str:
        return status_label(alarm.state)

    @admin.display(description="handled")
    def handled(self, alarm: Alarm) -> str:
        return alarm.handling or "—"

    @admin.display(description="resolved")
    def ended(self, alarm: Alarm) -> str:
        return time_label(alarm.resolved_at)
