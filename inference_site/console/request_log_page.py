"""The page of requests: accepted and refused ones in one list, with tabs and facets.

A page merges two tables by time, generations and refusals, each paged by its own ids; the cursor of
a page is a pair of ids. So no row is copied, shown twice or left out, and no index on the time is
needed. A list in another order than time is of one table (see ``sorted_requests``).
"""

from __future__ import annotations

import datetime as dt
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import permission_required
from django.core.exceptions import PermissionDenied
from django.db.models import Exists, Max, Model, OuterRef, QuerySet
from django.db.models.fields.json import KT
from django.db.models.functions import Left
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import reverse
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from completions.models import StoredCompletion
from completions.storage import with_previews as with_completion_previews
from completions.storage import with_words as completions_with_words
from inference_site.accounts.models import ApiKey, Project
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.request_columns import (
    Cell,
    Columns,
    LoggedRequest,
    cells_of,
    choices,
    chosen_columns,
    headings,
    sorting_heading,
)
from inference_site.console.request_filters import (
    ACCEPTED,
    ENDPOINTS,
    REFUSED,
    UNFINISHED,
    LogFilters,
    filters_of,
    offered_keys,
    posted_query,
    project_form,
    saved_query,
    tabs_of,
)
from inference_site.console.sorted_requests import SortedPage, sorted_page
from inference_site.console.tiles import VIEW_REQUESTS, may_filter
from inference_site.core.admin_pages.base_admin import (
    SPAN_NAMES,
    KeysetPage,
    keyset_page,
    log_action,
)
from inference_site.core.admin_pages.labels import PREVIEW_LENGTH, may_see_content, preview
from inference_site.runs.kept_content.models import KeptContent
from inference_site.runs.models import Generation, Status
from inference_site.runs.request_log.models import Refusal, SavedFilter
from responses_api.annotations import with_previews as with_response_previews
from responses_api.models import Conversation, StoredResponse
from responses_api.search import (
    HIT_ENDS,
    HIT_STARTS,
    SearchTooBroad,
    conversations_with_words,
    headlines,
    search_timeout,
)

PAGE_SIZE = 50
MAX_ROWS_READ = 500
"""Rows read of each table: the page shows the newest of them, the facets count all."""
_MAX_SAVED, _MAX_FACET_VALUES, _MAX_CONVERSATIONS = 30, 12, 20
_TOO_BROAD = "Too much would have to be searched: choose a project, or give more words."


@dataclass(frozen=True, slots=True)
class LogPage:
    """The requests of a page, newest first, and those that the facets count.

    ``older`` is the cursor of the next page, None at the end of the log. ``is_cut_short`` says that
    the search ran out of time before the page was full.
    """

    shown: Sequence[LoggedRequest] = ()
    counted: Sequence[Any] = ()
    older: str | None = None
    is_cut_short: bool = False


class _TablePage:
    """The rows of one of the two tables, below an id."""

    def __init__(self, model: type[Model], rows: QuerySet[Any] | None, before: int | None) -> None:
        if before is None:
            before = (model._default_manager.aggregate(top=Max("pk"))["top"] or 0) + 1
        found = KeysetPage([], None)
        if rows is not None:
            found = keyset_page(rows, MAX_ROWS_READ, before=before)
        self._model, self._before, self._reached = model, before, found.reached
        self.rows: list[Any] = found.rows
        self.has_more = found.reached is not None
        self.is_cut_short = self.has_more and len(found.rows) < MAX_ROWS_READ

    def searched_to(self) -> dt.datetime | None:
        """Return the time of the oldest row that a search without enough time has read; else None.

        The table may still have matching rows that are older.
        """
        if not self.is_cut_short:
            return None
        following = self._model._default_manager.filter(pk__gte=self._reached).order_by("pk")
        at = following.values_list("created_at", flat=True).first()
        return at if isinstance(at, dt.datetime) else None

    def cursor_after(self, shown: Sequence[Any]) -> int:
        """Return the id below which this table continues after a page with these rows."""
        own = [row for row in shown if isinstance(row, self._model)]
        if self.is_cut_short and len(own) == len(self.rows) and self._reached is not None:
            return self._reached
        return own[-1].pk if own else self._before


