"""Bases of every ``ModelAdmin``, for rows that users edit and for logs that programs write.

Rows that users edit: each change is an entry of the audit log, which names the fields that the form
has changed. The page of a row has a digest of the values that it shows; a form that is sent with it
is refused if other values are stored by then.

Logs: keyset pages, newest first, by id, without counting or sorting the table. A page begins below
an id (``before``) or above one (``after``). A search reads windows of ids, one after the other,
until the page is full or ``_TIME_LIMIT_S`` is over; the next page continues there. So a filter that
matches few rows answers as fast as any other. The first window is small and windows grow, because a
filter may cost microseconds for a row or read long texts. A window that would take longer than the
time that remains is made smaller.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.views.main import ERROR_FLAG, PAGE_VAR
from django.contrib.admin.widgets import (
    AutocompleteMixin,
    AutocompleteSelect,
    AutocompleteSelectMultiple,
)
from django.contrib.auth import get_user_model
from django.contrib.auth.hashers import make_password
from django.contrib.contenttypes.models import ContentType
from django.core.paginator import Paginator
from django.db import IntegrityError
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.crypto import salted_hmac
from django.utils.text import normalize_newlines
from unfold.admin import ModelAdmin
from unfold.contrib.filters.admin import AutocompleteSelectFilter
from unfold.views import ChangeList

from inference_site.core.admin_pages.labels import may_see_content, preview, time_label
from inference_site.core.site_settings.models import site_settings
from inference_site.core.storage.old_rows import first_id_since, id_bounds

_SECRET = re.compile(r"secret|password|token(?!s)|api_key$|headers", re.IGNORECASE)
_MAX_LENGTH = 200
"""Characters of a value."""
_SMALLEST_WINDOW, _FIRST_WINDOW, _LARGEST_WINDOW = 100, 250, 100_000
_TIME_LIMIT_S = 0.08
_BEFORE, _AFTER = "before", "after"
SHOWN = "shown"
"""The hidden input with the ``shown_state`` of a page."""
API_USER, COMMAND_USER = "organization API", "command line"
"""Users of the audit log, as whom nobody can log in. No form takes the names: they have spaces."""
_LOOKUPS = ("", "__exact", "__isnull", "__isempty", "__id__exact")
"""Suffixes that Django's list filters add to the name of their field."""


def log_action(request: HttpRequest, target: Model | str, message: str) -> None:
    """Write an entry by the user of a request; ``target`` may be the ID of a worker or model."""
    log_entry(int(request.user.pk or 0), target, message)


def log_entry(user_id: int, target: Model | str, message: str, flag: int = CHANGE) -> None:
    """Write an entry by a user; ``flag`` is the action, one of Django's or of the login log."""
    record = target if isinstance(target, Model) else None
    LogEntry.objects.create(
        user_id=user_id,
        content_type=None if record is None else ContentType.objects.get_for_model(record),
        object_id=None if record is None else str(record.pk),
        object_repr=str(target)[:200],
        action_flag=flag,
        change_message=message,
    )


def log_entry_of_key(target: Model, message: str, flag: int = CHANGE) -> None:
    """Write an entry by an API key, which the message names; its user is ``API_USER``."""
    log_entry(_nobody(API_USER), target, message, flag)


def log_entry_of_command(target: Model | str, message: str, flag: int = CHANGE) -> None:
    """Write an entry by a command, which the message names; its user is ``COMMAND_USER``."""
    log_entry(_nobody(COMMAND_USER), target, message, flag)


def _nobody(name: str) -> int:
    """Return the id of a user as whom nobody can log in, because each entry must have a user."""
    users = get_user_model()._default_manager
    user, _ = users.get_or_create(
        username=name, defaults={"is_active": False, "password": make_password(None)}
    )
    return int(user.pk)


