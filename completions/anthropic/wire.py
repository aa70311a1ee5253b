"""The Messages API on the wire, in the order of Anthropic's API reference.

Source: Anthropic's API reference, "Messages" (create, count tokens, streaming) and "Errors".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Discriminator, Field, Tag

from inference_site.core.domain.request import MAX_FUNCTIONS
from inference_site.gateway.api.payload import NO_NUL, Omittable, WireObject, WireRequest
from inference_site.gateway.request_fields.web_search import Location
from inference_site.gateway.request_fields.wire import CallId
from inference_site.mcp.access import MAX_HEADERS_BYTES

# --- Request -------------------------------------------------------------------------------------


BlockT = TypeVar("BlockT")
TextOr = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[BlockT], Tag("blocks")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "blocks"),
]
"""A text, or a list of blocks."""

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
_FOREIGN_TOOLSET = r"^[a-z]{1,32}_toolset_[0-9]{8}$"


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
    """``source`` of type ``file``: a file that was uploaded."""

    type: Literal["file"]
    file_id: str


class ImageBlock(_Block):
    """A block of type ``image``."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]


class Citations(WireRequest):
    """``citations`` of a document or a search result: no answer cites them."""

    enabled: bool | None = None

    def _ignored(self) -> Iterator[str]:
        if self.enabled:
            yield "enabled"
        yield from super()._ignored()


class DocumentBlock(_Block):
    """A block of type ``document``: of files, PDFs, texts and images are read."""

    type: Literal["document"]
    source: Annotated[
        Base64Source | TextSource | ContentSource | UrlSource | FileSource,
        Field(discriminator="type"),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(_Block):
    """A block of type ``search_result``."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: Citations | None = None


class SystemBlock(_Block):
    """A block of type ``mid_conv_system``: instructions in the middle of a conversation."""

    type: Literal["mid_conv_system"]
    content: list[TextBlock]


class ToolUseBlock(_Block):
    """A block of type ``tool_use``: a call that the assistant made."""

    type: Literal["tool_use"]
    id: CallId
    name: str
    input: dict[str, Any]


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock, Field(discriminator="type")
]


class ToolReferenceBlock(_Block):
    """A block of type ``tool_reference``: a tool that the client's own search has found."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolReference(WireRequest):
    """``tool`` of type ``tool_reference``: a tool of the request, or one that a message defines."""

    type: Literal["tool_reference"]
    name: ToolName


class ToolDefinition(WireRequest):
    """``tool`` of type ``tool_definition``: a tool that is not among ``tools``."""

    type: Literal["tool_definition"]
    definition: RequestTool


class ToolAdditionBlock(_Block):
    """A block of type ``tool_addition``: from there on, the model may call the tool."""

    type: Literal["tool_addition"]
    tool: Annotated[ToolReference | ToolDefinition, Field(discriminator="type")]


class ToolRemovalBlock(_Block):
    """A block of type ``tool_removal``: from there on, the model may not call the tool."""

    type: Literal["tool_removal"]
    tool: ToolReference


class ForeignBlock(_Block):
    """A block of what only Anthropic runs or makes. The model is not shown it."""

    type: Literal[
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "browser_state",
        "code_execution_tool_result",
        "compaction",
        "container_upload",
        "fallback",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
    ]

    def _ignored(self) -> Iterator[str]:
        yield self.type


ToolResultContent = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | ForeignBlock,
    Field(discriminator="type"),
]


class ToolResultBlock(_Block):
    """A block of type ``tool_result``: the result of the call that it names."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[ToolResultContent] | None = None
    is_error: bool | None = None


class ServerToolUseBlock(_Block):
    """A block of type ``server_tool_use``: a call that the site has run."""

    type: Literal["server_tool_use"]
    id: CallId
    name: str
    input: dict[str, Any]
    caller: Any = None


class WebSearchResult(WireRequest):
    """A result of a search; what the model was shown of it is in ``encrypted_content``."""

    type: Literal["web_search_result"]
    url: str
    title: str
    encrypted_content: str
    page_age: str | None = None


class WebSearchError(WireRequest):
    """Why a search has no result."""

    type: Literal["web_search_tool_result_error"]
    error_code: str


class WebSearchResultBlock(_Block):
    """A block of type ``web_search_tool_result``, as it came with an answer."""

    type: Literal["web_search_tool_result"]
    tool_use_id: str
    content: Annotated[
        Annotated[list[WebSearchResult], Tag("results")] | Annotated[WebSearchError, Tag("error")],
        Discriminator(lambda value: "results" if isinstance(value, list) else "error"),
    ]
    caller: Any = None


class McpToolUseBlock(_Block):
    """A block of type ``mcp_tool_use``: a call of a tool of an MCP server."""

    type: Literal["mcp_tool_use"]
    id: CallId
    name: str
    server_name: str
    input: dict[str, Any]


class McpToolResultBlock(_Block):
    """A block of type ``mcp_tool_result``."""

    type: Literal["mcp_tool_result"]
    tool_use_id: str
    content: TextOr[TextBlock] | None = None
    is_error: bool | None = None


class ListedTool(WireRequest):
    """A tool as its MCP server lists it."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]


