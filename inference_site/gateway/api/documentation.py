"""``/v1/openapi.json``, and ``/docs``, which shows it with Swagger UI.

The document is built once per release and cached beside the bytecode. Building it takes as much
processor time as importing all views and would stall every stream of the process, so the builder
is imported only if there is no cached document.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import OpenView

_CACHE_DIR = Path(__file__).parent / "__pycache__"
_LIBRARIES = ("pydantic", "drf-spectacular", "djangorestframework")
_lock = threading.Lock()


class OpenApiView(OpenView):
    """``GET /v1/openapi.json``."""

    @documented(answer=dict[str, Any])
    def get(self, request: Request) -> HttpResponse:
        """Get this document."""
        return HttpResponse(document(), content_type="application/json")


def documentation(request: HttpRequest) -> HttpResponseBase:
    """Show the document with Swagger UI; imported here, since web processes rarely need it."""
    from drf_spectacular.views import SpectacularSwaggerSplitView

    return SpectacularSwaggerSplitView.as_view(url_name="openapi")(request)


def document(cache_dir: Path = _CACHE_DIR) -> bytes:
    """Return the encoded document: the cached one of this source, or a new one, which is cached."""
    with _lock:
        return _document(cache_dir)


@cache
def _document(cache_dir: Path) -> bytes:
    cached = cache_dir / f"openapi-{_source_digest()}.json"
    with contextlib.suppress(OSError):
        return cached.read_bytes()
    from inference_site.gateway.api.openapi import document as build

    built = build()
    with contextlib.suppress(
        OSError
    ):  # Images are read-only; theirs is cached when they are built.
        cache_dir.mkdir(exist_ok=True)
        part = cached.with_suffix(f".{os.getpid()}")
        part.write_bytes(built)
        for old in cache_dir.glob("openapi-*.json"):
            old.unlink(missing_ok=True)
        part.rename(cached)
    return built


def prepare_document() -> None:
    """Load or build the document on a thread, so that the first request does not wait for it."""
    threading.Thread(target=document, name="openapi", daemon=True).start()


def _source_digest() -> str:
    """Return a digest of everything that the document depends on; it takes 15 ms."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=8)
    for library in _LIBRARIES:
        digest.update(f"{library} {version(library)}".encode())
    api_apps = [config.name for config in apps.get_app_configs() if hasattr(config, "kinds")]
    for package in ("inference_site", *api_apps):
        for path in sorted((settings.BASE_DIR / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
