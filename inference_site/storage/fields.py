"""A JSON field for the content of requests and answers."""

from __future__ import annotations

from typing import Any

import orjson
from django.db import models


class ContentField(models.JSONField):
    """A JSON field whose content all of the site can store, read and encode again.

    PostgreSQL cannot store NUL in JSON: it is replaced by U+FFFD. And it writes a float such as
    1e30 as a whole number of 31 digits, which Python's decoder makes an integer that orjson does
    not encode: so orjson decodes too, to whom such a number is a float, as in a request's body.
    """

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return the value with NUL replaced, prepared for the database."""
        return super().get_db_prep_value(storable(value), connection, prepared)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return the decoded value; integers of more than 64 bits are floats."""
        return orjson.loads(value) if isinstance(value, str) else value

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
