"""Bodies and queries of requests. Source: API reference, "Responses" and "Conversations"."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from django.http import QueryDict
from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from inference_site.gateway.api.paging import PageQuery
from inference_site.gateway.api.payload import WireRequest, parse_query, places_of
from inference_site.gateway.request_fields.moderation import ModerationParam
from inference_site.gateway.request_fields.wire import (
    ConstraintFields,
    EndUser,
    JsonObjectFormat,
    Metadata,
    ReasoningEffort,
    ResponseFormat,
    SamplingFields,
    ServiceTier,
    StopTexts,
    TextFormat,
    apply_aliases,
)
from inference_site.gateway.request_fields.wire import JsonSchemaFormat as ChatSchemaFormat
from responses_api.wire.input_items import (
    CompactionTriggerItem,
    InputFile,
    InputImage,
    InputItems,
    InputText,
    ObjectId,
)
from responses_api.wire.tools import Tool, ToolChoice

MAX_SEARCH_LENGTH = 500
"""The most characters of a search."""
_TRUNCATION = {None: None, True: "auto", False: "disabled"}

_OptionalText = str | SkipJsonSchema[None]
_OptionalTime = Annotated[int, Field(ge=0, lt=10**11)] | SkipJsonSchema[None]


def _wrap_text(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[InputItems, BeforeValidator(_wrap_text, json_schema_input_type=str | InputItems)]


class JsonSchemaFormat(WireRequest):
    """``text.format`` of type ``json_schema``; flat, unlike that of chat completions."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


Verbosity = Literal["low", "medium", "high"]


class TextField(WireRequest):
    """``text``."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Verbosity | None = None


ReasoningSummary = Literal["auto", "concise", "detailed"]


class Reasoning(WireRequest):
    """``reasoning``. The reasoning itself is returned, and with ``summary`` a summary of it.

    ``generate_summary`` is the former name of ``summary``.
    """

    effort: ReasoningEffort | None = None
    summary: ReasoningSummary | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    generate_summary: ReasoningSummary | None = None

    @property
    def asked_summary(self) -> ReasoningSummary | None:
        """The summary that is asked for, by either name."""
        return self.summary or self.generate_summary


class ContextManagement(WireRequest):
    """An entry of ``context_management``; ``compact_threshold`` is tokens of the prompt."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, Field(ge=1000)] | None = None


class StreamOptions(WireRequest):
    """``stream_options``. Deltas are never padded; ``include_obfuscation`` is accepted."""

    include_obfuscation: bool | None = None


class BackgroundOptions(WireRequest):
    """``background_options``: how long a background response may take, and what it belongs to.

    A window asks for no more than the default does: a response begins as soon as it has a slot.
    """

    completion_window: Literal["soonest", "2h", "8h"] | None = None
    continuation_id: Annotated[str, Field(max_length=1024)] | None = None


class ConversationParam(WireRequest):
    """``conversation`` as an object."""

    id: ObjectId


ConversationField = Annotated[
    Annotated[ObjectId, Tag("id")] | Annotated[ConversationParam, Tag("object")],
    Discriminator(lambda value: "id" if isinstance(value, str) else "object"),
]

Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ChatNames(WireRequest):
    """Field names of chat completions; their values move to the fields of this API."""

    response_format: ResponseFormat | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    truncate_sequence: bool | None = None

    @model_validator(mode="after")
    def _officially_named(self) -> Self:
        if not self.model_fields_set.isdisjoint(self._second_names()):
            objects = {"text": TextField(), "reasoning": Reasoning()}
            return apply_aliases(self, self._second_names(), objects)
        return self

    def _second_names(self) -> dict[str, tuple[str, Any]]:
        format_: Any = self.response_format
        if isinstance(format_, ChatSchemaFormat):  # It is flat in this API.
            nested = format_.json_schema
            flat = nested.model_dump(by_alias=True, exclude_unset=True)
            format_ = JsonSchemaFormat.model_validate(
                {**flat, "type": "json_schema", "schema": nested.json_schema}
            )
        return {
            "response_format": ("text.format", format_),
            "reasoning_effort": ("reasoning.effort", self.reasoning_effort),
            "verbosity": ("text.verbosity", self.verbosity),
            "truncate_sequence": ("truncation", _TRUNCATION[self.truncate_sequence]),
        }


PromptPart = Annotated[InputText | InputImage | InputFile, Field(discriminator="type")]
PromptValue = Annotated[
    Annotated[str, Tag("text")] | Annotated[PromptPart, Tag("part")],
    Discriminator(lambda value: "part" if isinstance(value, dict | WireRequest) else "text"),
]


class PromptParam(WireRequest):
    """``prompt``: a prompt template of the project, and the values of its variables."""

    id: ObjectId
    version: str | None = None
    variables: dict[str, PromptValue] | None = None


