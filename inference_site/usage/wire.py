"""Wire models of the usage API. Source: API reference, "Usage", "Completions"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from inference_site.api.payload import WireObject

GroupBy = Literal["project_id", "user_id", "api_key_id", "model", "batch", "service_tier"]
BucketWidth = Literal["1m", "1h", "1d"]
_Time = Annotated[int, Field(ge=0, lt=10**10)]


class CompletionsUsage(WireObject):
    """The usage of one group in one bucket; ``cost`` and the fields after it are extensions.

    An id is null unless the request groups by it.
    """

    object: Literal["organization.usage.completions.result"] = (
        "organization.usage.completions.result"
    )
    input_tokens: int
    input_cached_tokens: int
    input_uncached_tokens: int
    output_tokens: int
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    num_model_requests: int
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None
    cost: float
    reasoning_tokens: int
    num_failed_requests: int
    num_cancelled_requests: int


class UsageBucket(WireObject):
    """A minute, hour or day of UTC, in Unix seconds; ``end_time`` is exclusive."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[CompletionsUsage]


class UsagePage(WireObject):
    """Buckets in order of time; send ``next_page`` as ``page`` to get the next page."""

    object: Literal["page"] = "page"
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class UsageQuery(BaseModel):
    """Query parameters of a project's usage. Names of list parameters may end in ``[]``."""

    start_time: _Time | SkipJsonSchema[None] = Field(
        None, description="Unix seconds. Default: six days ago, so that today is the seventh day."
    )
    end_time: _Time | SkipJsonSchema[None] = Field(
        None, description="Unix seconds, exclusive. Default: now."
    )
    bucket_width: BucketWidth = "1d"
    api_key_ids: list[str] | SkipJsonSchema[None] = None
    models: list[str] | SkipJsonSchema[None] = None
    group_by: list[GroupBy] | SkipJsonSchema[None] = None
    limit: Annotated[int, Field(ge=1)] | SkipJsonSchema[None] = Field(
        None,
        description=(
            "Buckets per page: 7 days (at most 31), 24 hours (at most 168) or 60 minutes "
            "(at most 1440). A page ends earlier when its buckets have 1,500 results together."
        ),
    )
    page: str | SkipJsonSchema[None] = Field(
        None, description="``next_page`` of the previous answer."
    )


class OrganizationUsageQuery(UsageQuery):
    """Query parameters of the usage of all projects."""

    start_time: _Time
    project_ids: list[str] | SkipJsonSchema[None] = None
    user_ids: list[str] | SkipJsonSchema[None] = Field(
        None, description="Matches nothing: keys belong to projects, not to users."
    )
    batch: bool | SkipJsonSchema[None] = Field(
        None, description="true matches nothing: there are no batches."
    )
