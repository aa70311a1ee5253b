"""Keyset paging of the API's lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from django.http import QueryDict
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from inference_site.core.errors.api_errors import InvalidRequestError

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


class PageQuery(BaseModel):
    """The query parameters of ``parse_page``, for the OpenAPI document."""

    after: str | SkipJsonSchema[None] = Field(
        None, description="The id of the last entry of the previous page."
    )
    limit: Annotated[int, Field(ge=1, le=_MAX_LIMIT)] = _DEFAULT_LIMIT
    order: Literal["asc", "desc"] = "asc"


@dataclass(frozen=True, slots=True)
class Page:
    """A requested part of a list: ``limit`` entries after the entry with the id ``after``."""

    after: str | None
    limit: int
    order: Literal["asc", "desc"]


def parse_page(query: QueryDict, default_order: Literal["asc", "desc"]) -> Page:
    """Return the requested page. Raise InvalidRequestError for an invalid parameter."""
    limit = query.get("limit", str(_DEFAULT_LIMIT))
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= _MAX_LIMIT:
        raise InvalidRequestError(
            f"Invalid 'limit': expected a whole number from 1 to {_MAX_LIMIT}.", param="limit"
        )
    order = query.get("order", default_order)
    if order not in ("asc", "desc"):
        raise InvalidRequestError(
            f"Invalid value: {order[:100]!r}. Supported values are: 'asc' and 'desc'.",
            param="order",
            code="invalid_value",
        )
    return Page(query.get("after") or None, int(limit), "asc" if order == "asc" else "desc")


def parse_metadata(query: QueryDict) -> dict[str, str]:
    """Return the metadata filter from the parameters ``metadata[key]=value``."""
    return {
        name[len("metadata[") : -1]: str(query[name])
        for name in query
        if name.startswith("metadata[") and name.endswith("]")
    }


def list_object(
    entries: Sequence[dict[str, Any]], page: Page, id_of: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    """Return the list object. Pass one entry more than the limit if there is another page."""
    shown = list(entries[: page.limit])
    return {
        "object": "list",
        "data": shown,
        "first_id": id_of(shown[0]) if shown else None,
        "last_id": id_of(shown[-1]) if shown else None,
        "has_more": len(entries) > page.limit,
    }