class McpToolListingBlock(WireRequest):
    """A block of type ``mcp_tool_listing``: the tools of a server, which is not asked again."""

    type: Literal["mcp_tool_listing"]
    mcp_server_name: str
    tools: list[ListedTool]


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
    | SystemBlock
    | ToolUseBlock
    | ToolResultBlock
    | ServerToolUseBlock
    | WebSearchResultBlock
    | McpToolUseBlock
    | McpToolResultBlock
    | McpToolListingBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
    | ForeignBlock,
    Field(discriminator="type"),
]


class RequestMessage(WireRequest):
    """``messages[]``. Clients of today also send the role ``system`` there."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[RequestBlock]


class RequestTool(_Block):
    """``tools[]``: a tool of the client's, or, by its ``type``, another one of Anthropic's."""

    type: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,48}$")] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


Domains = Annotated[
    list[Annotated[str, Field(max_length=253, pattern=r"^[\w-]+(\.[\w-]+)*\.?$")]],
    Field(max_length=100),
]
"""Domains, each with its subdomains."""


class ApproximateLocation(Location):
    """``user_location`` of the web search tool."""

    type: Literal["approximate"]


class ServerSearchTool(_Block):
    """``tools[]`` of a type like ``web_search_20250305``: the site searches the web."""

    type: Annotated[str, Field(pattern=r"^web_search_[0-9]{8}$")]
    name: Literal["web_search"]
    max_uses: Annotated[int, Field(ge=1)] | None = None
    allowed_domains: Domains | None = None
    blocked_domains: Domains | None = None
    user_location: ApproximateLocation | None = None


class McpToolConfig(WireRequest):
    """``default_config`` of a toolset, and the values of its ``configs``."""

    enabled: bool | None = None


ServerName = Annotated[str, Field(min_length=1, max_length=256, pattern=NO_NUL)]


class McpToolset(_Block):
    """``tools[]`` of type ``mcp_toolset``: tools of one of the ``mcp_servers``."""

    type: Literal["mcp_toolset"]
    mcp_server_name: ServerName
    default_config: McpToolConfig | None = None
    configs: dict[str, McpToolConfig] | None = None
    tools: list[ListedTool] | None = None


class ForeignToolset(_Block):
    """``tools[]`` of a type like ``browser_toolset_20260801``: several tools, without a name.

    Only Anthropic's models know them.
    """

    type: Annotated[str, Field(pattern=_FOREIGN_TOOLSET)]
    configs: Any = None

    def _ignored(self) -> Iterator[str]:
        yield self.type


def _tool_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "mcp_toolset":
        return "toolset"
    if re.fullmatch(_FOREIGN_TOOLSET, str(kind)):
        return "foreign toolset"
    return "search" if str(kind).startswith("web_search_") else "tool"


AnyTool = Annotated[
    Annotated[RequestTool, Tag("tool")]
    | Annotated[ServerSearchTool, Tag("search")]
    | Annotated[McpToolset, Tag("toolset")]
    | Annotated[ForeignToolset, Tag("foreign toolset")],
    Discriminator(_tool_kind),
]


class McpToolConfiguration(WireRequest):
    """``mcp_servers[].tool_configuration``, which was there before toolsets."""

    enabled: bool | None = None
    allowed_tools: list[str] | None = None


class McpServerDefinition(WireRequest):
    """``mcp_servers[]``: a server by its URL; an extension: by the name of a registered one.

    The token is secret: no dump of the model has it.
    """

    type: Literal["url"]
    name: ServerName
    url: Annotated[str, Field(max_length=2000)] | None = None
    authorization_token: Annotated[str, Field(max_length=MAX_HEADERS_BYTES)] | None = Field(
        None, exclude=True, repr=False
    )
    tool_configuration: McpToolConfiguration | None = None


class ToolChoice(WireRequest):
    """``tool_choice``; ``name`` is of the type ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireRequest):
    """``thinking``; ``budget_tokens`` is of the type ``enabled``.

    A ``display`` of ``updates`` is answered like ``summarized``.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(WireRequest):
    """``output_config.format``, and ``output_format``, its name in older clients."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(WireRequest):
    """``output_config``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(WireRequest):
    """``metadata``."""

    user_id: str | None = None


class Prompt(WireRequest):
    """The fields of both endpoints: all that the prompt is made of."""

    model: str
    messages: Annotated[list[RequestMessage], Field(min_length=1, max_length=100_000)]
    system: TextOr[TextBlock] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_FUNCTIONS)] | None = None
    mcp_servers: Annotated[list[McpServerDefinition], Field(max_length=20)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None


class CountTokensRequest(Prompt):
    """The body of ``POST /v1/messages/count_tokens``."""


class Thread(WireRequest):
    """``thread``: a conversation that the server would hold between the turns (a beta feature)."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class MessagesRequest(Prompt):
    """The body of ``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=0)]
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


class ServerToolUsage(WireObject):
    """``usage.server_tool_use``: what the site has done for the answer."""

    web_search_requests: int
    web_fetch_requests: int = 0


class MessagesUsage(WireObject):
    """``usage``: the prompt has ``input_tokens`` and those read from and written to a cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    server_tool_use: Omittable[ServerToolUsage] = None
    service_tier: Tier = "standard"


