"""Read-only admin of files."""

from __future__ import annotations

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from inference_site.core.admin_pages.base_admin import KeysetAdmin, RelatedFilter, SinceFilter
from inference_site.core.admin_pages.labels import size, time_label
from inference_site.files.models import FileState, StoredFile


@admin.register(StoredFile)
class StoredFileAdmin(KeysetAdmin):
    """The files of all projects, without their content. Parts of uploads are not listed."""

    list_display = ("public_id", "time", "project", "filename", "purpose", "shown_size", "expires")
    list_filter = (SinceFilter, "purpose", ("project", RelatedFilter))
    list_select_related = ("project",)
    fields = (
        *("public_id", "project", "filename", "purpose", "content_type", "size_bytes"),
        *("created_at", "expires_at"),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[StoredFile]:
        rows: QuerySet[StoredFile] = super().get_queryset(request)
        return rows.filter(state=FileState.READY, upload=None)

    @admin.display(description="size")
    def shown_size(self, file: StoredFile) -> str:
        return size(file.size_bytes)

    @admin.display(description="expires")
    def expires(self, file: StoredFile) -> str:
        return time_label(file.expires_at)
