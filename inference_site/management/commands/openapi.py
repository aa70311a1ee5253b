"""``manage.py openapi``: build, store and print the OpenAPI document.

The build of images runs it, and a web process that finds no stored document.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from inference_site.gateway.api.documentation import store
from inference_site.gateway.api.openapi import document


class Command(BaseCommand):
    """Builds the answer of ``GET /v1/openapi.json``."""

    help = "Build the OpenAPI document of the API, store it for web processes, and print it."
    requires_system_checks: list[str] = []  # They would import the pages of the console.

    def handle(self, *_: Any, **__: Any) -> None:
        built = document()
        store(built)
        self.stdout.write(built.decode())
