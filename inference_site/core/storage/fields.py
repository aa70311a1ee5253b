"""The model field for the content of requests and answers."""

from __future__ import annotations

from typing import Any

import orjson
from django.db import models


class ContentField(models.JSONField):
    """A JSON field for content of clients, also with values that PostgreSQL or orjson refuse.

    PostgreSQL cannot store NUL in JSON, so it is replaced by U+FFFD. PostgreSQL writes a float such
    as 1e30 as an integer of 31 digits. Python's decoder would return an integer that orjson cannot
    encode; orjson decodes it as a float, as it does in the body of a request.
    """

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return the value with NUL replaced, prepared for the database."""
        return super().get_db_prep_value(replace_nul(value), connection, prepared)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return the decoded value; integers of more than 64 bits are floats."""
        return orjson.loads(value) if isinstance(value, str) else value

    def deconstruct(self) -> Any:
        """Return the definition for migrations: a plain ``JSONField``."""
        name, _, arguments, named = super().deconstruct()
        return name, "django.db.models.JSONField", arguments, named


def replace_nul(content: Any) -> Any:
    """Return the content with every NUL replaced by U+FFFD."""
    match content:
        case str():
            return content.replace("\0", "\ufffd")
        case list():
            return [replace_nul(entry) for entry in content]
        case dict():
            return {replace_nul(key): replace_nul(value) for key, value in content.items()}
        case _:
            return content