def form_changes(form: Any) -> list[str]:
    """Return ``label: old → new`` for each changed field of a valid form; of a secret its label."""
    changes = []
    for name in form.changed_data:
        field = form.fields.get(name)
        label = name if field is None or not field.label else str(field.label)
        # A field that refers to an API key holds no secret, whatever its name.
        has_secret_name = _SECRET.search(name) and not isinstance(field, forms.ModelChoiceField)
        if field is None or has_secret_name or isinstance(field.widget, forms.PasswordInput):
            changes.append(f"{label} changed")
            continue
        values = form.get_initial_for_field(field, name), form.cleaned_data.get(name)
        texts = [_value_text(value, field) for value in values]
        old, new = (t if len(t) <= _MAX_LENGTH else f"{t[:_MAX_LENGTH]}…" for t in texts)
        changes.append(f"{label}: {old} → {new}")
    return changes


def formset_changes(formset: Any) -> Iterator[str]:
    """Yield a text for each inline object that was added, changed or deleted."""
    for form in formset.forms:
        what = f"{form.instance._meta.verbose_name} “{form.instance}”"
        if form in formset.deleted_forms:
            yield f"deleted {what}"
        elif form.has_changed():
            is_new = form.instance in formset.new_objects
            yield f"added {what}" if is_new else f"{what}: {'; '.join(form_changes(form))}"


def require_stored(formset: Any) -> None:
    """Raise ValidationError if an object that the page of a formset showed is deleted meanwhile.

    Django marks that at the id, a hidden field whose errors no page shows.
    """
    meta = formset.model._meta
    if any(meta.pk.name in form.errors for form in formset.initial_forms):
        raise forms.ValidationError(
            f"Nothing was saved: a {meta.verbose_name} was deleted meanwhile. Open the page again."
        )


def shown_state(shown: Iterable[forms.BaseForm]) -> str:
    """Return the time in microseconds, and a digest of the stored values that these forms show."""
    return f"{_now_us()}-{_digest(shown)}"


def _now_us() -> int:
    return time.time_ns() // 1000


def require_as_shown(
    data: Mapping[str, Any], name: str, shown: Iterable[forms.BaseForm], target: Model
) -> None:
    """Raise ValidationError if other values are stored than the page of these forms has shown.

    ``data`` has the ``shown_state`` of the page under ``name``; without one, nothing is checked.
    The error names who changed ``target`` last after the page was made, from the audit log.
    """
    since, _, digest = data.get(name, "").partition("-")
    if not digest or digest == _digest(shown):
        return
    since_us = min(id_of(since) or 0, _now_us())
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(target),
        object_id=str(target.pk),
        action_time__gte=dt.datetime.fromtimestamp(since_us / 1_000_000, dt.UTC),
    )
    last = entries.select_related("user").order_by("-pk").first()
    by = f" by {last.user} at {last.action_time:%Y-%m-%d %H:%M} UTC" if last else ""
    raise forms.ValidationError(
        f"This was changed meanwhile{by}. Open the page again, and make your changes there."
    )


def _digest(shown: Iterable[forms.BaseForm]) -> str:
    """Return a digest of the initial values of forms, which are the stored ones also in a POST.

    The key of the digest keeps secrets among the values from being guessed with it.
    """
    values = []
    for form in shown:
        for field in form:
            if not field.field.disabled:
                value = field.field.prepare_value(field.initial)
                is_many = isinstance(value, list | tuple)
                values.append([field.html_name, sorted(map(str, value)) if is_many else value])
    text = json.dumps(values, default=str)
    return salted_hmac("inference_site.core.admin_pages.shown", text).hexdigest()


def require_free_name(form: forms.ModelForm[Any], what: str) -> None:
    """Add an error if another object of the project has the name that a form gives its object.

    Django checks no constraint of which a form has only some of the fields.
    """
    one = form.instance
    alike = type(one)._default_manager.filter(
        project=one.project_id, name=form.cleaned_data.get("name")
    )
    if one.pk and alike.exclude(pk=one.pk).exists():
        form.add_error("name", f"The project has another {what} of this name.")


