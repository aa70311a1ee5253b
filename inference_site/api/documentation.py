"""``/v1/openapi.json`` and ``/docs``, the page that shows it.

What both are made with is imported at the first request: drf-spectacular takes as long to import as
all views together, and few processes are ever asked.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from inference_site.api.schema import documented
from inference_site.api.views import OpenView


class OpenApiView(OpenView):
    """``GET /v1/openapi.json``."""

    @documented(answer=dict[str, Any])
    def get(self, request: Request) -> HttpResponse:
        """Get this document."""
        from inference_site.api.openapi import document

        return HttpResponse(document(), content_type="application/json")


def documentation(request: HttpRequest) -> HttpResponseBase:
    """Show the document with Swagger UI."""
    from drf_spectacular.views import SpectacularSwaggerSplitView

    return SpectacularSwaggerSplitView.as_view(url_name="openapi")(request)
