"""Wire models of vector stores. Source: API reference, "Vector stores" and their files and batches.

``embedding_model`` is an extension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticKnownError

from inference_site.gateway.api.paging import PageQuery
from inference_site.gateway.api.payload import NO_NUL, Omittable, WireObject, WireRequest
from inference_site.gateway.request_fields.wire import Metadata
from inference_site.vector_stores.models import IndexingStatus
from inference_site.vector_stores.search import MAX_RESULTS, Ranking

DEFAULT_CHUNK_SIZE, DEFAULT_CHUNK_OVERLAP = 800, 400
MAX_FILES_AT_ONCE = 2000
_MAX_COMPARISONS = 100

Name = Annotated[str, Field(max_length=512, pattern=NO_NUL)]
FileId = Annotated[str, Field(min_length=1, max_length=64, pattern=NO_NUL)]
FileIds = Annotated[list[FileId], Field(max_length=MAX_FILES_AT_ONCE)]


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("Expected a finite number")
    return value


Number = Annotated[float, AfterValidator(_finite)]
Scalar = bool | int | Number | Annotated[str, Field(max_length=512)]
Operand = bool | int | Number | Annotated[str, Field(max_length=512, pattern=NO_NUL)]
Attributes = Annotated[
    dict[Annotated[str, Field(max_length=64)], Scalar],
    Field(max_length=16),
]


def _one_or_many(value: object) -> str:
    return "many" if isinstance(value, list) else "one"


_ComparisonType = Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
_CompoundType = Literal["and", "or"]
_FILTER_TYPES = (*get_args(_ComparisonType), *get_args(_CompoundType))


def _known_type(value: object) -> object:
    """Refuse an unknown type of filter, of both kinds; a literal would name those of one."""
    if value not in _FILTER_TYPES:
        expected = ", ".join(map(repr, _FILTER_TYPES))
        raise PydanticKnownError("literal_error", {"expected": expected})
    return value


class Comparison(WireRequest):
    """A filter that compares one attribute of the files."""

    type: Annotated[_ComparisonType, BeforeValidator(_known_type)] = "eq"
    key: Annotated[str, Field(max_length=64, pattern=NO_NUL)]
    value: (
        Annotated[Operand, Tag("one")]
        | Annotated[list[Operand], Field(max_length=_MAX_COMPARISONS), Tag("many")]
    ) = Field(discriminator=Discriminator(_one_or_many))

    @model_validator(mode="after")
    def _has_fitting_value(self) -> Self:
        if isinstance(self.value, list) != (self.type in ("in", "nin")):
            expected = "a list" if self.type in ("in", "nin") else "no list"
            raise ValueError(f"Expected {expected} for the comparison '{self.type}'")
        return self


class Compound(WireRequest):
    """A filter of other filters."""

    type: _CompoundType
    filters: Annotated[list[Filter], Field(max_length=_MAX_COMPARISONS)]


def _filter_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "compound" if kind in get_args(_CompoundType) else "comparison"


Filter = Annotated[
    Annotated[Comparison, Tag("comparison")] | Annotated[Compound, Tag("compound")],
    Discriminator(_filter_kind),
]
Compound.model_rebuild()


def _comparisons(given: Comparison | Compound) -> Iterator[Comparison]:
    if isinstance(given, Comparison):
        yield given
    else:
        for part in given.filters:
            yield from _comparisons(part)


def _require_few_comparisons(given: Comparison | Compound) -> Comparison | Compound:
    if sum(1 for _ in _comparisons(given)) > _MAX_COMPARISONS:
        raise ValueError(f"Expected at most {_MAX_COMPARISONS} comparisons")
    return given


Filters = Annotated[Filter, AfterValidator(_require_few_comparisons)]


class HybridSearch(WireRequest):
    """How much the ranking by meaning and the one by words count."""

    embedding_weight: Annotated[Number, Field(ge=0, le=1000)] = 1.0
    text_weight: Annotated[Number, Field(ge=0, le=1000)] = 1.0

    @model_validator(mode="after")
    def _has_weight(self) -> Self:
        if not self.embedding_weight + self.text_weight:
            raise ValueError("Expected a weight above 0")
        return self


class RankingOptions(WireRequest):
    """``ranking_options``. The ranker ``none`` ranks by meaning alone."""

    ranker: Literal["none", "auto", "default-2024-11-15"] | None = None
    score_threshold: Annotated[Number, Field(ge=0, le=1)] = 0.0
    hybrid_search: HybridSearch | None = None


def to_ranking(options: RankingOptions | None) -> Ranking:
    """Return how the results of a search are ranked."""
    if options is None:
        return Ranking()
    if options.ranker == "none":
        return Ranking(text_weight=0.0, score_threshold=options.score_threshold)
    weights = options.hybrid_search or HybridSearch()
    return Ranking(weights.embedding_weight, weights.text_weight, options.score_threshold)


MaxResults = Annotated[int, Field(ge=1, le=MAX_RESULTS)]


class StaticChunks(WireRequest):
    """Tokens of a chunk, and how many of them are the last of the one before."""

    max_chunk_size_tokens: Annotated[int, Field(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _is_progressing(self) -> Self:
        if self.chunk_overlap_tokens > self.max_chunk_size_tokens // 2:
            raise ValueError("Expected an overlap of at most half of max_chunk_size_tokens")
        return self


class AutoStrategy(WireRequest):
    """Chunks of 800 tokens, 400 of which overlap."""

    type: Literal["auto"]


class StaticStrategy(WireRequest):
    """Chunks of a given size."""

    type: Literal["static"]
    static: StaticChunks


Strategy = Annotated[AutoStrategy | StaticStrategy, Field(discriminator="type")]


class StoreExpiry(WireRequest):
    """``expires_after``: the days without use after which a store expires."""

    anchor: Literal["last_active_at"]
    days: Annotated[int, Field(ge=1, le=365)]


class StoreRequest(WireRequest):
    """Body of ``POST /v1/vector_stores``."""

    name: Name | None = None
    description: Annotated[str, Field(max_length=4096, pattern=NO_NUL)] | None = None
    file_ids: FileIds | None = None
    chunking_strategy: Strategy | None = None
    expires_after: StoreExpiry | None = None
    metadata: Metadata | None = None
    embedding_model: Annotated[str, Field(max_length=200, pattern=NO_NUL)] | None = None


class StoreChanges(WireRequest):
    """Body of ``POST /v1/vector_stores/{vector_store_id}``."""

    name: Name | None = None
    expires_after: StoreExpiry | None = None
    metadata: Metadata | None = None


class SearchRequest(WireRequest):
    """Body of ``POST /v1/vector_stores/{vector_store_id}/search``."""

    query: (
        Annotated[str, Field(min_length=1, max_length=16_384, pattern=NO_NUL), Tag("one")]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=16_384, pattern=NO_NUL)]],
            Field(min_length=1, max_length=16),
            Tag("many"),
        ]
    ) = Field(discriminator=Discriminator(_one_or_many))
    filters: Filters | None = None
    max_num_results: MaxResults = 10
    ranking_options: RankingOptions | None = None
    rewrite_query: Omittable[bool] = None


class FileRequest(WireRequest):
    """Body of ``POST /v1/vector_stores/{vector_store_id}/files``; an entry of a batch's."""

    file_id: FileId
    attributes: Attributes | None = None
    chunking_strategy: Strategy | None = None


