"""Chat completions on the wire, in the order of the API reference.

Source: API reference, "Chat completions" (create, object, chunk object).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from completions.wire.messages import (
    FunctionCall,
    FunctionCallChoice,
    FunctionDefinition,
    MessageToolCall,
    RequestMessage,
    RequestTool,
    RequestToolCall,
    ToolChoice,
    wrap_text,
)
from inference_site.core.domain.request import MAX_FUNCTIONS
from inference_site.gateway.api.paging import PageQuery
from inference_site.gateway.api.payload import Omittable, WireObject, WireRequest
from inference_site.gateway.request_fields.moderation import (
    ModerationErrorBody,
    ModerationParam,
    ModerationResultBody,
)
from inference_site.gateway.request_fields.web_search import ContextSize, Location
from inference_site.gateway.request_fields.wire import (
    ConstraintFields,
    EndUser,
    ManyStopTexts,
    Metadata,
    Part,
    ReasoningEffort,
    ResponseFormat,
    SamplingFields,
    ServiceTier,
    StopTexts,
    TokenReportFields,
    apply_aliases,
)

# --- Request -------------------------------------------------------------------------------------


class StreamOptions(WireRequest):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk has the usage so far (vLLM)."""
        return bool(self.include_usage and self.continuous_usage_stats)


class MetadataUpdate(WireRequest):
    """The body of ``POST /v1/chat/completions/{id}``; null removes the metadata."""

    metadata: Metadata | None


_RequestMessages = Annotated[list[RequestMessage], Field(min_length=1)]


class ChatLocation(WireRequest):
    """``web_search_options.user_location``."""

    type: Literal["approximate"] | None = None
    approximate: Location


class WebSearchOptions(WireRequest):
    """``web_search_options``: the model may search the web before it answers."""

    search_context_size: ContextSize | None = None
    user_location: ChatLocation | None = None

    @property
    def location(self) -> Location | None:
        """Where the user is, if that was given."""
        return self.user_location.approximate if self.user_location else None