def log_page(filters: LogFilters, size: int | None = None) -> LogPage:
    """Return the page of filters without words, at most ``size`` or ``PAGE_SIZE`` requests."""
    size = PAGE_SIZE if size is None else size
    generations_before, refusals_before = filters.before or (None, None)
    tables = (
        _TablePage(Generation, filters.generations(), generations_before),
        _TablePage(Refusal, filters.refusals(), refusals_before),
    )
    # Rows of one table must not be shown before newer rows of the other that were not read yet.
    limits = [limit for table in tables if (limit := table.searched_to()) is not None]
    oldest = max(limits, default=dt.datetime.min.replace(tzinfo=dt.UTC))
    rows = heapq.merge(
        *(table.rows for table in tables), key=lambda row: row.created_at, reverse=True
    )
    merged: list[Any] = list(takewhile(lambda row: row.created_at >= oldest, rows))
    shown = merged[:size]
    has_older = len(merged) > size or any(table.has_more for table in tables)
    cursor = "-".join(str(table.cursor_after(shown)) for table in tables)
    is_cut_short = len(shown) < size and any(table.is_cut_short for table in tables)
    return LogPage(shown, merged, cursor if has_older else None, is_cut_short)


def page_with_words(filters: LogFilters) -> tuple[LogPage, dict[str, SafeString]]:
    """Return the requests whose prompts or answers have the words, and the matching texts by id.

    The words of stored responses are in an index; stored chat completions are searched one by one,
    for a bounded time. Call it within ``search.search_time``.
    """
    generations = filters.generations()
    if generations is None:
        return LogPage(), {}
    before_response, before_completion = filters.before or (None, None)
    responses = StoredResponse.objects.mentioning(filters.words, filters.project)
    completions = completions_with_words(filters.words)
    if filters.project is not None:
        responses = responses.filter(project=filters.project)
        completions = completions.filter(project=filters.project)
    if filters.has_columns:
        responses = responses.filter(public_id__in=generations.values("public_id"))
        same = generations.filter(public_id=OuterRef("public_id"))
        completions = completions.filter(Exists(same))
    found = keyset_page(responses, PAGE_SIZE, before=before_response)
    ids = {row.public_id: row.pk for row in found.rows}
    hits = headlines(list(ids.values()), filters.words)
    others = keyset_page(completions.only("public_id"), PAGE_SIZE, before=before_completion)
    public_ids = [*ids, *(row.public_id for row in others.rows)]
    shown = list(Generation.objects.filter(public_id__in=public_ids).order_by("-pk"))
    older = None
    if found.reached is not None or others.reached is not None:
        older = f"{found.reached or 0}-{others.reached or 0}"
    marked = {public_id: _mark_hits(hits[pk]) for public_id, pk in ids.items() if pk in hits}
    cut = [page.reached is not None and len(page.rows) < PAGE_SIZE for page in (found, others)]
    return LogPage(shown, shown, older, any(cut)), marked


def _conversations(request: HttpRequest, filters: LogFilters) -> Sequence[Conversation]:
    """Return the newest conversations with the words, for a user who may see them."""
    allowed = may_see_content(request) and request.user.has_perm("responses_api.view_conversation")
    if not filters.words or filters.has_columns or filters.before or not allowed:
        return []
    try:
        with search_timeout():
            found = conversations_with_words(filters.words, filters.project, _MAX_CONVERSATIONS)
            rows = Conversation.objects.filter(pk__in=found).select_related("project")
            return list(rows.order_by("-pk"))
    except SearchTooBroad:
        return []


def _mark_hits(text: str) -> SafeString:
    """Return a text as HTML, with the words that were found in ``mark`` elements."""
    marked = str(escape(text)).replace(HIT_STARTS, "<mark>").replace(HIT_ENDS, "</mark>")
    return mark_safe(marked)  # noqa: S308  # Escaped above; only the marks are HTML.


@dataclass(frozen=True, slots=True)
class Content:
    """Previews of a prompt and its answer, and the page with the full texts, if they are stored."""

    asked: str
    answered: str
    page: str


