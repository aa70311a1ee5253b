"""Lists that show how prompts and answers begin, to those who may see them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from inference_site.admin_pages.bubbles import may_see_content
from inference_site.admin_pages.keyset import KeysetAdmin
from inference_site.admin_pages.labels import preview


class PreviewAdmin(KeysetAdmin):
    """A list with ``previews`` after its first two columns; its rows have the texts."""

    previews: tuple[str, ...] = ("input", "output")

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        """Show previews to those who may see content."""
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