class WebCitation(WireObject):
    """``content[].citations[]``: a result of a search that the text cites."""

    type: Literal["web_search_result_location"] = "web_search_result_location"
    url: str
    title: str
    cited_text: str
    encrypted_index: str


class AnswerText(WireObject):
    """``content[]`` of type ``text``."""

    type: Literal["text"] = "text"
    text: str
    citations: Omittable[list[WebCitation]] = None


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


class AnswerServerToolUse(WireObject):
    """``content[]`` of type ``server_tool_use``: a search that the site has made."""

    type: Literal["server_tool_use"] = "server_tool_use"
    id: str
    name: str
    input: dict[str, Any]


class FoundPage(WireObject):
    """``content[].content[]``: a result of a search."""

    type: Literal["web_search_result"] = "web_search_result"
    url: str
    title: str
    encrypted_content: str
    page_age: str | None = None


class SearchFailure(WireObject):
    """``content[].content`` of a search without results."""

    type: Literal["web_search_tool_result_error"] = "web_search_tool_result_error"
    error_code: str


class AnswerSearchResult(WireObject):
    """``content[]`` of type ``web_search_tool_result``."""

    type: Literal["web_search_tool_result"] = "web_search_tool_result"
    tool_use_id: str
    content: list[FoundPage] | SearchFailure


class AnswerMcpToolUse(WireObject):
    """``content[]`` of type ``mcp_tool_use``: a call that the site has made."""

    type: Literal["mcp_tool_use"] = "mcp_tool_use"
    id: str
    name: str
    server_name: str
    input: dict[str, Any]


class McpText(WireObject):
    """``content[].content[]`` of a result."""

    type: Literal["text"] = "text"
    text: str


class AnswerMcpToolResult(WireObject):
    """``content[]`` of type ``mcp_tool_result``."""

    type: Literal["mcp_tool_result"] = "mcp_tool_result"
    tool_use_id: str
    is_error: bool
    content: list[McpText]


class AnswerListedTool(WireObject):
    """``content[].tools[]``: a tool as its MCP server lists it."""

    name: str
    description: str | None
    input_schema: dict[str, Any]


class AnswerMcpToolListing(WireObject):
    """``content[]`` of type ``mcp_tool_listing``: the tools of a server."""

    type: Literal["mcp_tool_listing"] = "mcp_tool_listing"
    mcp_server_name: str
    tools: list[AnswerListedTool]


AnswerBlock = Annotated[
    AnswerText
    | AnswerThinking
    | AnswerToolUse
    | AnswerServerToolUse
    | AnswerSearchResult
    | AnswerMcpToolUse
    | AnswerMcpToolResult
    | AnswerMcpToolListing,
    Field(discriminator="type"),
]


class MessagesAnswer(WireObject):
    """The answer to a request that does not stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
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
