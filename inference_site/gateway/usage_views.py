"""The usage API: ``GET /v1/usage`` and ``GET /v1/organization/usage/…``.

Source of the wire models: API reference, "Usage".
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Generic, Literal, TypeVar

from django.conf import settings
from django.http import QueryDict
from django.utils import timezone
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.models import Scope
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.payload import WireObject, parse_query
from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import ApiView
from inference_site.runs.usage.models import (
    EMBEDDINGS,
    MODERATIONS,
    NAMED_APART,
    SPEECHES,
    TRANSCRIPTIONS,
    Period,
)
from inference_site.runs.usage.queries import (
    PERIOD_LENGTH,
    Span,
    Usage,
    first_usage_by,
    floor,
    one_snapshot,
    usage_by,
)

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


class GroupUsage(WireObject):
    """The usage of one group in one bucket; ``cost`` and the fields after it are extensions.

    An id is null unless the request groups by it.
    """

    num_model_requests: int
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    cost: float
    num_failed_requests: int
    num_cancelled_requests: int


class InputUsage(GroupUsage):
    """The usage of requests that are counted by the tokens of their input."""

    input_tokens: int


class EmbeddingsUsage(InputUsage):
    """The usage of embeddings."""

    object: Literal["organization.usage.embeddings.result"] = "organization.usage.embeddings.result"


class ModerationsUsage(InputUsage):
    """The usage of moderations. ``output_tokens``, an extension, are those of guards."""

    object: Literal["organization.usage.moderations.result"] = (
        "organization.usage.moderations.result"
    )
    output_tokens: int


class SpeechesUsage(GroupUsage):
    """The usage of speech. `characters` are four for each input token."""

    object: Literal["organization.usage.audio_speeches.result"] = (
        "organization.usage.audio_speeches.result"
    )
    characters: int


class TranscriptionsUsage(GroupUsage):
    """The usage of transcripts and translations. `seconds` are one for ten input tokens.

    ``output_tokens``, an extension, are those of the texts.
    """

    object: Literal["organization.usage.audio_transcriptions.result"] = (
        "organization.usage.audio_transcriptions.result"
    )
    seconds: int
    output_tokens: int


class ImagesUsage(GroupUsage):
    """The usage of images: the site makes none."""

    object: Literal["organization.usage.images.result"] = "organization.usage.images.result"
    images: int
    source: str | None = None
    size: str | None = None


class VectorStoresUsage(WireObject):
    """The usage of vector stores: their size is not counted over time."""

    object: Literal["organization.usage.vector_stores.result"] = (
        "organization.usage.vector_stores.result"
    )
    usage_bytes: int
    project_id: str | None = None


class CodeInterpreterUsage(WireObject):
    """The usage of code interpreters: the site has none."""

    object: Literal["organization.usage.code_interpreter_sessions.result"] = (
        "organization.usage.code_interpreter_sessions.result"
    )
    num_sessions: int
    project_id: str | None = None


ResultT = TypeVar("ResultT", bound=WireObject)


class UsageBucket(WireObject, Generic[ResultT]):
    """A minute, hour or day of UTC, in Unix seconds; ``end_time`` is exclusive."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[ResultT]


class UsagePage(WireObject, Generic[ResultT]):
    """Buckets in order of time; send ``next_page`` as ``page`` to get the next page."""

    object: Literal["page"] = "page"
    data: list[UsageBucket[ResultT]]
    has_more: bool
    next_page: str | None


class UsageQuery(BaseModel):
    """Query parameters of a project's usage. Names of list parameters may end in ``[]``."""

    start_time: _Time | SkipJsonSchema[None] = Field(
        None,
        description=(
            "Unix seconds. Default: so that `end_time` is in the seventh day, the 24th hour or the "
            "60th minute."
        ),
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
        None, description="true matches nothing: the usage of batches is not counted apart."
    )


class ImagesQuery(OrganizationUsageQuery):
    """Query parameters of the usage of images."""

    sources: list[str] | SkipJsonSchema[None] = None
    sizes: list[str] | SkipJsonSchema[None] = None
    group_by: list[GroupBy | Literal["source", "size"]] | SkipJsonSchema[None] = None  # type: ignore[assignment]  # It has more values.


