"""``/v1/openapi.json``, and ``/docs``, which shows it with Swagger UI.

``manage.py openapi`` builds the document and stores it beside the bytecode, once per release:
images have it. Where it is missing, the first request runs that command: building it here would
stall every stream of the process for seconds, and keep 10 MiB of libraries that nothing else uses.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
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

_FOLDER = Path(__file__).parent / "__pycache__"
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

    view = SpectacularSwaggerSplitView.as_view(
        url_name="openapi", template_name="console/docs.html"
    )
    return view(request)


@cache
def document() -> bytes:
    """Return the encoded document: the stored one of this source, or what the command prints."""
    with _lock:
        try:
            return stored_file().read_bytes()
        except FileNotFoundError:
            command = [sys.executable, str(settings.BASE_DIR / "manage.py"), "openapi"]
            return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def stored_file() -> Path:
    """Return where the document of this source is stored; it takes 15 ms."""
    # The digest is of everything that the document depends on.
    digest = hashlib.blake2b(sys.version.encode(), digest_size=8)
    for library in _LIBRARIES:
        digest.update(f"{library} {version(library)}".encode())
    api_apps = [config.name for config in apps.get_app_configs() if hasattr(config, "kinds")]
    for package in ("inference_site", *api_apps):
        for path in sorted((settings.BASE_DIR / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return _FOLDER / f"openapi-{digest.hexdigest()}.json"


def store(built: bytes) -> None:
    """Store a built document instead of those of older sources."""
    file = stored_file()
    with contextlib.suppress(OSError):  # A folder that is read-only.
        _FOLDER.mkdir(exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(built)
        for old in _FOLDER.glob("openapi-*.json"):
            old.unlink(missing_ok=True)
        part.rename(file)