class TextField(forms.CharField):
    """A field for a text of lines that end with LF; browsers end those of a form with CR and LF."""

    def to_python(self, value: Any) -> str:
        return normalize_newlines(super().to_python(value) or "")


def _value_text(value: Any, field: forms.Field) -> str:
    match value:
        case None | "" | [] | ():
            return "empty"
        case bool():
            return "yes" if value else "no"
        case dt.datetime():
            return f"{value:%Y-%m-%d %H:%M:%S}"
        case list() | tuple() | set() | QuerySet():
            return ", ".join(sorted(_value_text(one, field) for one in value)) or "empty"
        case Model():
            return str(value)
    if isinstance(field, forms.ModelChoiceField) and field.queryset is not None:
        found = field.queryset.model._default_manager.filter(pk=value).first()
        return str(value if found is None else found)
    for choice, label in getattr(field, "choices", None) or ():
        # The label of a group of choices is the list of these.
        if isinstance(label, str) and choice and choice == value:
            return label
    return str(value)


@dataclass(frozen=True, slots=True)
class KeysetPage:
    """Rows of one page, in the order of the search.

    ``reached`` is the id at which the next page starts, None if there are no more rows.
    """

    rows: list[Any]
    reached: int | None


def keyset_page(
    rows: QuerySet[Any], limit: int, *, before: int | None = None, after: int | None = None
) -> KeysetPage:
    """Return at most ``limit`` rows: the newest below ``before``, or the oldest above ``after``.

    The rows above ``after`` are oldest first, all others newest first. Without a cursor the page
    begins at the newest row.
    """
    lowest, highest = id_bounds(rows.model)
    is_upward = after is not None
    # The ids that are not searched yet are those from ``low`` to ``high``, both inclusive.
    low = lowest if after is None else max(after + 1, lowest)
    high = highest if before is None else min(before - 1, highest)
    found: list[Any] = []
    windows = _Windows()
    while low <= high and len(found) <= limit:
        first, last = (
            (low, min(high, low + windows.size - 1))
            if is_upward
            else (max(low, high - windows.size + 1), high)
        )
        window = rows.filter(pk__gte=first, pk__lte=last).order_by("pk" if is_upward else "-pk")
        found += window[: limit + 1 - len(found)]
        low, high = (last + 1, high) if is_upward else (low, first - 1)
        if not windows.has_next() and len(found) <= limit and low <= high:
            return KeysetPage(found, last if is_upward else first)
    return KeysetPage(found[:limit], found[limit - 1].pk if len(found) > limit else None)


class _Windows:
    """The number of ids in each window, from the time that the previous window took."""

    def __init__(self) -> None:
        self.size = _FIRST_WINDOW
        self._began = time.monotonic()
        self._deadline = self._began + _TIME_LIMIT_S

    def has_next(self) -> bool:
        """Return whether there is time for another window; call it after each search."""
        now = time.monotonic()
        left_s, took_s = self._deadline - now, now - self._began
        fitting = int(self.size * left_s / took_s) if took_s else _LARGEST_WINDOW
        self.size = min(4 * self.size, max(fitting, _SMALLEST_WINDOW), _LARGEST_WINDOW)
        self._began = now
        return left_s > 0


class _IdsOnly(AutocompleteMixin):
    """Django's looks up the values of a form that it shows again, and fails on what is no id."""

    def optgroups(self, name: str, value: Sequence[str], attr: Any = None) -> Any:
        return super().optgroups(name, [one for one in value if id_of(one) is not None], attr)


class _Box(_IdsOnly, AutocompleteSelect):
    """Finds one object by typing."""


class _BoxOfSeveral(_IdsOnly, AutocompleteSelectMultiple):
    """Finds several objects by typing."""