_PERIODS = {"1m": Period.MINUTE, "1h": Period.HOUR, "1d": Period.DAY}
_PAGE_LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
"""The default and the greatest number of buckets per page, by bucket width."""
_MOST_DAYS_OF_COSTS = 180
_MAX_RESULTS = 1500
"""Results in the buckets of a page. Without it, a day of minutes by key and model was one page of
43,000 results and 17 MB, which blocked the web process for half a second at a time."""
_LIST_PARAMETERS = {
    *("project_ids", "user_ids", "api_key_ids", "models", "line_items", "group_by"),
    *("sources", "sizes"),
}
_CHARACTERS_PER_TOKEN, _TOKENS_PER_SECOND = 4, 10
"""How the engines count the texts of speeches, and sounds, if the server reports no tokens."""
_GROUP_COLUMNS = ("project_id", "api_key_id", "model")
"""The values of ``group_by`` that have an effect; the others are always null."""
ID_PREFIXES = {"project_id": "proj_", "api_key_id": "key_"}
"""The beginnings of the public ids of projects and keys; their primary keys follow."""


class CostAmount(WireObject):
    """An amount in the site's currency, whose name is in lower case."""

    value: float
    currency: str


class Costs(WireObject):
    """The costs of one group on one day. A ``line_item`` is a model."""

    object: Literal["organization.costs.result"] = "organization.costs.result"
    amount: CostAmount
    line_item: str | None = None
    project_id: str | None = None
    api_key_id: str | None = None


class CostsQuery(BaseModel):
    """Query parameters of the costs of all projects. Names of list parameters may end in ``[]``."""

    start_time: _Time
    end_time: _Time | SkipJsonSchema[None] = Field(
        None, description="Unix seconds, exclusive. Default: now."
    )
    bucket_width: Literal["1d"] = "1d"
    project_ids: list[str] | SkipJsonSchema[None] = None
    api_key_ids: list[str] | SkipJsonSchema[None] = None
    line_items: list[str] | SkipJsonSchema[None] = Field(
        None, description="Only the costs of these models."
    )
    group_by: list[Literal["project_id", "line_item", "api_key_id"]] | SkipJsonSchema[None] = None
    limit: Annotated[int, Field(ge=1, le=_MOST_DAYS_OF_COSTS)] = 7
    page: str | SkipJsonSchema[None] = Field(
        None, description="``next_page`` of the previous answer."
    )


class ProjectUsageView(ApiView):
    """``GET /v1/usage``: the usage of the caller's project."""

    scope = Scope.USAGE

    @documented(query=UsageQuery, answer=UsagePage[CompletionsUsage])
    def get(self, request: Request) -> Response:
        """Get the usage of the project, of requests of all kinds."""
        query = parse_query(UsageQuery, _query_values(request.query_params))
        return Response(_page(query, [caller_of(request).project_id]).model_dump())


class _OrganizationUsageView(ApiView):
    scope = Scope.ADMIN

    def page(self, request: Request, kinds: Sequence[str] | None = None) -> UsagePage[Any]:
        """Return the usage of these kinds, or of all that have no reports of their own."""
        query = parse_query(OrganizationUsageQuery, _query_values(request.query_params))
        projects = None
        if query.user_ids or query.batch:
            projects = []
        elif query.project_ids is not None:
            projects = _primary_keys(query.project_ids, "project_id")
        if kinds is None:
            return _page(query, projects, without=NAMED_APART)
        return _page(query, projects, kinds)

    def empty_page(
        self, request: Request, model: type[OrganizationUsageQuery] = OrganizationUsageQuery
    ) -> Response:
        """Answer with buckets of what is never counted."""
        query = parse_query(model, _query_values(request.query_params))
        return Response(_page(query, []).model_dump())


class CompletionsUsageView(_OrganizationUsageView):
    """``GET /v1/organization/usage/completions``: the usage of all projects."""

    @documented(query=OrganizationUsageQuery, answer=UsagePage[CompletionsUsage])
    def get(self, request: Request) -> Response:
        """Get the usage of all projects, but for embeddings, moderations and sounds."""
        return Response(self.page(request).model_dump())


class EmbeddingsUsageView(_OrganizationUsageView):
    """``GET /v1/organization/usage/embeddings``: the embeddings of all projects."""

    @documented(query=OrganizationUsageQuery, answer=UsagePage[EmbeddingsUsage])
    def get(self, request: Request) -> Response:
        """Get the usage of embeddings, of all projects."""
        return _results(EmbeddingsUsage, self.page(request, EMBEDDINGS))


class ModerationsUsageView(_OrganizationUsageView):
    """``GET /v1/organization/usage/moderations``: the moderations of all projects."""

    @documented(query=OrganizationUsageQuery, answer=UsagePage[ModerationsUsage])
    def get(self, request: Request) -> Response:
        """Get the usage of moderations, of all projects."""
        return _results(ModerationsUsage, self.page(request, MODERATIONS))


