"""Feedback in the admin of stored answers: a filter of the list, a form on the answer's page."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST

from inference_site.core.admin_pages.base_admin import PreviewAdmin
from inference_site.core.admin_pages.labels import may_see_content, status_label
from inference_site.core.errors.api_errors import ApiError
from inference_site.gateway.feedback import (
    CLIENTS,
    LONGEST_NOTE,
    Rated,
    Rating,
    give,
    staff_author,
    withdraw,
)


class RatingFilter(admin.SimpleListFilter):
    """Filter by the newest rating of an answer."""

    title, parameter_name = "feedback", "rating"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        choices = [(value, str(label).title()) for value, label in Rating.choices]
        return [("any", "Any feedback"), *choices]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value() or ""
        if value == "any":
            return queryset.exclude(rating="")
        return queryset.filter(rating=value) if value in Rating else queryset


class RatedAdmin(PreviewAdmin):
    """Admin of stored answers on which users who may see content give feedback."""

    def get_urls(self) -> list[URLPattern]:
        """Add the form's address."""
        view = self.admin_site.admin_view(require_POST(self.feedback_view))
        name = f"{self._page_prefix}_feedback"
        return [path("<int:pk>/feedback/", view, name=name), *super().get_urls()]

    @property
    def _page_prefix(self) -> str:
        """How the names of this model's pages begin, as Django names them."""
        return f"{self.opts.app_label}_{self.opts.model_name}"

    def feedback_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Store or withdraw the feedback of this user."""
        if not (self.has_view_permission(request) and may_see_content(request)):
            raise PermissionDenied
        answer = get_object_or_404(self.model, pk=pk)
        rating, note = request.POST.get("rating", ""), request.POST.get("note", "")
        author = staff_author(request.user)
        try:
            if rating in Rating.values:
                give(answer, author, Rating(rating), note[:LONGEST_NOTE])
                self.log_change(request, answer, f"Rated: {Rating(rating).label}.")
            elif rating:
                messages.error(request, "There is no such rating.")
            elif withdraw(answer, author):
                self.log_change(request, answer, "Withdrew their rating.")
        except ApiError as error:
            messages.error(request, error.message)
        return HttpResponseRedirect(reverse(f"admin:{self._page_prefix}_change", args=[pk]))

    def feedback_context(self, request: HttpRequest, answer: Rated) -> dict[str, Any]:
        """Return what the form and the list of feedback show."""
        author = staff_author(request.user)
        shown = [
            {
                "who": "clients" if one["author"] == CLIENTS else one["author"].partition(":")[2],
                "rating": status_label(Rating(one["rating"]).label),
                "note": one["note"],
                "at": dt.datetime.fromtimestamp(one["created_at"], dt.UTC),
            }
            for one in answer.feedback
        ]
        own = next((one for one in answer.feedback if one["author"] == author), None)
        return {
            "feedback": shown,
            "own_feedback": own,
            "feedback_action": reverse(f"admin:{self._page_prefix}_feedback", args=[answer.pk]),
            "longest_note": LONGEST_NOTE,
        }

    @admin.display(description="feedback")
    def shown_rating(self, answer: Rated) -> SafeString | str:
        return status_label(Rating(answer.rating).label) if answer.rating else "—"