class ContextFields(ChatNames):
    """The fields of a response that decide its prompt; ``input_tokens`` has them too."""

    input: Input | None = None
    instructions: str | None = None
    previous_response_id: ObjectId | None = None
    conversation: ConversationField | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id in ``conversation``, which is a text or an object."""
        given = self.conversation
        return given.id if isinstance(given, ConversationParam) else given


class ResponseRequest(ContextFields, ConstraintFields, SamplingFields):
    """The body of ``POST /v1/responses``.

    Extensions: those of ``SamplingFields`` and ``ConstraintFields``, ``stop``, ``enable_thinking``,
    ``reasoning_budget``, ``chat_template_kwargs`` and ``template_vars``, and the names of
    ``ChatNames``.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None
    context_management: Annotated[list[ContextManagement], Field(max_length=16)] | None = None
    include: list[Include] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    metadata: Metadata | None = None
    moderation: ModerationParam | None = None
    prompt: PromptParam | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: EndUser | None = None
    user: EndUser | None = None
    service_tier: ServiceTier | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n_choices: Annotated[int, Field(ge=1, le=1)] | None = None
    logprobs: bool | None = None

    stop: StopTexts | None = None
    enable_thinking: bool | None = None
    reasoning_budget: Annotated[int, Field(ge=0)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    template_vars: dict[str, Any] | None = None

    @property
    def compacts_now(self) -> bool:
        """Whether the input ends with a ``compaction_trigger``."""
        return any(isinstance(item, CompactionTriggerItem) for item in (self.input or [])[-1:])

    def _ignored(self) -> Iterator[str]:
        is_trigger = [isinstance(item, CompactionTriggerItem) for item in self.input or ()]
        for position, (before, after) in enumerate(pairwise(is_trigger)):
            if before and not after:  # Only at the end of the input it has an effect.
                yield f"input[{places_of(self.input or [])[position]}].compaction_trigger"
                break
        yield from super()._ignored()

    @property
    def includes_logprobs(self) -> bool:
        """Whether ``logprobs`` or ``include`` asks for log probabilities."""
        return bool(self.logprobs) or "message.output_text.logprobs" in (self.include or ())

    def _second_names(self) -> dict[str, tuple[str, Any]]:
        return {
            **super()._second_names(),
            "max_tokens": ("max_output_tokens", self.max_tokens),
            "max_completion_tokens": ("max_output_tokens", self.max_completion_tokens),
            "n_choices": ("n", self.n_choices),
        }


class InputTokensRequest(ContextFields):
    """The body of ``POST /v1/responses/input_tokens``."""

    model: str | None = None


class CompactRequest(WireRequest):
    """The body of ``POST /v1/responses/compact``."""

    model: str
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: ObjectId | None = None
    prompt_cache_key: str | None = None


class IncludeQuery(BaseModel):
    """``include`` of a query: objects always have what it may name, if it was asked for before."""

    include: list[Include] | SkipJsonSchema[None] = None


class NewestFirst(PageQuery):
    """Paging of a list that begins with the newest entry."""

    order: Literal["asc", "desc"] = "desc"


class ConversationItemsQuery(NewestFirst, IncludeQuery):
    """Query of ``GET /v1/conversations/{id}/items``."""


class InputItemsQuery(NewestFirst, IncludeQuery):
    """Query of ``GET /v1/responses/{id}/input_items``."""

    before: _OptionalText = Field(None, description="The id of an entry: the page ends before it.")


class ResponsesQuery(NewestFirst):
    """Query of ``GET /v1/responses``, which also has any number of ``metadata[key]=value``."""

    model: _OptionalText = None
    status: (
        Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        | SkipJsonSchema[None]
    ) = None
    previous_response_id: _OptionalText = None
    conversation: _OptionalText = None
    q: _OptionalText = Field(
        None,
        max_length=MAX_SEARCH_LENGTH,
        description=(
            "Words that one item of the response contains, all of them. Takes phrases in quotes, "
            "`or`, and a minus before a word that the item must not contain."
        ),
    )
    created_after: _OptionalTime = Field(None, description="Unix seconds.")
    created_before: _OptionalTime = Field(None, description="Unix seconds.")


class StreamQuery(IncludeQuery):
    """Query of ``GET /v1/responses/{id}``."""

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0, lt=10**9)] | SkipJsonSchema[None] = Field(
        None, description="The number of the last event that the client has."
    )


def check_include(query: QueryDict) -> None:
    """Raise InvalidRequestError for a value of ``include`` or ``include[]`` that does not exist."""
    parse_query(IncludeQuery, {"include": query.getlist("include") + query.getlist("include[]")})


class ConversationRequest(WireRequest):
    """The body of ``POST /v1/conversations``, which may be empty."""

    items: Annotated[InputItems, Field(max_length=20)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(WireRequest):
    """The body of ``POST /v1/conversations/{id}``; null removes the metadata."""

    metadata: Metadata | None


class ItemsRequest(WireRequest):
    """The body of ``POST /v1/conversations/{id}/items``."""

    items: Annotated[InputItems, Field(min_length=1, max_length=20)]