class SpeechesUsageView(_OrganizationUsageView):
    """``GET /v1/organization/usage/audio_speeches``: the speech of all projects."""

    @documented(query=OrganizationUsageQuery, answer=UsagePage[SpeechesUsage])
    def get(self, request: Request) -> Response:
        """Get the usage of speech, of all projects.

        `characters` are four for each input token.
        """
        page = self.page(request, SPEECHES)
        return _results(
            SpeechesUsage,
            page,
            lambda row: {"characters": row["input_tokens"] * _CHARACTERS_PER_TOKEN},
        )


class TranscriptionsUsageView(_OrganizationUsageView):
    """``GET /v1/organization/usage/audio_transcriptions``: the transcripts of all projects."""

    @documented(query=OrganizationUsageQuery, answer=UsagePage[TranscriptionsUsage])
    def get(self, request: Request) -> Response:
        """Get the usage of transcripts and translations, of all projects.

        `seconds` are one for ten input tokens.
        """
        page = self.page(request, TRANSCRIPTIONS)
        return _results(
            TranscriptionsUsage,
            page,
            lambda row: {"seconds": row["input_tokens"] // _TOKENS_PER_SECOND},
        )


class ImagesUsageView(_OrganizationUsageView):
    """``GET /v1/organization/usage/images``: there are none."""

    @documented(query=ImagesQuery, answer=UsagePage[ImagesUsage])
    def get(self, request: Request) -> Response:
        """Get empty buckets: the site makes no images."""
        return self.empty_page(request, ImagesQuery)


class VectorStoresUsageView(_OrganizationUsageView):
    """``GET /v1/organization/usage/vector_stores``: they are not counted over time."""

    @documented(query=OrganizationUsageQuery, answer=UsagePage[VectorStoresUsage])
    def get(self, request: Request) -> Response:
        """Get empty buckets: the size of vector stores is not counted over time."""
        return self.empty_page(request)


class CodeInterpreterUsageView(_OrganizationUsageView):
    """``GET /v1/organization/usage/code_interpreter_sessions``: there are none."""

    @documented(query=OrganizationUsageQuery, answer=UsagePage[CodeInterpreterUsage])
    def get(self, request: Request) -> Response:
        """Get empty buckets: the site runs no code."""
        return self.empty_page(request)


class OrganizationCostsView(ApiView):
    """``GET /v1/organization/costs``: the costs of all projects."""

    scope = Scope.ADMIN

    @documented(query=CostsQuery, answer=UsagePage[Costs])
    def get(self, request: Request) -> Response:
        """Get the costs of all projects by day."""
        query = parse_query(CostsQuery, _query_values(request.query_params))
        groups = ["model" if name == "line_item" else name for name in query.group_by or []]
        shared = query.model_dump(include={"start_time", "end_time", "api_key_ids", "page"})
        usage = OrganizationUsageQuery(
            **shared, models=query.line_items, limit=query.limit, group_by=groups
        )
        ids = query.project_ids
        projects = None if ids is None else _primary_keys(ids, "project_id")
        page = _page(usage, projects, most_days=_MOST_DAYS_OF_COSTS)
        currency = settings.CURRENCY.lower()
        data = [
            UsageBucket[Costs](
                start_time=bucket.start_time,
                end_time=bucket.end_time,
                results=[
                    Costs(
                        amount=CostAmount(value=result.cost, currency=currency),
                        line_item=result.model,
                        project_id=result.project_id,
                        api_key_id=result.api_key_id,
                    )
                    for result in bucket.results
                ],
            )
            for bucket in page.data
        ]
        found = UsagePage[Costs](data=data, has_more=page.has_more, next_page=page.next_page)
        return Response(found.model_dump())


def _results(
    result: type[GroupUsage],
    page: UsagePage[CompletionsUsage],
    counts: Callable[[dict[str, Any]], dict[str, int]] = lambda row: {},
) -> Response:
    """Return a page with results of another class: its fields, and what ``counts`` returns."""
    fields = result.model_fields.keys() & CompletionsUsage.model_fields.keys() - {"object"}
    data = page.model_dump()
    for bucket in data["data"]:
        bucket["results"] = [
            result(**{name: row[name] for name in fields}, **counts(row)).model_dump()
            for row in bucket["results"]
        ]
    return Response(data)


def _query_values(given: QueryDict) -> dict[str, Any]:
    """Return the query parameters; the names of list parameters may end in ``[]``."""
    values: dict[str, Any] = {}
    for name in given:
        plain = name.removesuffix("[]")
        if plain in _LIST_PARAMETERS:
            values.setdefault(plain, []).extend(given.getlist(name))
        else:
            values[name] = given[name]
    return values


def _page(
    query: UsageQuery,
    projects: Sequence[int] | None,
    kinds: Sequence[str] | None = None,
    *,
    without: Sequence[str] = (),
    most_days: int | None = None,
) -> UsagePage[CompletionsUsage]:
    """Return a page of buckets, of all kinds of requests or only these, without some.

    A page ends early when it would have too many results. ``most_days`` is the greatest number of
    buckets of a day, if it is not that of ``_PAGE_LIMITS``.
    """
    span, has_more = _span(query, projects, most_days)
    span = replace(span, kinds=kinds)
    group_by = query.group_by or []
    columns = [name for name in _GROUP_COLUMNS if name in group_by]
    with one_snapshot():
        usages, page_span = first_usage_by(span, _MAX_RESULTS, *columns)
        parts = usage_by(replace(page_span, kinds=without), *columns) if without else {}
    results: dict[dt.datetime, list[CompletionsUsage]] = defaultdict(list)
    for (start, group), whole in usages.items():
        usage = whole.without(parts.get((start, group), Usage()))
        if not usage.requests:
            continue
        ids = {
            name: f"{ID_PREFIXES.get(name, '')}{value}"
            for name, value in zip(columns, group, strict=True)
        }
        results[start].append(
            CompletionsUsage(
                input_tokens=usage.input_tokens,
                input_cached_tokens=usage.cached_tokens,
                input_uncached_tokens=usage.input_tokens - usage.cached_tokens,
                output_tokens=usage.output_tokens,
                num_model_requests=usage.requests,
                cost=float(usage.cost),
                reasoning_tokens=usage.reasoning_tokens,
                num_failed_requests=usage.failed,
                num_cancelled_requests=usage.cancelled,
                **ids,
            )
        )
    data = [
        UsageBucket[CompletionsUsage](
            start_time=int(start.timestamp()),
            end_time=int((start + PERIOD_LENGTH[span.period]).timestamp()),
            results=results[start],
        )
        for start in page_span.starts()
    ]
    has_more = has_more or page_span != span
    next_page = f"page_{int(page_span.end.timestamp())}" if has_more else None
    return UsagePage[CompletionsUsage](data=data, has_more=has_more, next_page=next_page)


def _span(
    query: UsageQuery, projects: Sequence[int] | None, most_days: int | None
) -> tuple[Span, bool]:
    """Return the range of one page, and whether the query covers buckets after it."""
    period = _PERIODS[query.bucket_width]
    default_limit, max_limit = _PAGE_LIMITS[query.bucket_width]
    end = timezone.now() if query.end_time is None else _moment(query.end_time)
    last = floor(end - dt.timedelta(microseconds=1), period)
    start = last - (default_limit - 1) * PERIOD_LENGTH[period]
    if query.start_time is not None:
        start = _moment(query.start_time)
    if end <= start:
        raise InvalidRequestError(
            "Invalid 'end_time': it must be later than 'start_time'.", param="end_time"
        )
    if query.page:
        seconds = query.page.removeprefix("page_")
        if not seconds.isdecimal() or len(seconds) > 10:
            raise InvalidRequestError(
                "Invalid 'page': send 'next_page' of the last answer.", param="page"
            )
        start = max(start, _moment(int(seconds)))
    max_limit = most_days or max_limit
    limit = default_limit if query.limit is None else query.limit
    if limit > max_limit:
        raise InvalidRequestError(
            f"Invalid 'limit': at most {max_limit} buckets of '{query.bucket_width}' a page.",
            param="limit",
            code="integer_above_max_value",
        )
    page_end = floor(start, period) + limit * PERIOD_LENGTH[period]
    api_keys = None if query.api_key_ids is None else _primary_keys(query.api_key_ids, "api_key_id")
    span = Span(period, start, min(page_end, end), projects, api_keys, query.models)
    return span, page_end < end


def _moment(seconds: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def _primary_keys(ids: Sequence[str], name: str) -> list[int]:
    """Return the primary keys of public ids; malformed ids are skipped."""
    found = (primary_key_of(id_, name) for id_ in ids)
    return [number for number in found if number is not None]


def primary_key_of(id_: str, name: str) -> int | None:
    """Return the primary key in a public id, by the ``name`` of its kind; None if malformed."""
    digits = id_.removeprefix(ID_PREFIXES[name])
    is_number = digits.isdecimal() and digits.isascii() and len(digits) < 19
    return int(digits) if is_number else None
