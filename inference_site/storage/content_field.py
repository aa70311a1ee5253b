"""Content of requests and answers, as PostgreSQL can keep it."""

from __future__ import annotations

from typing import Any

from django.db import models


class ContentField(models.JSONField):
    """JSON with U+FFFD for NUL, which PostgreSQL's JSON cannot hold."""

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return the value as the database takes it."""
        return super().get_db_prep_value(storable(value), connection, prepared)

    def deconstruct(self) -> Any:
        """Return what migrations write; to them it is any JSON field."""
        name, _, arguments, named = super().deconstruct()
        return name, "django.db.models.JSONField", arguments, named


def storable(content: Any) -> Any:
    """Return the content with U+FFFD for NUL, which PostgreSQL's JSON cannot hold."""
    match content:
        case str():
            return content.replace("\0", "\ufffd")
        case list():
            return [storable(entry) for entry in content]
        case dict():
            return {storable(key): storable(value) for key, value in content.items()}
        case _:
            return content
