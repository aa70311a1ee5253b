"""``/v1/openapi.json`` and ``/docs``, the page that shows it.

The document is built once for a release and kept beside its bytecode: to build it takes as much
processor time as to import all views, and each stream of the process would stand still meanwhile.
What it is built with is imported only then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from inference_site.api.schema import documented
from inference_site.api.views import OpenView

_KEPT_IN = Path(__file__).parent / "__pycache__"
_PACKAGES = ("inference_site", "completions", "responses_api")
_LIBRARIES = ("pydantic", "drf-spectacular", "djangorestframework")
_building = threading.Lock()


class OpenApiView(OpenView):
    """``GET /v1/openapi.json``."""

    @documented(answer=dict[str, Any])
    def get(self, request: Request) -> HttpResponse:
        """Get this document."""
        return HttpResponse(document(), content_type="application/json")


def documentation(request: HttpRequest) -> HttpResponseBase:
    """Show the document with Swagger UI."""
    from drf_spectacular.views import SpectacularSwaggerSplitView

    return SpectacularSwaggerSplitView.as_view(url_name="openapi")(request)


def document(kept_in: Path = _KEPT_IN) -> bytes:
    """Return the document, encoded: as it is kept for this source, else built now and kept."""
    with _building:
        return _document(kept_in)


@cache
def _document(kept_in: Path) -> bytes:
    kept = kept_in / f"openapi-{_of_source()}.json"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    from inference_site.api.openapi import document as build

    built = build()
    with contextlib.suppress(OSError):  # An image is read-only, and has it from its build.
        kept_in.mkdir(exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_bytes(built)
        for old in kept_in.glob("openapi-*.json"):
            old.unlink(missing_ok=True)
        part.rename(kept)
    return built


def prepare_document() -> None:
    """Have the document ready for the first request; build it on a thread if it is not kept."""
    threading.Thread(target=document, name="openapi", daemon=True).start()


def _of_source() -> str:
    """Return a digest of all that the document is made of: 15 ms for the whole project."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=8)
    for library in _LIBRARIES:
        digest.update(f"{library} {version(library)}".encode())
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    for package in _PACKAGES:
        yield from sorted((settings.BASE_DIR / package).rglob("*.py"))
