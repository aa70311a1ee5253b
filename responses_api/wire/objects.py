"""Objects that the server sends: items, responses, stream events, conversations.

Source: API reference, "Responses", "Streaming" and "Conversations". The database stores items in
the same form, those of the input too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from inference_site.gateway.api.payload import Omittable, WireObject
from inference_site.gateway.api.schema import ErrorDetail, LostErrorDetail
from inference_site.gateway.request_fields.moderation import Judged
from responses_api.wire.input_items import ItemStatus

WireT = TypeVar("WireT", bound=WireObject)


def changed(model: WireT, **fields: Any) -> WireT:
    """Return a copy with these values, not validated. Raise TypeError for unknown fields."""
    if unknown := fields.keys() - type(model).__pydantic_fields__.keys():
        raise TypeError(f"{type(model).__name__} has no {', '.join(unknown)}.")
    return model.model_copy(update=fields)


class TopLogprob(WireObject):
    """A likely token and the natural logarithm of its probability, null if that is zero."""

    token: str
    logprob: float | None
    bytes: list[int]


class LogprobEntry(TopLogprob):
    """The chosen token, and the likeliest tokens in its position."""

    top_logprobs: list[TopLogprob]


class FileCitation(WireObject):
    """An annotation of type ``file_citation``; ``index`` is its place in the part's text."""

    type: Literal["file_citation"] = "file_citation"
    index: int
    file_id: str
    filename: str


class UrlCitation(WireObject):
    """An annotation of type ``url_citation``; the indexes are characters of the part's text."""

    type: Literal["url_citation"] = "url_citation"
    start_index: int
    end_index: int
    url: str
    title: str


class OutputText(WireObject):
    """A part of type ``output_text``."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[UrlCitation | FileCitation]
    logprobs: list[LogprobEntry]


class Refusal(WireObject):
    """A part of type ``refusal``."""

    type: Literal["refusal"] = "refusal"
    refusal: str


class TextPart(WireObject):
    """A text of reasoning or of the input."""

    type: Literal["reasoning_text", "summary_text", "input_text"]
    text: str


class InputImage(WireObject):
    """A part of type ``input_image``."""

    type: Literal["input_image"] = "input_image"
    detail: str
    image_url: str | None
    file_id: Omittable[str] = None


class InputFile(WireObject):
    """A part of type ``input_file``."""

    type: Literal["input_file"] = "input_file"
    filename: Omittable[str] = None
    file_data: Omittable[str] = None
    file_id: Omittable[str] = None
    file_url: Omittable[str] = None


Part = Annotated[
    OutputText | Refusal | TextPart | InputImage | InputFile, Field(discriminator="type")
]


class Message(WireObject):
    """An item of type ``message``."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant", "user", "system", "developer"]
    content: list[Part]
    phase: Omittable[str] = None


class RefusalMessage(Message):
    """A message that is a refusal, while it has no content yet. Clients see a ``Message``."""


class ReasoningItem(WireObject):
    """An item of type ``reasoning``."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Omittable[ItemStatus] = None
    summary: list[TextPart]
    content: Omittable[list[TextPart]] = None
    encrypted_content: Omittable[str] = None


class Call(WireObject):
    """A call of a tool that the client runs; its output refers to it by ``call_id``."""

    id: str
    type: str
    status: ItemStatus
    call_id: str


class NamedCall(Call):
    """A call of a tool that the client has named, maybe in a namespace."""

    name: str
    namespace: Omittable[str] = None
    caller: Omittable[dict[str, Any]] = None


class FunctionCall(NamedCall):
    """An item of type ``function_call``; ``arguments`` is JSON text."""

    type: Literal["function_call"] = "function_call"
    arguments: str


class CustomToolCall(NamedCall):
    """An item of type ``custom_tool_call``; ``input`` is plain text."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    input: str


class ShellAction(WireObject):
    """The commands of a shell call, which the client may run at the same time."""

    commands: list[str]
    timeout_ms: int | None
    max_output_length: int | None


class ShellCall(Call):
    """An item of type ``shell_call``."""

    type: Literal["shell_call"] = "shell_call"
    action: ShellAction
    environment: dict[str, Any] | None


