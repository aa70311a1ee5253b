"""Fields under a second name: chat's in a response, and those of other servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from inference_site.api.payload import WireRequest
from inference_site.errors.api_errors import InvalidRequestError

RequestT = TypeVar("RequestT", bound=WireRequest)


def officially_named(
    body: RequestT,
    meant: Mapping[str, tuple[str, Any]],
    objects: Mapping[str, WireRequest] | None = None,
) -> RequestT:
    """Return the body with its second names taken to the official ones.

    ``meant`` has for each second name the path of the official field and what it is to be; None
    where nothing was sent. ``objects`` are those of a path that was not sent. Raise
    InvalidRequestError where both were sent and differ.
    """
    fields: dict[str, Any] = {}
    for name, (path, value) in meant.items():
        if value is None:
            continue
        field, _, inner = path.partition(".")
        given = fields.get(field, getattr(body, field, None))
        official = getattr(given, inner, None) if inner else given
        if official is not None and official != value:
            raise InvalidRequestError(
                f"Invalid '{name}': it differs from '{path}', which means the same.", param=name
            )
        holder = given or (objects or {}).get(field)
        fields[field] = holder.model_copy(update={inner: value}) if inner and holder else value
    named = body.model_copy(update={**dict.fromkeys(meant), **fields})
    named.model_fields_set.difference_update(meant)
    return named
