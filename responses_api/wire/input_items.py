"""Input items as clients send them. Source: API reference, "Responses", ``input``.

Clients also send back the output items of earlier responses, with nulls and with fields that their
libraries add; those fields are dropped. Messages of chat completions are accepted too, and become
items.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from inference_site.gateway.api.payload import NO_NUL, MovedEntries, WireRequest
from inference_site.gateway.request_fields.wire import CallId, response_part
from responses_api.wire.tools import Tool

ObjectId = Annotated[str, Field(max_length=256, pattern=NO_NUL)]
"""The id of a stored object. It has no NUL, which PostgreSQL refuses."""
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,50}")


class Lenient(WireRequest):
    """Base of items and their parts: unknown fields are dropped and not reported."""

    @property
    def ignored_params(self) -> list[str]:
        """Always empty: the client's library added the unknown fields, not the client."""
        return []

    def _ignored(self) -> Any:
        return iter(())


class InputText(Lenient):
    """A part of type ``input_text``, which may also be called ``text``."""

    type: Literal["input_text", "text"]
    text: str


class OutputText(Lenient):
    """A part of type ``output_text``, of an assistant's message."""

    type: Literal["output_text"]
    text: str


class Refusal(Lenient):
    """A part of type ``refusal``."""

    type: Literal["refusal"]
    refusal: str


class InputImage(Lenient):
    """A part of type ``input_image``."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputFile(Lenient):
    """A part of type ``input_file``; ``file_data`` is base64 or a ``data:`` URL."""

    type: Literal["input_file"]
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None


Part = Annotated[
    InputText | OutputText | Refusal | InputImage | InputFile,
    Field(discriminator="type"),
    BeforeValidator(response_part),
]

Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),
]


class MessageItem(Lenient):
    """A message; its ``type`` may be left out. ``phase`` is only stored and returned."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Lenient):
    """A call of a function. It is ``incomplete`` if the token limit or a failure ended it."""

    type: Literal["function_call"]
    call_id: CallId
    name: str
    arguments: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    status: ItemStatus | None = None


class FunctionCallOutputItem(Lenient):
    """The result of a function call; without ``call_id``, what a tool said by itself."""

    type: Literal["function_call_output"]
    call_id: CallId | None = None
    output: Content
    name: str | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class CustomToolCallItem(Lenient):
    """A call of a custom tool, whose input is one text."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: str
    input: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    status: ItemStatus | None = None


class CustomToolCallOutputItem(Lenient):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: CallId
    output: Content
    caller: dict[str, Any] | None = None


class ReasoningText(Lenient):
    """A part of a reasoning item, of its ``content`` or of its ``summary``."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Lenient):
    """Reasoning; ``encrypted_content`` is the same text, encrypted by this server."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class CompactionItem(Lenient):
    """The summary of a compacted conversation, encrypted by this server."""

    type: Literal["compaction"]
    encrypted_content: str


class KeptItem(Lenient):
    """Base of the items that are stored as they came, with all their fields.

    The types below declare the fields that are read to put the item into the prompt.
    """

    type: str

    @property
    def data(self) -> dict[str, Any]:
        """The fields that were given, without the id and without nulls."""
        given = self.model_dump(exclude_unset=True, exclude={"id"})
        return {name: value for name, value in given.items() if value is not None}


class ShellAction(Lenient):
    """``action`` of a shell call."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCallItem(KeptItem):
    """A call of the tool ``shell``."""

    type: Literal["shell_call"]
    call_id: CallId
    action: ShellAction


class ShellOutcome(Lenient):
    """How a command ended."""

    type: Literal["exit", "timeout"]
    exit_code: int | None = None


class ShellOutput(Lenient):
    """What one command wrote."""

    stdout: str
    stderr: str
    outcome: ShellOutcome


class ShellCallOutputItem(KeptItem):
    """The results of the commands of a shell call."""

    type: Literal["shell_call_output"]
    call_id: CallId
    output: list[ShellOutput]


class LocalShellAction(Lenient):
    """``action`` of a call of the local shell."""

    type: Literal["exec"] = "exec"
    command: list[str]
    env: dict[str, str] | None = None


class LocalShellCallItem(KeptItem):
    """A call of the tool ``local_shell``."""

    type: Literal["local_shell_call"]
    call_id: CallId
    action: LocalShellAction


