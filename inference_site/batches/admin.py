"""Admin of batches: their progress, cancel, results, and the failed lines once more."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.http import require_GET, require_POST

from inference_site.accounts.keys import caller_of_key
from inference_site.batches.models import OPENAI, Batch, BatchLine, BatchStatus
from inference_site.batches.results import store_failed_requests
from inference_site.batches.views import BatchEstimate, accept_batch, estimate_of
from inference_site.catalogue.model_labels import cost_label, model_link
from inference_site.core.admin_pages.base_admin import (
    KeyFilter,
    KeysetAdmin,
    RelatedFilter,
    SinceFilter,
    log_action,
)
from inference_site.core.admin_pages.labels import duration, may_see_content, status_label
from inference_site.core.errors.api_errors import ApiError
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.files import storage
from inference_site.files.models import StoredFile
from inference_site.runs.queue import new_id

_CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
_RESULTS = {"output": "output_file_id", "errors": "error_file_id"}


@admin.register(Batch)
class BatchAdmin(KeysetAdmin):
    """The batches of all projects. The page of one shows its progress and refreshes itself."""

    list_display = (
        *("short_id", "time", "project", "shown_model", "endpoint", "shown_status"),
        *("progress", "shown_failed", "shown_cost"),
    )
    list_filter = ("status", SinceFilter, ("project", RelatedFilter), KeyFilter)
    list_select_related = ("project", "api_key")
    change_form_template = "batches/batch.html"
    fields = ("public_id",)

    def get_urls(self) -> list[URLPattern]:
        """Add the buttons of the page."""
        view = self.admin_site.admin_view
        own = [
            path("<int:pk>/cancel/", view(require_POST(self.cancel)), name="batches_batch_cancel"),
            path("<int:pk>/again/", view(require_POST(self.again)), name="batches_batch_again"),
            path(
                "<int:pk>/results/<str:kind>/",
                view(require_GET(self.results)),
                name="batches_batch_results",
            ),
        ]
        return [*own, *super().get_urls()]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show what has become of the lines."""
        context = dict(extra_context or {})
        if batch := self.get_object(request, object_id):
            failures = batch.failures
            if not batch.has_ended:
                failures = BatchLine.objects.filter(batch=batch).failures()
            may_change = self._may_change(request)
            context |= {
                "batch": batch,
                "status_badge": status_label(batch.status),
                "model": model_link(batch.model) if batch.model else "—",
                "ended": batch.completed + batch.failed,
                "estimate": _shown_estimate(batch, estimate_of(batch)) if batch.total else None,
                "cost": cost_label(batch.model, batch.cost),
                "failures": sorted(failures.items(), key=lambda one: -one[1]),
                "times": [
                    (status.label, dt.datetime.fromtimestamp(at, dt.UTC))
                    for status in BatchStatus
                    if (at := batch.time_of(status)) is not None
                ],
                "may_cancel": may_change and batch.status in _CANCELLABLE,
                "may_repeat": may_change
                and batch.dialect == OPENAI
                and batch.has_ended
                and bool(batch.error_file_id),
                "may_download": may_see_content(request) and batch.has_ended,
            }
        return super().change_view(request, object_id, form_url, context)

    def _may_change(self, request: HttpRequest) -> bool:
        return request.user.has_perm("batches.change_batch")

    def cancel(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Cancel a batch."""
        batch = self._changeable(request, pk)
        if batch.status in _CANCELLABLE:
            Batch.objects.cancel(batch)
            log_action(request, batch, "Cancelled the batch.")
        else:
            messages.info(request, "Nothing was cancelled: no line of the batch begins any more.")
        return self._page_of(batch)

    def again(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Make a new batch of the lines that failed, with the key of the old one."""
        batch = self._changeable(request, pk)
        try:
            caller = caller_of_key(batch.api_key_id)
            if caller is None:
                raise ApiError("the key of the batch is not valid any more.")
            made = accept_batch(
                caller,
                Batch(
                    public_id=new_id("batch_"),
                    dialect=batch.dialect,
                    endpoint=batch.endpoint,
                    input_file_id=store_failed_requests(batch),
                    output_lifetime_s=batch.output_lifetime_s,
                    metadata=batch.metadata,
                    window_s=batch.window_s,
                ),
            )
        except ApiError as exc:
            messages.error(request, f"The failed lines cannot be run again: {exc.message}")
            return self._page_of(batch)
        log_action(request, made, f"Runs the failed lines of {batch} again.")
        messages.success(request, f"The failed lines of {batch} run again.")
        return self._page_of(made)

    def results(self, request: HttpRequest, pk: int, kind: str) -> HttpResponseBase:
        """Send a file of the results to a user who may see content."""
        if not (self.has_view_permission(request) and may_see_content(request)):
            raise PermissionDenied
        with release_connection_after():
            batch = get_object_or_404(Batch, pk=pk)
            file_id = getattr(batch, _RESULTS.get(kind, ""), None) if kind in _RESULTS else None
            ready = StoredFile.objects.readable(batch.project_id)
            file = get_object_or_404(ready, public_id=file_id)
            log_action(request, batch, f"Downloaded the results ({kind}).")
        return StreamingHttpResponse(
            storage.read(file),
            content_type="application/jsonl",
            headers={
                "Content-Length": str(file.size_bytes),
                "Content-Disposition": f'attachment; filename="{file.filename}"',
            },
        )

    def _changeable(self, request: HttpRequest, pk: int) -> Batch:
        if not self._may_change(request):
            raise PermissionDenied
        return get_object_or_404(Batch, pk=pk)

    def _page_of(self, batch: Batch) -> HttpResponse:
        return HttpResponseRedirect(reverse("admin:batches_batch_change", args=[batch.pk]))

    @admin.display(description="ID")
    def short_id(self, batch: Batch) -> str:
        return f"{batch.public_id.rpartition('_')[2][:8]}…"

    @admin.display(description="model")
    def shown_model(self, batch: Batch) -> str:
        return batch.model or "—"

    @admin.display(description="status")
    def shown_status(self, batch: Batch) -> SafeString:
        return status_label(batch.status)

    @admin.display(description="lines")
    def progress(self, batch: Batch) -> SafeString:
        ended = batch.completed + batch.failed
        return format_html('<span class="nowrap">{} of {}</span>', f"{ended:,}", f"{batch.total:,}")

    @admin.display(description="failed")
    def shown_failed(self, batch: Batch) -> str:
        return f"{batch.failed:,}"

    @admin.display(description="cost")
    def shown_cost(self, batch: Batch) -> str:
        return cost_label(batch.model, batch.cost)


def _shown_estimate(batch: Batch, estimate: BatchEstimate) -> dict[str, str]:
    """Return the estimated cost of a batch, and when it will end."""
    at = estimate.expected_at
    shown = "not known yet"
    if at is not None:
        left_s = at - timezone.now().timestamp()
        shown = f"in {duration(left_s)}"
    return {"cost": cost_label(batch.model, Decimal(estimate.cost)), "end": shown}
