"""A JSON field for the content of requests and answers."""

from __future__ import annotations

from typing import Any

from django.db import models


class ContentField(models.JSONField):
    """A JSON field that replaces NUL, which PostgreSQL cannot store in JSON, by U+FFFD."""

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return the value with NUL replaced, prepared for the database."""
        return super().get_db_prep_value(storable(value), connection, prepared)

    def deconstruct(self) -> Any:
        """Return the definition for migrations: a plain ``JSONField``."""
        name, _, arguments, named = super().deconstruct()
        return name, "django.db.models.JSONField", arguments, named


def storable(content: Any) -> Any:
    """Return the content with every NUL replaced by U+FFFD."""
    match content:
        case str():
            return content.replace("\0", "\ufffd")
        case list():
            return [storable(entry) for entry in content]
        case dict():
            return {storable(key): storable(value) for key, value in content.items()}
        case _:
            return content