class LocalShellCallOutputItem(KeptItem):
    """The result of a call of the local shell; ``id`` may be the id of the call."""

    type: Literal["local_shell_call_output"]
    call_id: CallId | None = None
    output: str

    @property
    def data(self) -> dict[str, Any]:
        """As of every kept item, with the id of the call in its own field."""
        given = (self.model_extra or {}).get("id")
        return {"call_id": given if isinstance(given, str) else None, **super().data}


class PatchOperation(Lenient):
    """``operation`` of a patch."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class ApplyPatchCallItem(KeptItem):
    """A call of the tool ``apply_patch``."""

    type: Literal["apply_patch_call"]
    call_id: CallId
    operation: PatchOperation


class ApplyPatchCallOutputItem(KeptItem):
    """The result of a patch."""

    type: Literal["apply_patch_call_output"]
    call_id: CallId
    status: Literal["completed", "failed"]
    output: str | None = None


class ToolSearchCallItem(KeptItem):
    """A search for deferred tools."""

    type: Literal["tool_search_call"]
    call_id: CallId | None = None
    arguments: Any


class _ToolsItem(KeptItem):
    """Base of the items that give the model tools; unknown fields of these are reported."""

    tools: list[Tool]

    def _ignored(self) -> Any:
        for place, tool in enumerate(self.tools):
            yield from (f"tools[{place}].{name}" for name in tool._ignored())


class ToolSearchOutputItem(_ToolsItem):
    """The tools that a search has loaded."""

    type: Literal["tool_search_output"]
    call_id: CallId | None = None


class AdditionalToolsItem(_ToolsItem):
    """Tools that the model has from this item on."""

    type: Literal["additional_tools"]
    role: str = "developer"


class HostedItem(KeptItem):
    """An item that OpenAI's own tools and agents make: a call, its result, an approval, a program,
    a message between agents.
    """

    call_id: CallId | None = None
    approval_request_id: ObjectId | None = None


class CompactionTriggerItem(KeptItem):
    """Asks for a compaction of all items before it, in place of an answer.

    It must be the last item; elsewhere it has no effect.
    """

    type: Literal["compaction_trigger"]


class UnknownItem(KeptItem):
    """An item of a type that is not known here, or that does nothing here.

    It is stored and left out of the prompt; the response's header names it.
    """

    def _ignored(self) -> Any:
        yield self.type if _HEADER_NAME.fullmatch(self.type) else "type"


class ItemReference(Lenient):
    """A reference to a stored item; its ``type`` may be left out."""

    type: Literal["item_reference"] | None = None
    id: ObjectId


_TYPES = frozenset(
    {
        *("message", "function_call", "function_call_output", "custom_tool_call"),
        *("custom_tool_call_output", "reasoning", "compaction", "item_reference", "shell_call"),
        *("shell_call_output", "local_shell_call", "local_shell_call_output"),
        *("apply_patch_call", "apply_patch_call_output", "tool_search_call"),
        *("tool_search_output", "additional_tools", "compaction_trigger"),
    }
)
"""Types of items that have a class of their own."""
_HOSTED_TYPES = frozenset(
    {
        *("file_search_call", "web_search_call", "image_generation_call", "mcp_call"),
        *("code_interpreter_call", "mcp_list_tools", "mcp_approval_request"),
        *("mcp_approval_response", "computer_call", "computer_call_output", "program"),
        *("program_output", "agent_message", "multi_agent_call", "multi_agent_call_output"),
    }
)


def _item_kind(value: object) -> str | None:
    """Return the tag of an item's class: its type, ``hosted`` or ``unknown``."""
    if isinstance(value, dict):
        is_reference = "id" in value and "role" not in value
        kind = value.get("type")
    else:
        is_reference, kind = isinstance(value, ItemReference), getattr(value, "type", None)
    if kind is None:
        return "item_reference" if is_reference else "message"
    if not isinstance(kind, str):
        return "unknown"  # Its validation names the type.
    return kind if kind in _TYPES else "hosted" if kind in _HOSTED_TYPES else "unknown"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ShellCallItem, Tag("shell_call")]
    | Annotated[ShellCallOutputItem, Tag("shell_call_output")]
    | Annotated[LocalShellCallItem, Tag("local_shell_call")]
    | Annotated[LocalShellCallOutputItem, Tag("local_shell_call_output")]
    | Annotated[ApplyPatchCallItem, Tag("apply_patch_call")]
    | Annotated[ApplyPatchCallOutputItem, Tag("apply_patch_call_output")]
    | Annotated[ToolSearchCallItem, Tag("tool_search_call")]
    | Annotated[ToolSearchOutputItem, Tag("tool_search_output")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[CompactionTriggerItem, Tag("compaction_trigger")]
    | Annotated[HostedItem, Tag("hosted")]
    | Annotated[UnknownItem, Tag("unknown")],
    Discriminator(_item_kind),
]


