"""``manage.py openapi``: print the OpenAPI document; images have it built by this."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from inference_site.api.documentation import document


class Command(BaseCommand):
    """Writes what ``GET /v1/openapi.json`` answers."""

    help = "Print the OpenAPI document of the API."
    requires_system_checks: list[str] = []  # They would import the pages of the console.

    def handle(self, *_: Any, **__: Any) -> None:
        self.stdout.write(document().decode())
