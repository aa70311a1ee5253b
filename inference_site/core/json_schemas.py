"""Validation by schemas that clients or other servers have written."""

from __future__ import annotations

from typing import Any


def closed_validator(schema: Any) -> Any:
    """Return a validator that fetches nothing and whose patterns take linear time.

    Raise ``jsonschema_rs.ValidationError`` for what is no schema, and ``ReferencingError`` for a
    reference to another document.
    """
    import jsonschema_rs  # Most workers never validate by a schema.

    return jsonschema_rs.validator_for(
        schema, pattern_options=jsonschema_rs.RegexOptions(), retriever=_refuse_reference
    )


def _refuse_reference(uri: str) -> Any:
    raise ValueError(f"{uri} is elsewhere")