class ChatFunction(Lenient):
    """``tool_calls[].function``."""

    name: str
    arguments: str


class ChatFunctionCall(Lenient):
    """``tool_calls[]`` of a function."""

    id: CallId
    type: Literal["function"] = "function"
    function: ChatFunction


class ChatCustom(Lenient):
    """``tool_calls[].custom``."""

    name: str
    input: str


class ChatCustomCall(Lenient):
    """``tool_calls[]`` of a custom tool."""

    id: CallId
    type: Literal["custom"]
    custom: ChatCustom


def _call_kind(value: object) -> str:
    kind = value.get("type", "function") if isinstance(value, dict) else ""
    return kind if isinstance(kind, str) else ""


ChatCall = Annotated[
    Annotated[ChatFunctionCall, Tag("function")] | Annotated[ChatCustomCall, Tag("custom")],
    Discriminator(_call_kind),
]


class CallingMessage(Lenient):
    """A message of the role ``assistant`` with ``tool_calls``."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ChatCall], Field(min_length=1)]


class ResultMessage(Lenient):
    """A message of the role ``tool``."""

    role: Literal["tool"]
    tool_call_id: CallId
    content: Content


def _kind(value: object) -> str:
    if isinstance(value, dict) and value.get("type") in (None, "message"):
        if value.get("role") == "tool":
            return "result"
        if value.get("role") == "assistant" and value.get("tool_calls"):
            return "calling"
    return "item"


def path_of(place: int | None, field: str = "input") -> str:
    """Return the path of an item for errors, by its position in the list that was sent.

    An item that was not sent came with the prompt template.
    """
    return "prompt" if place is None else f"{field}[{place}]"


def _to_items(given: list[Any]) -> list[InputItem]:
    """Replace the messages of chat completions by items."""
    items: list[InputItem] = []
    places: list[int | None] = []
    custom = set[str]()  # The ids of calls of custom tools so far.
    for place, entry in enumerate(given):
        match entry:
            case CallingMessage(content=content, tool_calls=calls):
                if content:
                    items.append(MessageItem(role="assistant", content=content))
                items += map(_to_call_item, calls)
            case ResultMessage(tool_call_id=id_, content=output):
                if id_ in custom:  # The message itself does not say the type of its call.
                    items.append(
                        CustomToolCallOutputItem(
                            type="custom_tool_call_output", call_id=id_, output=output
                        )
                    )
                else:
                    items.append(
                        FunctionCallOutputItem(
                            type="function_call_output", call_id=id_, output=output
                        )
                    )
            case item:
                items.append(item)
        new = items[len(places) :]
        custom |= {item.call_id for item in new if isinstance(item, CustomToolCallItem)}
        places += [place] * len(new)
    return items if len(items) == len(given) else MovedEntries(items, places)


def _to_call_item(call: ChatFunctionCall | ChatCustomCall) -> InputItem:
    if isinstance(call, ChatCustomCall):
        custom = call.custom
        return CustomToolCallItem(
            type="custom_tool_call", call_id=call.id, name=custom.name, input=custom.input
        )
    function = call.function
    return FunctionCallItem(
        type="function_call", call_id=call.id, name=function.name, arguments=function.arguments
    )


if TYPE_CHECKING:
    InputItems = list[InputItem]
else:
    # Messages of chat completions are valid input, and validation replaces them.
    InputItems = Annotated[
        list[
            Annotated[
                Annotated[CallingMessage, Tag("calling")]
                | Annotated[ResultMessage, Tag("result")]
                | Annotated[InputItem, Tag("item")],
                Discriminator(_kind),
            ]
        ],
        AfterValidator(_to_items),
    ]
