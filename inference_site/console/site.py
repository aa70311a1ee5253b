"""The admin site: the theme's, with the console's own pages beside those of the models."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from unfold.sites import UnfoldAdminSite


class ConsoleSite(UnfoldAdminSite):
    """Where operators look."""

    index_title = "Usage"

    def each_context(self, request: HttpRequest) -> dict[str, Any]:
        """Return what every page of the admin is rendered with."""
        context: dict[str, Any] = super().each_context(request)
        return context
