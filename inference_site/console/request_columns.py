"""The columns of the list of requests: those there are, a person's choice, and their cells.

Each metadata key that usage is counted by has a column. The choice is a cookie of the browser.
Downloads have all columns, whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from django.conf import settings
from django.contrib.auth.decorators import permission_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import reverse
from django.utils.http import urlencode

from inference_site.console.request_filters import SORTS, LogFilters, posted_query
from inference_site.console.tiles import VIEW_REQUESTS
from inference_site.core.admin_pages.labels import milliseconds, money
from inference_site.core.site_settings.models import site_settings
from inference_site.runs.models import Generation
from inference_site.runs.request_log.models import Refusal

_COOKIE = "request_columns"
_COOKIE_S = 365 * 86_400
_LONGEST_COOKIE = 2_000
_NONE = "—"
LoggedRequest = Generation | Refusal


class Choice(NamedTuple):
    """A column to choose; ``cell`` returns the text of an accepted request, None for no text.

    The template writes the columns without ``cell``.
    """

    title: str
    cell: Callable[[Generation], str | None] | None = None
    is_number: bool = False
    is_default: bool = False


Columns = Mapping[str, Choice]

_CHOICES = {
    "owner": Choice("Project, key", is_default=True),
    "words": Choice("Prompt, answer", is_default=True),
    "user": Choice("End user", lambda row: row.end_user),
    "tags": Choice("Tags", lambda row: ", ".join(row.tags)),
    "class": Choice("Class", lambda row: row.get_service_class_display()),
    "worker": Choice("Worker", lambda row: row.worker),
    "finish": Choice("Finish reason", lambda row: row.finish_reason),
    "admission": Choice("Admission", lambda row: milliseconds(row.admission_ms), True),
    "duration": Choice("Duration", lambda row: milliseconds(row.duration_ms), True, True),
    "ttft": Choice("First token", lambda row: milliseconds(row.ttft_ms), True, True),
    "queue": Choice("Queue", lambda row: milliseconds(row.queue_ms), True, True),
    "rate": Choice(
        "Tokens/s", lambda row: f"{row.tokens_per_s:.0f}" if row.tokens_per_s else None, True
    ),
    "tokens": Choice(
        "Tokens in / out", lambda row: f"{row.input_tokens:,} / {row.output_tokens:,}", True, True
    ),
    "cost": Choice("Cost", lambda row: money(row.cost) if row.cost else None, True, True),
}
"""In the order of the table, after time, status, endpoint and model. The headings of those in
``SORTS`` sort the list."""
_TAG = "tag:"


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of the table; ``query`` sorts by it, or back if it is the order already, or ""."""

    title: str
    query: str = ""
    order: str = "none"
    is_number: bool = True


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of one request."""

    title: str
    text: str
    is_number: bool

    @property
    def is_empty(self) -> bool:
        """Whether the request has no such value."""
        return self.text == _NONE


def choices() -> dict[str, Choice]:
    """Return the columns that there are by name: one for each metadata key of usage after Tags."""
    keys = site_settings().usage_tags
    tags = {f"{_TAG}{key}": Choice(key, partial(_value_of_tag, f"{key}=")) for key in keys}
    before = tuple(_CHOICES).index("tags") + 1
    fixed = list(_CHOICES.items())
    return dict([*fixed[:before], *tags.items(), *fixed[before:]])


def _value_of_tag(prefix: str, row: Generation) -> str | None:
    return next((tag.removeprefix(prefix) for tag in row.tags if tag.startswith(prefix)), None)


def chosen_columns(request: HttpRequest) -> dict[str, Choice]:
    """Return the columns that the person has chosen by name, in the order of the table."""
    kept = set(QueryDict(request.COOKIES.get(_COOKIE, "")[:_LONGEST_COOKIE]).getlist("column"))
    return {
        name: choice
        for name, choice in choices().items()
        if (name in kept if kept else choice.is_default)
    }


def headings(columns: Columns, filters: LogFilters, query: QueryDict) -> list[Heading]:
    """Return the headings of those of these columns that have cells."""
    return [
        sorting_heading(name, choice.title, filters, query)
        if name in SORTS
        else Heading(choice.title, is_number=choice.is_number)
        for name, choice in columns.items()
        if choice.cell is not None
    ]


def sorting_heading(name: str, title: str, filters: LogFilters, query: QueryDict) -> Heading:
    """Return a heading: the first choice sorts the largest values first, the second the smallest.

    Lists are by time, newest first, unless another order is chosen.
    """
    order = {f"-{name}": "descending", name: "ascending"}.get(filters.sort, "none")
    changed = query.copy()
    for dropped in ("before", "page", "sort"):
        changed.pop(dropped, None)
    if name == "time":
        order = order if filters.sort else "descending"
        if order == "descending":
            changed["sort"] = "time"
    else:
        changed["sort"] = name if order == "descending" else f"-{name}"
    return Heading(title, changed.urlencode(), order)


def cells_of(one: LoggedRequest, columns: Columns) -> list[Cell]:
    """Return the cells of a request in these columns; a refused one has a duration only."""
    cells = []
    for name, choice in columns.items():
        if choice.cell is None:
            continue
        text = None
        if isinstance(one, Generation):
            text = choice.cell(one)
        elif name == "duration":
            text = milliseconds(one.duration_ms)
        cells.append(Cell(choice.title, text or _NONE, choice.is_number))
    return cells


@permission_required(VIEW_REQUESTS, raise_exception=True)
def choose_columns(request: HttpRequest) -> HttpResponse:
    """Keep the columns that a person has chosen, and return to the list; none of them: defaults."""
    page = reverse("admin:requests")
    answer = HttpResponseRedirect(f"{page}?{posted_query(request)}")
    chosen = request.POST.getlist("column")
    names = [name for name in choices() if name in chosen]
    if not names:
        answer.delete_cookie(_COOKIE, page)
        return answer
    answer.set_cookie(
        _COOKIE,
        urlencode([("column", name) for name in names]),
        max_age=_COOKIE_S,
        path=page,
        secure=settings.SESSION_COOKIE_SECURE,
        httponly=True,
        samesite="Lax",
    )
    return answer