class LocalShellAction(WireObject):
    """The command of a local shell call: the program and its arguments."""

    type: Literal["exec"] = "exec"
    command: list[str]
    env: dict[str, str]
    timeout_ms: Omittable[int] = None
    working_directory: Omittable[str] = None
    user: Omittable[str] = None


class LocalShellCall(Call):
    """An item of type ``local_shell_call``."""

    type: Literal["local_shell_call"] = "local_shell_call"
    action: LocalShellAction


class PatchOperation(WireObject):
    """What a patch does to one file; ``diff`` is left out of a deletion."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: Omittable[str] = None


class ApplyPatchCall(Call):
    """An item of type ``apply_patch_call``; one that was interrupted stays ``in_progress``."""

    type: Literal["apply_patch_call"] = "apply_patch_call"
    status: Literal["in_progress", "completed"]
    operation: PatchOperation


class ToolSearchCall(Call):
    """An item of type ``tool_search_call``, for the client to execute."""

    type: Literal["tool_search_call"] = "tool_search_call"
    execution: Literal["client"] = "client"
    arguments: dict[str, Any]


class SiteCallItem(WireObject):
    """A call of a tool that the site runs; most items have its result too."""

    id: str
    type: str


class HostedToolSearchCall(SiteCallItem):
    """An item of type ``tool_search_call`` that the site has executed."""

    type: Literal["tool_search_call"] = "tool_search_call"
    status: ItemStatus
    call_id: None = None
    execution: Literal["server"] = "server"
    arguments: dict[str, Any]


class ToolSearchOutput(SiteCallItem):
    """An item of type ``tool_search_output``: the tools that the search before it has loaded."""

    type: Literal["tool_search_output"] = "tool_search_output"
    status: ItemStatus
    call_id: None = None
    execution: Literal["server"] = "server"
    tools: list[dict[str, Any]]


class WebSearchCall(SiteCallItem):
    """An item of type ``web_search_call``. ``action`` has the ``type`` of what was done."""

    type: Literal["web_search_call"] = "web_search_call"
    status: Literal["in_progress", "searching", "completed", "failed"]
    action: dict[str, Any]


class FileSearchCall(SiteCallItem):
    """An item of type ``file_search_call``; ``results`` only if ``include`` asked for them."""

    type: Literal["file_search_call"] = "file_search_call"
    status: Literal["in_progress", "searching", "completed", "incomplete", "failed"]
    queries: list[str]
    results: list[dict[str, Any]] | None = None


class McpCall(SiteCallItem):
    """An item of type ``mcp_call``; ``arguments`` is JSON text."""

    type: Literal["mcp_call"] = "mcp_call"
    status: Literal["in_progress", "calling", "completed", "incomplete", "failed"]
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: dict[str, Any] | None = None
    approval_request_id: str | None = None


class McpListTools(SiteCallItem):
    """An item of type ``mcp_list_tools``; ``tools`` is empty until they are known."""

    type: Literal["mcp_list_tools"] = "mcp_list_tools"
    server_label: str
    tools: list[dict[str, Any]]
    error: Omittable[str] = None


class McpApprovalRequest(SiteCallItem):
    """An item of type ``mcp_approval_request``: a call that waits for a person's approval."""

    type: Literal["mcp_approval_request"] = "mcp_approval_request"
    server_label: str
    name: str
    arguments: str


class CallOutput(WireObject):
    """The result of a call."""

    id: str
    type: Literal["function_call_output", "custom_tool_call_output"]
    status: ItemStatus
    call_id: str | None
    output: str | list[Part]
    name: Omittable[str] = None
    namespace: Omittable[str] = None
    caller: Omittable[dict[str, Any]] = None


class Compaction(WireObject):
    """An item of type ``compaction``: an encrypted summary, or the whole context before it."""

    id: str
    type: Literal["compaction"] = "compaction"
    encrypted_content: str