class SiteAdmin(ModelAdmin):
    """Base of the admin of every model; an empty list shows ``how_to_add``.

    ``deleted_logs`` are names of models whose rows nobody deletes, except with an object of this
    model.
    """

    how_to_add = ""
    deleted_logs: ClassVar[frozenset[str]] = frozenset()
    change_form_before_template: Any = "admin_pages/shown.html"

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> Any:
        """Return the form; one that is sent is checked against what its page has shown."""
        form: Any = super().get_form(request, obj, change=change, **kwargs)
        if obj is None or request.method != "POST":
            return form

        def clean(sent: Any) -> Any:
            require_as_shown(sent.data, SHOWN, [sent], obj)
            return form.clean(sent)

        return type(form)(form.__name__, (form,), {"clean": clean})

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Return the field; one of ``autocomplete_fields`` takes any value that is sent."""
        if db_field.name in self.get_autocomplete_fields(request):
            kwargs["widget"] = _Box(db_field, self.admin_site)
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    def formfield_for_manytomany(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Return the field; one of ``autocomplete_fields`` takes any values that are sent."""
        if db_field.name in self.get_autocomplete_fields(request):
            kwargs["widget"] = _BoxOfSeveral(db_field, self.admin_site)
        return super().formfield_for_manytomany(db_field, request, **kwargs)

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Add what the page shows, for the form that it sends."""
        if context.get("original") is not None:
            formsets = (one.formset for one in context["inline_admin_formsets"])
            shown = {
                SHOWN: [context["adminform"].form],
                **{f"{one.prefix}-{SHOWN}": one.initial_forms for one in formsets},
            }
            context["shown_states"] = {
                name: request.POST.get(name) or shown_state(of) for name, of in shown.items()
            }
        return super().render_change_form(request, context, *args, **kwargs)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return whether a query parameter belongs to a filter of the list.

        Django allows every lookup of the model's own fields. With ``field__startswith`` a user
        could guess a field letter by letter that no page shows to them, with
        ``json__key__startswith`` a part of a JSON field.
        """
        filters: Any = self.list_filter if request is None else self.get_list_filter(request)
        allowed: set[str] = set()
        for one in filters:
            if hasattr(one, "parameter_name"):  # A SimpleListFilter.
                allowed.add(one.parameter_name)
            else:
                path = one if isinstance(one, str) else one[0]
                allowed |= {f"{path}{suffix}" for suffix in _LOOKUPS}
        return lookup in allowed

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the object with an id; None for any other text that Python reads as its number.

        Django reads a line feed and a number as that number; what else a page shows of the object
        is looked up with the text of the address.
        """
        from_field = from_field or None  # Django fails with an empty ``_to_field``.
        if from_field is None and id_of(object_id) is None:
            return None
        return super().get_object(request, object_id, from_field)

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run an action on the chosen rows. What is no id chooses none; Django fails there.

        If all chosen rows were deleted meanwhile, say so: an action on no rows would say that it
        was done.
        """
        posted: Any = request.POST.copy()
        chosen = [one for one in posted.getlist(ACTION_CHECKBOX_NAME) if id_of(one) is not None]
        posted.setlist(ACTION_CHECKBOX_NAME, chosen)
        request.POST = posted
        is_of_all = posted.get("select_across", "0") != "0"
        if chosen and not is_of_all and not queryset.filter(pk__in=chosen).exists():
            text = "Nothing was done: what was chosen is not in the list any more."
            messages.warning(request, text)
            return None
        return super().response_action(request, queryset, *args, **kwargs)

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Show the form of an object, or save it.

        If another user has saved something at the same moment that excludes this, the form is
        checked again: it finds that now, and says so.
        """
        try:
            return super().changeform_view(request, *args, **kwargs)
        except IntegrityError:
            return super().changeform_view(request, *args, **kwargs)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save an object. Raise IntegrityError for one that was deleted since it was read.

        Django would insert it again, without what was deleted with it.
        """
        rows = self.model._base_manager.select_for_update()
        if change and not rows.filter(pk=obj.pk).exists():
            raise IntegrityError(f"{obj} was deleted at the same moment")
        super().save_model(request, obj, form, change)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Return what is deleted with these objects, and which permissions are missing for it."""
        to_delete, counts, missing, protected = super().get_deleted_objects(objs, request)
        return to_delete, counts, missing - self.deleted_logs, protected

    def construct_change_message(
        self, request: HttpRequest, form: Any, formsets: Any, add: bool = False
    ) -> Any:
        """Return the text for the audit log: old and new values, without secrets."""
        if add:
            return super().construct_change_message(request, form, formsets, add)
        changes = form_changes(form)
        for formset in formsets or ():
            changes += formset_changes(formset)
        return "; ".join(changes) or "No changes."

    def secrets_page(
        self, request: HttpRequest, secrets: list[tuple[str, str]], back: str = ""
    ) -> HttpResponse:
        """Return ``secrets_page`` with a way ``back``, by default to the list."""
        options = self.opts
        back = back or reverse(f"admin:{options.app_label}_{options.model_name}_changelist")
        return secrets_page(request, secrets, back)


def secrets_page(request: HttpRequest, secrets: list[tuple[str, str]], back: str) -> HttpResponse:
    """Return a page that shows secrets by name, as the answer of the POST that made them.

    A message would carry them in a cookie, or in the session, to the page after a redirect.
    """
    context = {
        **admin.site.each_context(request),
        "title": "Shown once",
        "secrets": secrets,
        "back": back,
    }
    return TemplateResponse(request, "console/secrets.html", context)


class KeysetPaginator(Paginator[Any]):
    """Names the template of the page links; the change list finds the rows itself."""

    template_name = "admin_pages/keyset_pages.html"


class KeysetChangeList(ChangeList):
    """One page of a keyset list; ``older`` and ``newer`` are the addresses of its neighbours."""

    older: str | None = None
    newer: str | None = None
    is_cut_short = False

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = super().get_filters_params(params)
        return {key: value for key, value in found.items() if key not in (_BEFORE, _AFTER)}

    def get_results(self, request: HttpRequest) -> None:
        """Find the rows of the page, and where the next and previous pages begin."""
        self.paginator = KeysetPaginator([], self.list_per_page)
        rows = self.queryset.order_by()
        before, after = (id_of(request.GET.get(name, "")) for name in (_BEFORE, _AFTER))
        if after is not None:
            found = keyset_page(rows, self.list_per_page, after=after)
            self.newer = self._link(_AFTER, found.reached)
            self.older = self._link(_BEFORE, after + 1)
            found.rows.reverse()
        else:
            found = keyset_page(rows, self.list_per_page, before=before)
            self.older = self._link(_BEFORE, found.reached)
            self.newer = self._link(_AFTER, None if before is None else before - 1)
        self.is_cut_short = found.reached is not None and len(found.rows) < self.list_per_page
        self.result_list = found.rows
        self.result_count = self.full_result_count = len(found.rows)
        self.show_full_result_count = self.show_admin_actions = False
        self.can_show_all = self.multi_page = False

    def _link(self, parameter: str, id_: int | None) -> str | None:
        if id_ is None:
            return None
        other = _AFTER if parameter == _BEFORE else _BEFORE
        return str(self.get_query_string({parameter: id_, other: None}))


def name_without_link(relation: str) -> Callable[[Any, Model], str]:
    """Return a read-only field with the name of a related object, such as a user.

    Django links to the page of the object, which a few may open.
    """

    @admin.display(description=relation.replace("_", " "), ordering=relation)
    def shown(_: Any, record: Model) -> str:
        related = getattr(record, relation)
        return "—" if related is None else str(related)

    return shown


def id_of(text: str) -> int | None:
    """Return the id that a parameter or a field has; None for anything else."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