class ChatCompletionRequest(ConstraintFields, SamplingFields, TokenReportFields):
    """The body of ``POST /v1/chat/completions``.

    Extensions: ``messages`` as a bare string, ``n_choices`` for ``n``, ``enable_thinking``,
    ``reasoning_budget``, ``chat_template_kwargs`` and its other spelling ``template_vars``,
    ``prompt_template``, ``response_prefix``, ``add_generation_prompt``, ``continue_final_message``,
    ``truncate_sequence``, and those of ``SamplingFields``, ``ConstraintFields`` and
    ``TokenReportFields``.
    """

    model: str
    messages: Annotated[
        list[RequestMessage],
        Field(min_length=1),
        BeforeValidator(wrap_text, json_schema_input_type=str | _RequestMessages),
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    n_choices: Annotated[int, Field(ge=1, le=8)] | None = None
    stop: StopTexts | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[RequestTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], Field(min_length=1, max_length=128)] | None = (
        None
    )
    function_call: FunctionCallChoice | None = None
    web_search_options: WebSearchOptions | None = None
    moderation: ModerationParam | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    reasoning_budget: Annotated[int, Field(ge=0)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    template_vars: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prompt_template: Annotated[str, Field(max_length=200)] | None = None
    response_prefix: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    truncate_sequence: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    audio: dict[str, Any] | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    user: EndUser | None = None
    safety_identifier: EndUser | None = None

    @model_validator(mode="after")
    def _officially_named(self) -> Self:
        if self.n_choices is None:
            return self
        return apply_aliases(self, {"n_choices": ("n", self.n_choices)})


class DialectChat(ChatCompletionRequest):
    """A chat of another API as a chat completion, with more stop texts and functions."""

    stop: ManyStopTexts | None = None
    tools: Annotated[list[RequestTool], Field(max_length=MAX_FUNCTIONS)] | None = None


# --- Answer --------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class PromptTokensDetails(WireObject):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(WireObject):
    """``usage.completion_tokens_details``."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class CompletionUsage(WireObject):
    """``usage``: reasoning ⊂ completion, cached ⊂ prompt."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(WireObject):
    """``choices[].logprobs.content[].top_logprobs[]``."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """``choices[].logprobs.content[]``: a token of the answer; concatenated bytes are its text."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(WireObject):
    """``choices[].logprobs``, of an answer or of a chunk."""

    content: list[ContentLogprob]
    refusal: None = None


class PromptLogprob(WireObject):
    """``prompt_logprobs[]``: a token at one position of the prompt; ``rank`` 1 is the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt the token itself and the likeliest, by their ids; null for the first.
"""


class ChatCitation(WireObject):
    """A citation of a web page; the indexes are characters of the content."""

    start_index: int
    end_index: int
    title: str
    url: str


class ChatUrlCitation(WireObject):
    """An annotation of type ``url_citation``."""

    type: Literal["url_citation"] = "url_citation"
    url_citation: ChatCitation


class ResponseMessage(WireObject):
    """``choices[].message``."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    annotations: list[ChatUrlCitation] = Field(default_factory=list)


class Choice(WireObject):
    """``choices[]`` of an answer; a site may repeat the message's ``tool_calls`` there."""

    index: int
    message: ResponseMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None
    stop_str: str | int | None = None
    tool_calls: list[MessageToolCall] | None = None
    token_ids: list[int] | None = None


class Timings(WireObject):
    """``timings``, an extension: counts of tokens, and their durations."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class ModerationResults(WireObject):
    """``moderation.input`` and ``output``: a result for the input, and one for each choice."""

    type: Literal["moderation_results"] = "moderation_results"
    model: str
    results: list[ModerationResultBody]


class ChatModeration(WireObject):
    """``moderation``: the results for the input and for the answers."""

    input: ModerationResults | ModerationErrorBody
    output: ModerationResults | ModerationErrorBody


class ChatCompletion(WireObject):
    """The answer to a request that does not stream. ``finish_reason`` is null in partial ones.

    ``prompt_token_ids`` and ``prompt_logprobs`` are there when they were asked for.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage
    service_tier: Literal["default", "flex", "priority"] = "default"
    system_fingerprint: str
    timings: Timings | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    moderation: Omittable[ChatModeration] = None


class ChunkFunction(WireObject):
    """``choices[].delta.tool_calls[].function``: the name comes once, the arguments in pieces."""

    name: str | None = None
    arguments: str


class ChunkCustom(WireObject):
    """``choices[].delta.tool_calls[].custom``: the same for a custom tool."""

    name: str | None = None
    input: str


class ChunkToolCall(WireObject):
    """``choices[].delta.tool_calls[]``: id and type come with the first piece of a call only."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: ChunkFunction | None = None
    custom: ChunkCustom | None = None


class ChunkDelta(WireObject):
    """``choices[].delta``: only the keys that are set go out."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChunkToolCall] | None = None
    function_call: ChunkFunction | None = None
    refusal: str | None = None


class ChunkChoice(WireObject):
    """``choices[]`` of a chunk."""

    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_str: str | int | None = None
    token_ids: list[int] | None = None


class PromptProgress(WireObject):
    """``prompt_progress``: tokens of the prompt, and milliseconds; cached ⊂ processed ⊂ total."""

    total: int
    cache: int
    processed: int
    time_ms: float


class ChatCompletionChunk(WireObject):
    """One event of a stream. ``usage`` is there only when asked for: null, then the counts.

    A chunk with ``prompt_progress`` or ``moderation`` has no choices. ``prompt_token_ids`` is in
    the first chunk.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    service_tier: Literal["default", "flex", "priority"] = "default"
    system_fingerprint: str
    usage: CompletionUsage | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None
    prompt_token_ids: list[int] | None = None
    moderation: ChatModeration | None = None


class StoredQuery(PageQuery):
    """The query of ``GET /v1/chat/completions``."""

    model: str | SkipJsonSchema[None] = None
    metadata: dict[str, str] | SkipJsonSchema[None] = Field(
        None, description="Pairs that a completion must have: `metadata[key]=value`."
    )


class StoredChatCompletion(ChatCompletion):
    """A stored chat completion."""

    metadata: Metadata


class StoredMessage(WireObject):
    """A message that a stored completion answered. ``content`` is the text of its parts."""

    id: str
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | None
    name: str | None
    content_parts: list[Part] | None
    refusal: str | None
    tool_calls: list[RequestToolCall] | None = None
    tool_call_id: str | None = None


class DeletedChatCompletion(WireObject):
    """The answer of ``DELETE /v1/chat/completions/{id}``."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Literal[True] = True