OutputItem = Annotated[
    Message
    | ReasoningItem
    | FunctionCall
    | CustomToolCall
    | ShellCall
    | LocalShellCall
    | ApplyPatchCall
    | Annotated[ToolSearchCall | HostedToolSearchCall, Field(discriminator="execution")]
    | ToolSearchOutput
    | WebSearchCall
    | FileSearchCall
    | McpCall
    | McpListTools
    | McpApprovalRequest
    | Compaction,
    Field(discriminator="type"),
]
AnyItem = OutputItem | CallOutput
_OWN_FORM = (
    *("message", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "reasoning", "compaction"),
)


class KeptItem(WireObject):
    """An item of any other type that a client has sent; it has the fields that the client gave."""

    model_config = ConfigDict(extra="allow", frozen=True)

    id: str
    type: Annotated[str, Field(json_schema_extra={"not": {"enum": list(_OWN_FORM)}})]


ListedItem = AnyItem | KeptItem
"""What lists of items have."""


class InputTokensDetails(WireObject):
    """``usage.input_tokens_details``."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(WireObject):
    """``usage.output_tokens_details``."""

    reasoning_tokens: int


class ResponseUsage(WireObject):
    """``usage``: cached tokens count as input too, and reasoning tokens as output."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(WireObject):
    """``error`` of a response that failed."""

    code: str
    message: str


class IncompleteDetails(WireObject):
    """``incomplete_details`` of an incomplete response."""

    reason: Literal["max_output_tokens", "content_filter"]


class ReasoningEcho(WireObject):
    """``reasoning`` of the request."""

    effort: str | None
    summary: str | None
    context: Omittable[str] = None


class TextEcho(WireObject):
    """``text`` of the request."""

    format: dict[str, Any]
    verbosity: Omittable[str] = None


class ConversationId(WireObject):
    """``conversation``."""

    id: str


class Moderation(WireObject):
    """``moderation`` of a response: the results for its input and its output."""

    input: Annotated[Judged, Field(discriminator="type")]
    output: Annotated[Judged, Field(discriminator="type")]


class ResponseObject(WireObject):
    """A response. It has the same fields in every status."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = Field(description="Set only when the status is `completed`.")
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: Literal["default", "flex", "priority"]
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]
    conversation: Omittable[ConversationId] = None
    moderation: Omittable[Moderation] = None
    prompt: Omittable[dict[str, Any]] = None
    user: Omittable[str] = None


class DeletedResponse(WireObject):
    """The answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(WireObject):
    """The number of tokens of an input."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class CompactedResponse(WireObject):
    """A compacted conversation: the user's messages, and an encrypted summary of the rest."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[AnyItem]
    usage: ResponseUsage


StateEventType = Literal[
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]


class Event(WireObject):
    """Fields of all events. The events of a stream are numbered from 0."""

    type: str
    sequence_number: int


class ResponseStateEvent(Event):
    """The status of the response, with the whole object."""

    type: StateEventType
    response: ResponseObject


class OutputItemEvent(Event):
    """An item has begun, without content, or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ItemEvent(Event):
    """Fields of events about an item."""

    item_id: str
    output_index: int


class PartEvent(ItemEvent):
    """Fields of events about a content part."""

    content_index: int


class ContentPartEvent(PartEvent):
    """A content part has begun, without text, or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | Refusal | TextPart = Field(discriminator="type")


class OutputTextDelta(PartEvent):
    """A piece of a message's text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str
    logprobs: list[LogprobEntry]


class AnnotationAdded(PartEvent):
    """An annotation of a message's text."""

    type: Literal["response.output_text.annotation.added"] = "response.output_text.annotation.added"
    annotation_index: int
    annotation: UrlCitation | FileCitation


class OutputTextDone(PartEvent):
    """The whole text of a message."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str
    logprobs: list[LogprobEntry]


class ReasoningTextDelta(PartEvent):
    """A piece of the reasoning."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    delta: str


class ReasoningTextDone(PartEvent):
    """The whole reasoning."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    text: str


class RefusalDelta(PartEvent):
    """A piece of a refusal."""

    type: Literal["response.refusal.delta"] = "response.refusal.delta"
    delta: str


class RefusalDone(PartEvent):
    """The whole refusal."""

    type: Literal["response.refusal.done"] = "response.refusal.done"
    refusal: str


class SummaryEvent(ItemEvent):
    """Fields of events about a part of the summary of reasoning."""

    summary_index: int


class SummaryPartEvent(SummaryEvent):
    """A part of the summary has begun, without text, or has ended."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    part: TextPart
    status: Omittable[Literal["incomplete"]] = None


