"""Usage on the wire. Source: API reference, "Usage", "Completions"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from inference_site.api.payload import WireObject

GroupBy = Literal["project_id", "user_id", "api_key_id", "model", "batch", "service_tier"]
BucketWidth = Literal["1m", "1h", "1d"]
_Time = Annotated[int, Field(ge=0, lt=10**10)]


class CompletionsUsage(WireObject):
    """What one group used in one bucket; ``cost`` and what follows it are extensions.

    Of the ids those are given that the usage is grouped by.
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
    """A minute, an hour or a day of UTC; Unix seconds, the end is not in it."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[CompletionsUsage]


class UsagePage(WireObject):
    """Buckets in order of time; ``next_page`` is the ``page`` of the next request."""

    object: Literal["page"] = "page"
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class UsageQuery(BaseModel):
    """The query of a project's own usage. Names of lists may end in ``[]``."""

    start_time: _Time | SkipJsonSchema[None] = Field(
        None, description="Unix seconds; left out: six days ago, so that today is the seventh."
    )
    end_time: _Time | SkipJsonSchema[None] = Field(None, description="Unix seconds; now.")
    bucket_width: BucketWidth = "1d"
    api_key_ids: list[str] | SkipJsonSchema[None] = None
    models: list[str] | SkipJsonSchema[None] = None
    group_by: list[GroupBy] | SkipJsonSchema[None] = None
    limit: Annotated[int, Field(ge=1)] | SkipJsonSchema[None] = Field(
        None, description="Buckets a page: of days 7, at most 31; hours 24, 168; minutes 60, 1440."
    )
    page: str | SkipJsonSchema[None] = Field(None, description="``next_page`` of the last answer.")


class OrganizationUsageQuery(UsageQuery):
    """The query of everybody's usage."""

    start_time: _Time
    project_ids: list[str] | SkipJsonSchema[None] = None
    user_ids: list[str] | SkipJsonSchema[None] = Field(
        None, description="Nobody is found: keys belong to projects, not to users."
    )
    batch: bool | SkipJsonSchema[None] = Field(
        None, description="true: nothing is found, since there are no batches."
    )