def contents_of(
    public_ids: Sequence[str],
    length: int = PREVIEW_LENGTH,
    show: Callable[[str | None], str] = preview,
) -> dict[str, Content]:
    """Return the beginnings of what generations were asked and answered, if it is stored or kept
    for debugging; each goes through ``show``."""
    asked_last, answer = Left(KT("prompt__-1__content"), length + 1), Left("answer", length + 1)
    kept = KeptContent.objects.shown().filter(public_id__in=public_ids)
    contents = {
        public_id: Content(show(asked), show(answered), "")
        for public_id, asked, answered in kept.values_list("public_id", asked_last, answer)
    }
    responses = StoredResponse.objects.filter(public_id__in=public_ids)
    completions = StoredCompletion.objects.filter(public_id__in=public_ids)
    columns = ("public_id", "pk", "asked", "answered")
    stored = {
        "responses_api_storedresponse": with_response_previews(responses, length),
        "completions_storedcompletion": with_completion_previews(completions, length),
    }
    for table, rows in stored.items():
        for public_id, pk, asked, answered in rows.values_list(*columns):
            page = reverse(f"admin:{table}_change", args=(pk,))
            contents[public_id] = Content(show(asked), show(answered), page)
    return contents


@dataclass(frozen=True, slots=True)
class FacetValue:
    """A value of a property: how many requests have it, and the query that chooses it.

    The query of a chosen value removes the choice.
    """

    label: str
    count: int
    query: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Facet:
    """A property of requests, with its most frequent values."""

    title: str
    values: Sequence[FacetValue]


def _facets(
    filters: LogFilters,
    counted: Sequence[Any],
    keys: Mapping[int, ApiKey],
    query: QueryDict,
) -> list[Facet]:
    """Return the facets of requests; ``query`` is the query of the page."""
    key_labels = {pk: f"{key.name} ({key.prefix}…)" for pk, key in keys.items()}
    properties: list[tuple[str, str, Callable[[Any], Any], str]] = [
        ("Status", "status", lambda one: str(one.status), filters.status),
        ("Error", "error", lambda one: one.error_code, filters.error),
        ("Key", "key", lambda one: one.api_key_id, str(filters.key or "")),
        ("Model", "model", lambda one: one.model, filters.model),
    ]
    facets = []
    for title, name, property_of, chosen in properties:
        counts: Counter[Any] = Counter()
        for one in counted:
            if value := property_of(one):
                counts[value] += (
                    one.count if isinstance(one, Refusal) else getattr(one, "requests", 1)
                )
        values = []
        for value, count in counts.most_common(_MAX_FACET_VALUES):
            is_chosen = str(value) == chosen
            changed = query.copy()
            for dropped in ("before", "page", name):
                changed.pop(dropped, None)
            if not is_chosen:
                changed[name] = str(value)
            label = key_labels.get(value, str(value)) if name == "key" else str(value)
            values.append(FacetValue(label, count, changed.urlencode(), is_chosen))
        facets.append(Facet(title, values))
    return facets


@dataclass(frozen=True, slots=True)
class LogRow:
    """One request as the page shows it; ``cells`` are those of the chosen columns."""

    request: LoggedRequest
    project: Project | None
    key: ApiKey | None
    is_refused: bool
    endpoint: str
    page: str
    cells: Sequence[Cell]
    content: Content | None = None
    hit: SafeString | str = ""


def _row(
    one: LoggedRequest,
    projects: Mapping[int, Project],
    keys: Mapping[int, ApiKey],
    contents: Mapping[str, Content],
    hits: Mapping[str, SafeString],
    columns: Columns,
) -> LogRow:
    project, key = projects.get(one.project_id or 0), keys.get(one.api_key_id or 0)
    if not isinstance(one, Generation):
        # The method is shown only if it is not POST, as of nearly all requests.
        endpoint = one.path if one.method == "POST" else f"{one.method} {one.path}".strip()
        page = reverse("admin:request", args=(REFUSED, one.pk))
        return LogRow(one, project, key, True, endpoint, page, cells_of(one, columns))
    content = contents.get(one.public_id)
    return LogRow(
        one,
        project,
        key,
        is_refused=False,
        endpoint=ENDPOINTS.get(one.kind, one.kind),
        page=reverse("admin:request", args=(ACCEPTED, one.pk)),
        cells=cells_of(one, columns),
        content=content,
        hit=hits.get(one.public_id, ""),
    )


def _page_of(
    request: HttpRequest, filters: LogFilters
) -> tuple[LogPage, dict[str, SafeString], SortedPage | None]:
    """Return the page, the marked texts of a search, and the sorted page if there is an order.

    What the user may not see, or takes too long, is an empty page with a message.
    """
    if not may_filter(request.user, filters.metadata):
        messages.warning(request, "You do not have permission to see metadata.")
    elif not filters.words:
        if not filters.sort:
            return log_page(filters), {}, None
        ordered = sorted_page(filters, PAGE_SIZE)
        return LogPage(ordered.shown, ordered.compared), {}, ordered
    elif not may_see_content(request):
        messages.warning(request, "You do not have permission to search prompts and answers.")
    else:
        try:
            with search_timeout():
                return *page_with_words(filters), None
        except SearchTooBroad:
            messages.warning(request, _TOO_BROAD)
    return LogPage(), {}, None


