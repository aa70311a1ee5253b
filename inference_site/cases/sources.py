"""Saving stored answers as cases, from their own pages and lists in the admin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.template.defaultfilters import pluralize
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.views.decorators.http import require_POST

from inference_site.cases.models import CaseSet, SavedAnswer
from inference_site.core.admin_pages.base_admin import id_of
from inference_site.core.admin_pages.labels import may_see_content
from inference_site.core.errors.api_errors import ApiError, ConflictError
from inference_site.core.storage.fields import replace_nul
from inference_site.gateway.feedback_admin import RatedAdmin

CHANGE = "cases.change_caseset"
OF_CLIENT = frozenset(
    {
        *("background", "stream", "stream_options", "store", "service_tier", "user", "metadata"),
        *("safety_identifier", "previous_response_id", "conversation", "prompt_cache_key"),
    }
)
"""Fields of a request about its client, its transport and its conversation: a case has none."""


def may_save(request: HttpRequest) -> bool:
    """Whether the user may save and run cases."""
    return may_see_content(request) and request.user.has_perm(CHANGE)


class CaseSourceAdmin(RatedAdmin):
    """Admin of stored answers that can be saved as cases of their endpoint."""

    case_endpoint: ClassVar[str]
    change_list_template = "cases/answers.html"

    def saved_answer(self, stored: Any) -> SavedAnswer:
        """Return what is saved of a stored answer."""
        raise NotImplementedError

    def get_urls(self) -> list[URLPattern]:
        """Add the addresses of the two forms."""
        view, name = self.admin_site.admin_view, self._page_prefix
        own = [
            path("<int:pk>/case/", view(require_POST(self.save_case)), name=f"{name}_case"),
            path("cases/", view(require_POST(self.save_listed)), name=f"{name}_cases"),
        ]
        return [*own, *super().get_urls()]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> TemplateResponse:
        """Offer to save what the list shows."""
        action = reverse(f"admin:{self._page_prefix}_cases")
        offered = {
            "may_see": may_see_content(request),
            "may_save_cases": may_save(request),
            "cases_action": action,
        }
        context = {**(extra_context or {}), **offered}
        return super().changelist_view(request, context)

    def case_context(self, request: HttpRequest, stored: Any) -> dict[str, Any]:
        """Return what the form on an answer's page shows."""
        sets = CaseSet.objects.filter(project=stored.project_id, endpoint=self.case_endpoint)
        return {
            "may_save_cases": may_save(request),
            "case_sets": sets.order_by("name"),
            "case_action": reverse(f"admin:{self._page_prefix}_case", args=[stored.pk]),
        }

    def save_case(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Save one answer."""
        stored: Any = get_object_or_404(self.model, pk=pk)
        page = reverse(f"admin:{self._page_prefix}_change", args=[pk])
        return self._save(request, [stored], page)

    def save_listed(self, request: HttpRequest) -> HttpResponse:
        """Save the answers that the page of the list showed, oldest first.

        The query of the address is that of the list, which may have other answers by now.
        """
        shown = map(id_of, request.POST.getlist("shown")[: self.list_per_page])
        rows = self.get_queryset(request).filter(pk__in=list(filter(None, shown))).order_by("pk")
        page = reverse(f"admin:{self._page_prefix}_changelist")
        query = request.META.get("QUERY_STRING", "")
        return self._save(request, list(rows), f"{page}?{query}" if query else page)

    def _save(self, request: HttpRequest, rows: Sequence[Any], page: str) -> HttpResponse:
        if not (self.has_view_permission(request) and may_save(request)):
            raise PermissionDenied
        name = str(replace_nul(request.POST.get("set", "").strip()))[:100]
        try:
            if not name:
                raise ConflictError("Name a set.")
            if len({row.project_id for row in rows}) > 1:
                raise ConflictError("A set belongs to one project: filter the list by a project.")
            if not rows:
                raise ConflictError("There is nothing to save.")
            fields = {"endpoint": self.case_endpoint, "created_by": request.user}
            case_set, is_new = CaseSet.objects.get_or_create(
                project_id=rows[0].project_id, name=name, defaults=fields
            )
            if case_set.endpoint != self.case_endpoint:
                raise ConflictError(f"The cases of “{name}” are for {case_set.endpoint}.")
            if is_new:
                self.log_addition(request, case_set, "Made by saving answers.")
            count = case_set.add(self.saved_answer(row) for row in rows)
            self.log_change(request, case_set, f"Saved {count} cases.")
        except ApiError as exc:
            messages.error(request, exc.message)
            return HttpResponseRedirect(page)
        saved = f"Saved {count} case{pluralize(count)}."
        if known := len(rows) - count:
            saved += f" The set had {known} of the answers already."
        messages.success(request, saved)
        return HttpResponseRedirect(reverse("admin:cases_caseset_change", args=[case_set.pk]))