class SummaryTextDelta(SummaryEvent):
    """The text of a part of the summary: one delta, sent when the reasoning has ended."""

    type: Literal["response.reasoning_summary_text.delta"] = "response.reasoning_summary_text.delta"
    delta: str


class SummaryTextDone(SummaryEvent):
    """The whole text of a part of the summary."""

    type: Literal["response.reasoning_summary_text.done"] = "response.reasoning_summary_text.done"
    text: str


class FunctionCallArgumentsDelta(ItemEvent):
    """A piece of the arguments of a function call."""

    type: Literal["response.function_call_arguments.delta"] = (
        "response.function_call_arguments.delta"
    )
    delta: str


class FunctionCallArgumentsDone(ItemEvent):
    """The arguments of a function call."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    arguments: str
    name: str


class CustomToolCallInputDelta(ItemEvent):
    """A piece of the input of a custom tool."""

    type: Literal["response.custom_tool_call_input.delta"] = "response.custom_tool_call_input.delta"
    delta: str


class CustomToolCallInputDone(ItemEvent):
    """The input of a custom tool."""

    type: Literal["response.custom_tool_call_input.done"] = "response.custom_tool_call_input.done"
    input: str


class ShellCommandEvent(Event):
    """Fields of events about one command of a shell call."""

    output_index: int
    command_index: int


class ShellCommandAdded(ShellCommandEvent):
    """A command has begun, without its text."""

    type: Literal["response.shell_call_command.added"] = "response.shell_call_command.added"
    command: str


class ShellCommandDelta(ShellCommandEvent):
    """The text of a command: one delta for each command, sent when the call is complete."""

    type: Literal["response.shell_call_command.delta"] = "response.shell_call_command.delta"
    delta: str


class ShellCommandDone(ShellCommandEvent):
    """A whole command."""

    type: Literal["response.shell_call_command.done"] = "response.shell_call_command.done"
    command: str


class SiteCallEvent(ItemEvent):
    """The state of a call that the site runs."""

    type: Literal[
        "response.web_search_call.in_progress",
        "response.web_search_call.searching",
        "response.web_search_call.completed",
        "response.file_search_call.in_progress",
        "response.file_search_call.searching",
        "response.file_search_call.completed",
        "response.mcp_call.in_progress",
        "response.mcp_call.completed",
        "response.mcp_call.failed",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.mcp_list_tools.failed",
    ]


class McpCallArgumentsDelta(ItemEvent):
    """A piece of the arguments of a call of an MCP tool."""

    type: Literal["response.mcp_call_arguments.delta"] = "response.mcp_call_arguments.delta"
    delta: str


class McpCallArgumentsDone(ItemEvent):
    """The arguments of a call of an MCP tool."""

    type: Literal["response.mcp_call_arguments.done"] = "response.mcp_call_arguments.done"
    arguments: str


class ErrorEvent(Event):
    """The response has failed. Some clients read the error's fields here, others in ``error``."""

    type: Literal["error"] = "error"
    code: str
    message: str
    param: str | None
    error: LostErrorDetail | ErrorDetail


DeltaEvent = (
    OutputTextDelta
    | ReasoningTextDelta
    | RefusalDelta
    | FunctionCallArgumentsDelta
    | CustomToolCallInputDelta
    | McpCallArgumentsDelta
)
ResponseEvent = Annotated[
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | DeltaEvent
    | OutputTextDone
    | ReasoningTextDone
    | RefusalDone
    | SummaryPartEvent
    | SummaryTextDelta
    | SummaryTextDone
    | FunctionCallArgumentsDone
    | CustomToolCallInputDone
    | ShellCommandAdded
    | ShellCommandDelta
    | ShellCommandDone
    | AnnotationAdded
    | SiteCallEvent
    | McpCallArgumentsDone
    | ErrorEvent,
    Field(discriminator="type"),
]


class Conversation(WireObject):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(WireObject):
    """The answer to the deletion of a conversation; its responses keep their items."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