def requests_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page.

    Raise PermissionDenied if the user may not view it.
    """
    if not request.user.has_perm(VIEW_REQUESTS):
        raise PermissionDenied
    filters, may_see = filters_of(request.GET), may_see_content(request)
    page, hits, ordered = _page_of(request, filters)
    keys = ApiKey.objects.in_bulk({one.api_key_id for one in page.counted if one.api_key_id})
    projects = Project.objects.in_bulk({one.project_id for one in page.shown if one.project_id})
    ids = [one.public_id for one in page.shown if isinstance(one, Generation)]
    columns = chosen_columns(request)
    contents = contents_of(ids) if may_see and "words" in columns else {}
    return {
        "filters": filters,
        "slower": f"{filters.slower:.10g}" if filters.slower else "",
        "tabs": tabs_of(filters, request.GET),
        "time_column": sorting_heading("time", "Time", filters, request.GET),
        "columns": columns,
        "choices": choices().items(),
        "headings": headings(columns, filters, request.GET),
        "may_see": may_see,
        "rows": [_row(one, projects, keys, contents, hits, columns) for one in page.shown],
        "facets": _facets(filters, page.counted, keys, request.GET),
        "counted": len(page.counted),
        "pages": _page_links(filters, page, ordered, request.GET),
        "is_cut_short": page.is_cut_short,
        "conversations": _conversations(request, filters),
        "is_sorted": ordered is not None,
        "is_live": filters.before is None and filters.page == 1,
        "project_form": project_form(request, filters.project),
        "keys": offered_keys(filters.project, filters.key),
        "models": list(catalogue().models),
        "statuses": [*Status.values, UNFINISHED, REFUSED],
        "kinds": ENDPOINTS.items(),
        "spans": SPAN_NAMES.items(),
        "query": saved_query(request.GET),
        "saved": SavedFilter.objects.filter(user=int(request.user.pk or 0)),
    }


def _page_links(
    filters: LogFilters, page: LogPage, ordered: SortedPage | None, query: QueryDict
) -> list[tuple[str, str, str]]:
    """Return the links below the list: relation, query and text of each."""

    def link(relation: str, text: str, before: str, number: int) -> tuple[str, str, str]:
        changed = query.copy()
        changed.pop("page", None)
        changed["before"] = before
        if number > 1:
            changed["page"] = str(number)
        return relation, changed.urlencode(), text

    if ordered is None:
        text = "Search further back →" if page.is_cut_short else "Older →"
        return [link("next", text, page.older, 1)] if page.older else []
    links = []
    if filters.page > 1:
        links.append(link("prev", "← Back", ordered.top, filters.page - 1))
    if ordered.has_next:
        links.append(link("next", "Next →", ordered.top, filters.page + 1))
    if ordered.older is not None:
        links.append(link("", "Sort older requests", ordered.older, 1))
    return links


@permission_required(VIEW_REQUESTS, raise_exception=True)
def save_filter(request: HttpRequest) -> HttpResponse:
    """Save or delete a filter of this user, and redirect to the page."""
    query = posted_query(request)
    user_id = int(request.user.pk or 0)
    own = SavedFilter.objects.filter(user=user_id)
    if request.POST.get("delete", "").isdecimal():
        for saved in own.filter(pk=request.POST["delete"][:18]):
            log_action(request, saved, "Deleted a filter of requests.")
            saved.delete()
    elif name := request.POST.get("name", "").replace("\0", "").strip()[:60]:
        if own.exclude(name=name).count() >= _MAX_SAVED:
            messages.error(request, f"You have {_MAX_SAVED} saved filters: delete one first.")
        else:
            saved, _ = SavedFilter.objects.update_or_create(
                user_id=user_id, name=name, defaults={"query": query}
            )
            log_action(request, saved, "Saved a filter of requests.")
            messages.success(request, f"Saved {name}.")
    return HttpResponseRedirect(f"{reverse('admin:requests')}?{query}")
