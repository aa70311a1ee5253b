"""``manage.py openapi``: print the OpenAPI document; the build of images calls it."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from inference_site.gateway.api.documentation import document


class Command(BaseCommand):
    """Prints the answer of ``GET /v1/openapi.json``."""

    help = "Print the OpenAPI document of the API."
    requires_system_checks: list[str] = []  # They would import the pages of the console.

    def handle(self, *_: Any, **__: Any) -> None:
        self.stdout.write(document().decode())
