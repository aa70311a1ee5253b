"""Queries of the lists and streams, as the OpenAPI document shows them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from inference_site.api.paging import PageQuery

_OptionalText = str | SkipJsonSchema[None]
MOST_SEARCHED = 500
"""Characters of a search."""
_OptionalTime = Annotated[int, Field(ge=0, lt=10**11)] | SkipJsonSchema[None]


class NewestFirst(PageQuery):
    """A page of a list that begins with the newest."""

    order: Literal["asc", "desc"] = "desc"


class InputItemsQuery(NewestFirst):
    """What ``page_of_input`` reads."""

    before: _OptionalText = Field(None, description="The id of the first entry of the next page.")


class ResponsesQuery(NewestFirst):
    """What ``list_responses`` reads; and ``metadata[key]=value``, any number of times."""

    model: _OptionalText = None
    status: (
        Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        | SkipJsonSchema[None]
    ) = None
    previous_response_id: _OptionalText = None
    conversation: _OptionalText = None
    q: _OptionalText = Field(
        None,
        max_length=MOST_SEARCHED,
        description=(
            "Words that one of its items has, all of them. Phrases in quotes, `or`, and a minus "
            "before what it must not have."
        ),
    )
    created_after: _OptionalTime = Field(None, description="Unix seconds.")
    created_before: _OptionalTime = Field(None, description="Unix seconds.")


class StreamQuery(BaseModel):
    """What ``GET /v1/responses/{id}`` reads."""

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0, lt=10**9)] | SkipJsonSchema[None] = Field(
        None, description="The number of the last event that is known."
    )
