"""Keyset paging of the API's lists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import redis
from django.db.models import QuerySet
from django.http import QueryDict
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.redis import site_client

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_KEPT_S, _KEPT = 3600, 1000
"""How long positions of a project's deleted entries are kept, and of how many entries."""
_keeping = OutageLog(logging.getLogger(__name__), "positions of deleted entries are not kept")
EntryT = TypeVar("EntryT")


class PageQuery(BaseModel):
    """The query parameters of ``parse_page``, for the OpenAPI document."""

    after: str | SkipJsonSchema[None] = Field(
        None, description="The id of the last entry of the previous page."
    )
    limit: Annotated[int, Field(ge=1, le=_MAX_LIMIT)] = _DEFAULT_LIMIT
    order: Literal["asc", "desc"] = "asc"


@dataclass(frozen=True, slots=True)
class Page:
    """A requested part of a list: ``limit`` entries after the entry with the id ``after``.

    The entries before an entry are those after it in the opposite order. A page ``is_reversed`` if
    they were asked for: ``order`` is the opposite one, and ``list_object`` turns the page around.
    """

    after: str | None
    limit: int
    order: Literal["asc", "desc"]
    is_reversed: bool = False

    def no_entry(self, kind: str) -> InvalidRequestError:
        """Return the error for a cursor that is no entry of the list; ``kind`` is its name."""
        param = "before" if self.is_reversed else "after"
        return InvalidRequestError(f"Invalid '{param}': there is no such {kind}.", param=param)

    def entries_of(
        self, entries: Sequence[EntryT], id_of: Callable[[EntryT], str], kind: str
    ) -> Sequence[EntryT]:
        """Return those of a whole list after the entry ``after``, and one more for ``list_object``.

        Raise InvalidRequestError if it is not among them; ``kind`` is its name.
        """
        first = 0
        if self.after is not None:
            ids = [id_of(entry) for entry in entries]
            if self.after not in ids:
                raise self.no_entry(kind)
            first = ids.index(self.after) + 1
        return entries[first : first + self.limit + 1]

    def rows_of(self, rows: QuerySet[Any], key: str, last: Any) -> QuerySet[Any]:
        """Return the rows after the key ``last``, and one more for ``list_object``.

        ``key`` is a unique column, which orders the list; ``last`` is its value in the row
        ``after``, None for the first page.
        """
        is_ascending = self.order == "asc"
        if last is not None:
            rows = rows.filter(**{f"{key}__{'gt' if is_ascending else 'lt'}": last})
        return rows.order_by(key if is_ascending else f"-{key}")[: self.limit + 1]

    def rows_by_age(
        self, rows: QuerySet[Any], kind: str, project_id: int, path: str
    ) -> QuerySet[Any]:
        """Return the same for rows whose primary keys grow with time, by their public ids.

        Raise InvalidRequestError if the entry ``after`` neither is nor was among them; ``kind`` is
        its name, and ``path`` that of the list.
        """
        return self.rows_of(rows, "pk", self.position(rows, kind, project_id, path))

    def position(
        self,
        rows: QuerySet[Any],
        kind: str,
        project_id: int,
        path: str,
        *,
        key: str = "pk",
        id_field: str = "public_id",
    ) -> Any:
        """Return ``last`` of ``rows_of``: the value of ``key`` in the row whose id is ``after``.

        Of a deleted entry it is the position that was kept. Raise InvalidRequestError if the entry
        ``after`` neither is nor was among the rows; ``kind`` and ``path`` as for ``rows_by_age``.
        """
        if self.after is None:
            return None
        found = rows.filter(**{id_field: self.after}).values_list(key, flat=True).first()
        return self.deleted_position(kind, project_id, path) if found is None else found

    def deleted_position(self, kind: str, project_id: int, path: str) -> str:
        """Return the position that the deleted entry ``after`` had. See ``keep_position``.

        Raise InvalidRequestError if none is known; ``kind`` is its name.
        """
        kept = kept_position(project_id, path, str(self.after))
        if kept is None:
            raise self.no_entry(kind)
        return kept


def keep_position(project_id: int, path: str, entry_id: str, position: object) -> None:
    """Keep the position of an entry that a client deletes from the list at this path of the API.

    A client that deletes what it lists names a deleted entry as the cursor of the next page.
    ``position`` is what the list is ordered by. While Redis is down nothing is kept.
    """
    key = _positions_key(project_id)
    pipeline = site_client().pipeline(transaction=False)
    pipeline.lpush(key, f"{path} {entry_id} {position}")
    pipeline.ltrim(key, 0, _KEPT - 1)
    pipeline.expire(key, _KEPT_S)
    try:
        pipeline.execute()
    except redis.RedisError as exc:
        _keeping.failed(exc)
    else:
        _keeping.succeeded()


def kept_position(project_id: int, path: str, entry_id: str) -> str | None:
    """Return the position that a deleted entry had in its list, None if it is not known."""
    named = f"{path} {entry_id} "
    kept: Any = site_client().lrange(_positions_key(project_id), 0, -1)
    positions = (line.decode() for line in kept)
    return next((line[len(named) :] for line in positions if line.startswith(named)), None)


def _positions_key(project_id: int) -> str:
    return f"deleted-positions:{project_id}"


def parse_page(
    query: QueryDict,
    default_order: Literal["asc", "desc"],
    default_limit: int = _DEFAULT_LIMIT,
    max_limit: int = _MAX_LIMIT,
    *,
    has_before: bool = False,
) -> Page:
    """Return the requested page. Raise InvalidRequestError for an invalid parameter.

    ``has_before``: the list takes ``before``; ``after`` goes before it.
    """
    limit = query.get("limit", str(default_limit))
    if not limit.isdecimal() or len(limit) > 5 or not 1 <= int(limit) <= max_limit:
        raise InvalidRequestError(
            f"Invalid 'limit': expected a whole number from 1 to {max_limit}.", param="limit"
        )
    order = query.get("order", default_order)
    if order not in ("asc", "desc"):
        raise InvalidRequestError(
            f"Invalid value: {order[:100]!r}. Supported values are: 'asc' and 'desc'.",
            param="order",
            code="invalid_value",
        )
    is_ascending, after = order == "asc", query.get("after") or None
    if has_before and after is None and (before := query.get("before")):
        return Page(before, int(limit), "desc" if is_ascending else "asc", is_reversed=True)
    return Page(after, int(limit), "asc" if is_ascending else "desc")


def parse_metadata(query: QueryDict) -> dict[str, str]:
    """Return the metadata filter from the parameters ``metadata[key]=value``."""
    return {
        name[len("metadata[") : -1]: str(query[name])
        for name in query
        if name.startswith("metadata[") and name.endswith("]")
    }


def list_object(entries: Sequence[dict[str, Any]], page: Page) -> dict[str, Any]:
    """Return the list object. Pass one entry more than the limit if there is another page."""
    shown = list(entries[: page.limit])
    if page.is_reversed:
        shown.reverse()
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(entries) > page.limit,
    }