class KeysetAdmin(SiteAdmin):
    """Read-only admin of rows that only programs write."""

    list_per_page = 50
    list_fullwidth = True
    ordering = ("-pk",)
    sortable_by = ()
    search_fields: ClassVar[list[str] | tuple[str, ...]] = ("public_id__exact",)
    search_help_text = "Search by exact ID"
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # Django counts the rows of each facet.

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return KeysetChangeList

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description="time")
    def time(self, row: Any) -> str:
        return time_label(row.created_at)


class PreviewAdmin(KeysetAdmin):
    """A list with previews of prompts and answers after its first two columns.

    Its rows are annotated with ``asked`` and ``answered``.
    """

    previews: tuple[str, ...] = ("input", "output")

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        """Add the previews for users who may see content."""
        shown = tuple(self.list_display)
        return (*shown[:2], *self.previews, *shown[2:]) if may_see_content(request) else shown

    @admin.display(description="input")
    def input(self, stored: Any) -> str:
        return preview(stored.asked)

    @admin.display(description="output")
    def output(self, stored: Any) -> str:
        return preview(stored.answered)

    @admin.display(description="metadata")
    def shown_metadata(self, stored: Any) -> str:
        return preview(", ".join(f"{name}={value}" for name, value in stored.metadata.items()))


