"""Admin of vector stores: their files, and what a search would find."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Q, QuerySet, Sum
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.views.decorators.http import require_POST

from inference_site.catalogue.model_labels import model_link
from inference_site.core.admin_pages.base_admin import (
    KeysetAdmin,
    RelatedFilter,
    SinceFilter,
    log_action,
)
from inference_site.core.admin_pages.labels import may_see_content, size, status_label
from inference_site.core.errors.api_errors import ApiError
from inference_site.core.errors.exceptions import api_error
from inference_site.runs.inner_runs import NoBudget, NotPossible
from inference_site.vector_stores.kinds import EmbeddingRefused, TextTooLong, embed
from inference_site.vector_stores.models import (
    Chunk,
    IndexingStatus,
    VectorStore,
    VectorStoreFile,
)
from inference_site.vector_stores.search import Found, search

_SHOWN_FILES = 200
_MAX_QUESTION = 4_000
_TIMEOUT_S = 20.0
_REFUSALS = (EmbeddingRefused, NoBudget, NotPossible)


@admin.register(VectorStore)
class VectorStoreAdmin(KeysetAdmin):
    """The vector stores of all projects. The page of one has its files and a search."""

    list_display = (
        *("short_id", "time", "project", "name", "files_indexed", "files_waiting"),
        *("files_failed", "shown_size", "embedding_model"),
    )
    list_filter = (SinceFilter, ("project", RelatedFilter))
    list_select_related = ("project",)
    change_form_template = "vector_stores/vector_store.html"
    fields = ("public_id",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[VectorStore]:
        rows: QuerySet[VectorStore] = super().get_queryset(request)
        return rows.filter(is_deleted=False).annotate(
            indexed=Count("files", filter=Q(files__status=IndexingStatus.COMPLETED)),
            waiting=Count("files", filter=Q(files__status=IndexingStatus.IN_PROGRESS)),
            failed=Count("files", filter=Q(files__status=IndexingStatus.FAILED)),
            size=Sum("files__usage_bytes", default=0),
        )

    def get_urls(self) -> list[URLPattern]:
        """Add the search of the page."""
        view = self.admin_site.admin_view(require_POST(self.search_page))
        name = "vector_stores_vectorstore_search"
        return [path("<int:pk>/search/", view, name=name), *super().get_urls()]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show a store with its files."""
        context = dict(extra_context or {})
        if store := self.get_object(request, object_id):
            context |= self._context(request, store)
        return super().change_view(request, object_id, form_url, context)

    def _context(self, request: HttpRequest, store: Any) -> dict[str, Any]:
        entries = VectorStoreFile.objects.filter(store=store).select_related("file")
        return {
            "store": store,
            "model": model_link(store.embedding_model),
            "size": size(store.size),
            "chunks": Chunk.objects.filter(store=store).count(),
            "is_indexing": store.waiting > 0,
            "entries": [
                (entry, status_label(entry.status), size(entry.usage_bytes))
                for entry in entries.order_by("-pk")[:_SHOWN_FILES]
            ],
            "may_search": may_see_content(request),
        }

    def search_page(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Show what the store has for a question, which the model embeds for the newest key."""
        if not (self.has_view_permission(request) and may_see_content(request)):
            raise PermissionDenied
        store = get_object_or_404(self.get_queryset(request), pk=pk)
        question = request.POST.get("question", "").replace("\0", " ").strip()[:_MAX_QUESTION]
        found: list[Found] | None = None
        try:
            found = _found(store, question) if question else None
        except ApiError as exc:
            messages.error(request, exc.message)
        log_action(request, store, "Searched the vector store.")
        context = {
            **self.admin_site.each_context(request),
            **self._context(request, store),
            "question": question,
            "found": found,
            "opts": self.opts,
            "original": store,
            "title": f"Search {store}",
            "media": self.media,
        }
        return TemplateResponse(request, self.change_form_template, context)

    @admin.display(description="ID")
    def short_id(self, store: VectorStore) -> str:
        return f"{store.public_id.removeprefix('vs_')[:8]}…"

    @admin.display(description="files")
    def files_indexed(self, store: Any) -> str:
        return f"{store.indexed:,}"

    @admin.display(description="waiting")
    def files_waiting(self, store: Any) -> str:
        return f"{store.waiting:,}"

    @admin.display(description="failed")
    def files_failed(self, store: Any) -> str:
        return f"{store.failed:,}"

    @admin.display(description="size")
    def shown_size(self, store: Any) -> str:
        return size(store.size)


def _found(store: VectorStore, question: str) -> list[Found]:
    """Search, for the key that added the newest file. Raise ApiError."""
    newest = VectorStoreFile.objects.filter(store=store).order_by("-pk").first()
    if newest is None:
        return []
    try:
        (vector,) = embed(
            newest.api_key_id,
            store.embedding_model,
            [question],
            timeout_s=_TIMEOUT_S,
            is_cancelled=lambda: False,
        )
    except TextTooLong as exc:
        raise ApiError("The question is too long for the embedding model.") from exc
    except TimeoutError as exc:
        raise ApiError("The question could not be embedded in time.") from exc
    except _REFUSALS as exc:
        raise ApiError(str(exc)) from exc
    except Exception as exc:
        raise api_error(exc) from exc
    return search([store], question, vector, limit=10)