class FileChanges(WireRequest):
    """Body of ``POST /v1/vector_stores/{vector_store_id}/files/{file_id}``."""

    attributes: Attributes | None


class FileBatchRequest(WireRequest):
    """Body of ``POST /v1/vector_stores/{vector_store_id}/file_batches``.

    Either ``file_ids``, which have the other fields, or ``files``.
    """

    file_ids: Annotated[FileIds, Field(min_length=1)] | None = None
    files: (
        Annotated[list[FileRequest], Field(min_length=1, max_length=MAX_FILES_AT_ONCE)] | None
    ) = None
    attributes: Attributes | None = None
    chunking_strategy: Strategy | None = None

    @model_validator(mode="after")
    def _has_files(self) -> Self:
        if (self.file_ids is None) == (self.files is None):
            raise ValueError("Expected either 'file_ids' or 'files'")
        return self


class StoresQuery(PageQuery):
    """Query parameters of the list of vector stores."""

    order: Literal["asc", "desc"] = "desc"
    before: str | SkipJsonSchema[None] = Field(
        None, description="The id of the first entry of the next page."
    )


class FilesQuery(StoresQuery):
    """Query parameters of the lists of files."""

    filter: Literal["in_progress", "completed", "failed", "cancelled"] | SkipJsonSchema[None] = (
        Field(None, description="Only files with this status.")
    )