SPANS = {"1h": dt.timedelta(hours=1), "24h": dt.timedelta(days=1)}
SPANS |= {"7d": dt.timedelta(days=7), "30d": dt.timedelta(days=30)}
SPAN_NAMES = {"1h": "Last hour", "24h": "Last 24 hours", "7d": "Last 7 days", "30d": "Last 30 days"}


class SinceFilter(admin.SimpleListFilter):
    """Filter by age, of rows whose ids grow with the time in ``field``.

    They do not among imported rows, so within the span after an import no id bounds the search.
    """

    title, parameter_name = "time", "since"
    field = "created_at"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return list(SPAN_NAMES.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        span = SPANS.get(self.value() or "")
        if span is None:
            return queryset
        moment = timezone.now() - span
        rows = queryset.filter(**{f"{self.field}__gte": moment})
        imported_at = site_settings().imported_at
        if imported_at is not None and imported_at >= moment:
            return rows
        return rows.filter(pk__gte=first_id_since(queryset.model, self.field, moment))


class RelatedFilter(AutocompleteSelectFilter):
    """Filter by a related object, which is found by typing: all projects or users are too many."""

    template = "admin_pages/related_filter.html"

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Yield the form, what it keeps of the address, and the address without this filter."""
        own = self.expected_parameters()
        left = (*own, _BEFORE, _AFTER, PAGE_VAR, ERROR_FLAG)
        kept = [(name, value) for name, value in self.request.GET.items() if name not in left]
        (shown,) = super().choices(changelist)
        yield {**shown, "kept": kept, "all": changelist.get_query_string(remove=own)}


class KeyFilter(admin.SimpleListFilter):
    """Filter by API key: offers the keys of the chosen project, since all keys are too many."""

    title, parameter_name = "API key", "api_key"
    keys_of: type[Model] | None = None
    """The model with the field ``api_key``, if it is not the listed model."""
    chosen_key: int | None = None
    _MAX_KEYS = 100

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        project = id_of(request.GET.get("project__id__exact", ""))
        chosen = id_of(self.value() or "")
        field: Any = (self.keys_of or model_admin.model)._meta.get_field("api_key")
        keys = field.related_model._default_manager
        keys = keys.filter(pk=chosen) if project is None else keys.filter(project=project)
        # A link to another project keeps the key that was chosen before, which is none of its own.
        is_of_project = chosen is not None and keys.filter(pk=chosen).exists()
        self.chosen_key = chosen if is_of_project else None
        return [(str(key.pk), key.name) for key in keys[: self._MAX_KEYS]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.chosen_key is None else queryset.filter(api_key=self.chosen_key)
