"""Lists over HTTP: keyset paging, as every list of the API has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from django.http import QueryDict
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from inference_site.errors.api_errors import InvalidRequestError

_DEFAULT_LIMIT, _MOST = 20, 100


class PageQuery(BaseModel):
    """What ``parse_page`` reads, as the OpenAPI document shows it."""

    after: str | SkipJsonSchema[None] = Field(
        None, description="The id of the last entry of the page before."
    )
    limit: Annotated[int, Field(ge=1, le=_MOST)] = _DEFAULT_LIMIT
    order: Literal["asc", "desc"] = "asc"


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is wanted: ``limit`` entries after the one with the id ``after``."""

    after: str | None
    limit: int
    order: Literal["asc", "desc"]


def parse_page(query: QueryDict, default_order: Literal["asc", "desc"]) -> Page:
    """Return the page that a query asks for. Raise InvalidRequestError naming the parameter."""
    limit = query.get("limit", str(_DEFAULT_LIMIT))
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= _MOST:
        raise InvalidRequestError(
            f"Invalid 'limit': expected a whole number from 1 to {_MOST}.", param="limit"
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
    """Return the pairs of ``metadata[key]=value``."""
    return {
        name[len("metadata[") : -1]: str(query[name])
        for name in query
        if name.startswith("metadata[") and name.endswith("]")
    }


def list_object(
    entries: Sequence[dict[str, Any]], page: Page, id_of: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    """Return the list object. ``entries`` has one more than the limit when there are more."""
    shown = list(entries[: page.limit])
    return {
        "object": "list",
        "data": shown,
        "first_id": id_of(shown[0]) if shown else None,
        "last_id": id_of(shown[-1]) if shown else None,
        "has_more": len(entries) > page.limit,
    }
