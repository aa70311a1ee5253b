"""The Messages API on the wire, in the order of Anthropic's API reference.

Source: Anthropic's API reference, "Messages" (create, count tokens, streaming) and "Errors".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.request_fields.wire import FunctionName

# --- Request -------------------------------------------------------------------------------------


def _content_kind(value: object) -> str:
    return "text" if isinstance(value, str) else "blocks"


class CacheControl(WireRequest):
    """``cache_control``: accepted; every prefix that a model still holds is reused."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(WireRequest):
    """Fields that the blocks of a request share."""

    cache_control: CacheControl | None = None


class TextBlock(_Block):
    """A block of type ``text``."""

    type: Literal["text"]
    text: str
    citations: Any = None


class Base64Source(WireRequest):
    """``source`` of type ``base64``."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(WireRequest):
    """``source`` of type ``url``."""

    type: Literal["url"]
    url: str


class TextSource(WireRequest):
    """``source`` of type ``text``: a document of plain text."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class ContentSource(WireRequest):
    """``source`` of type ``content``: a document of blocks."""

    type: Literal["content"]
    content: str | list[ResultBlock]


class FileSource(_Block):
    """The source of a block: a file that was uploaded."""

    type: Literal["file"]
    file_id: str


class ImageBlock(_Block):
    """A block of type ``image``."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]


class DocumentBlock(_Block):
    """A block of type ``document``: of files, PDFs, texts and images are read."""

    type: Literal["document"]
    source: Annotated[
        Base64Source | TextSource | ContentSource | UrlSource | FileSource,
        Field(discriminator="type"),
    ]
    title: str | None = None
    context: str | None = None
    citations: Any = None


class SearchResultBlock(_Block):
    """A block of type ``search_result``."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: Any = None


class ToolUseBlock(_Block):
    """A block of type ``tool_use``: a call that the assistant made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: str
    input: dict[str, Any]


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock, Field(discriminator="type")
]


class ToolResultBlock(_Block):
    """A block of type ``tool_result``: the result of the call that it names."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[ResultBlock], Tag("blocks")],
            Discriminator(_content_kind),
        ]
        | None
    ) = None
    is_error: bool | None = None


class ThinkingBlock(_Block):
    """A block of type ``thinking``, with the signature that it came with."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class RedactedThinkingBlock(_Block):
    """A block of type ``redacted_thinking``. No model here writes one, so it is ignored."""

    type: Literal["redacted_thinking"]
    data: str


RequestBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class RequestMessage(WireRequest):
    """``messages[]``. Clients of today also send the role ``system`` there."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[RequestBlock], Tag("blocks")],
        Discriminator(_content_kind),
    ]


class RequestTool(_Block):
    """``tools[]``: a tool of the client's, or, by its ``type``, one that Anthropic defines."""

    type: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,48}$")] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(WireRequest):
    """``tool_choice``; ``name`` is of the type ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireRequest):
    """``thinking``; ``budget_tokens`` is of the type ``enabled``."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(WireRequest):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(WireRequest):
    """``output_config``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(WireRequest):
    """``metadata``."""

    user_id: str | None = None


class _Prompt(WireRequest):
    """What both endpoints have: all that the prompt is made of."""

    model: str
    messages: Annotated[list[RequestMessage], Field(min_length=1, max_length=100_000)]
    system: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[TextBlock], Tag("blocks")],
            Discriminator(_content_kind),
        ]
        | None
    ) = None
    tools: Annotated[list[RequestTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class CountTokensRequest(_Prompt):
    """The body of ``POST /v1/messages/count_tokens``."""


class Thread(WireRequest):
    """``thread``: a conversation that the server would hold between the turns (a beta feature)."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class MessagesRequest(_Prompt):
    """The body of ``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    thread: Thread | None = None


# --- Answer --------------------------------------------------------------------------------------

Tier = Literal["standard", "priority"]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"]


class MessagesUsage(WireObject):
    """``usage``: the tokens of the prompt are ``input_tokens`` and those read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Tier = "standard"


class AnswerText(WireObject):
    """``content[]`` of type ``text``."""

    type: Literal["text"] = "text"
    text: str


class AnswerThinking(WireObject):
    """``content[]`` of type ``thinking``; the signature says that it was written here."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class AnswerToolUse(WireObject):
    """``content[]`` of type ``tool_use``."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessagesAnswer(WireObject):
    """The answer to a request that does not stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesEvent(WireObject):
    """An event of a stream; ``type`` is its name, too. The other fields depend on it."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: MessagesAnswer | None = None
    index: int | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    error: MessagesErrorDetail | None = None


class InputTokens(WireObject):
    """The answer of ``POST /v1/messages/count_tokens``."""

    input_tokens: int


class ErrorDetails(WireObject):
    """``error.details``: what a program may look at."""

    error_code: str


class MessagesErrorDetail(WireObject):
    """``error``."""

    type: str
    message: str
    details: ErrorDetails | None = None


class MessagesError(WireObject):
    """The body of every error."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