class FileCounts(WireObject):
    """How many files have each status."""

    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int


class ShownExpiry(WireObject):
    """When a store expires."""

    anchor: Literal["last_active_at"] = "last_active_at"
    days: int


class StoreObject(WireObject):
    """A vector store."""

    id: str
    object: Literal["vector_store"] = "vector_store"
    created_at: int
    name: str | None
    description: str | None
    usage_bytes: int
    file_counts: FileCounts
    status: Literal["expired", "in_progress", "completed"]
    expires_after: ShownExpiry | None
    expires_at: int | None
    last_active_at: int
    metadata: dict[str, str]
    embedding_model: str


class DeletedStore(WireObject):
    """The answer of ``DELETE /v1/vector_stores/{vector_store_id}``."""

    id: str
    object: Literal["vector_store.deleted"] = "vector_store.deleted"
    deleted: Literal[True] = True


class IndexingError(WireObject):
    """Why a file could not be indexed."""

    code: str
    message: str


class ShownChunks(WireObject):
    """The sizes of chunks, in tokens."""

    max_chunk_size_tokens: int
    chunk_overlap_tokens: int


class ShownStrategy(WireObject):
    """How a file is divided."""

    type: Literal["static"] = "static"
    static: ShownChunks


class StoreFileObject(WireObject):
    """A file in a vector store; its id is that of the file."""

    id: str
    object: Literal["vector_store.file"] = "vector_store.file"
    usage_bytes: int
    created_at: int
    vector_store_id: str
    status: IndexingStatus
    last_error: IndexingError | None
    chunking_strategy: ShownStrategy
    attributes: dict[str, Any]


class RemovedFile(WireObject):
    """The answer of ``DELETE /v1/vector_stores/{vector_store_id}/files/{file_id}``."""

    id: str
    object: Literal["vector_store.file.deleted"] = "vector_store.file.deleted"
    deleted: Literal[True] = True


class ContentText(WireObject):
    """A text."""

    type: Literal["text"] = "text"
    text: str


class FileContentPage(WireObject):
    """The texts of a file's chunks."""

    object: Literal["vector_store.file_content.page"] = "vector_store.file_content.page"
    data: list[ContentText]
    has_more: bool
    next_page: str | None


class FileBatchObject(WireObject):
    """Files that were added together."""

    id: str
    object: Literal["vector_store.files_batch"] = "vector_store.files_batch"
    created_at: int
    vector_store_id: str
    status: Literal["in_progress", "completed", "cancelled", "failed"]
    file_counts: FileCounts


class SearchResult(WireObject):
    """A chunk that a search has found."""

    file_id: str
    filename: str
    score: float
    attributes: dict[str, Any]
    content: list[ContentText]


class SearchPage(WireObject):
    """The results of a search, the best first."""

    object: Literal["vector_store.search_results.page"] = "vector_store.search_results.page"
    search_query: list[str]
    data: list[SearchResult]
    has_more: bool
    next_page: str | None


def chunk_sizes(strategy: AutoStrategy | StaticStrategy | None) -> tuple[int, int]:
    """Return the size and the overlap of chunks, in tokens."""
    if isinstance(strategy, StaticStrategy):
        sizes = strategy.static
        return sizes.max_chunk_size_tokens, sizes.chunk_overlap_tokens
    return DEFAULT_CHUNK_SIZE, DEFAULT_CHUNK_OVERLAP
