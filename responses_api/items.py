"""Items in the form in which they are stored and shown: from the items of requests to that form.

A compaction is an item with sealed content (see ``core.storage.cipher``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from django.conf import settings
from django.db import transaction
from django.db.models import Q, TextField
from django.db.models.functions import Cast
from pydantic import TypeAdapter, ValidationError

from inference_site.core.domain.compaction import CompactedContext
from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.core.storage.cipher import seal, unreadable, unseal
from inference_site.gateway.api.payload import places_of
from inference_site.gateway.submission.context_bound import text_bytes
from inference_site.runs.queue import new_id
from responses_api.models import Item
from responses_api.prompt_items import texts_of
from responses_api.wire import input_items as given
from responses_api.wire import objects as shown
from responses_api.wire.input_items import InputItem, ItemReference, path_of

_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
    "compaction": "cmp_",
    "compaction_trigger": "cmpt_",
    "shell_call": "sh_",
    "shell_call_output": "sho_",
    "local_shell_call": "lsh_",
    "local_shell_call_output": "lsho_",
    "apply_patch_call": "apc_",
    "apply_patch_call_output": "apco_",
    "tool_search_call": "tsc_",
    "tool_search_output": "tso_",
    "additional_tools": "at_",
    "web_search_call": "ws_",
    "file_search_call": "fs_",
    "code_interpreter_call": "ci_",
    "image_generation_call": "ig_",
    "computer_call": "cu_",
    "computer_call_output": "cuo_",
    "mcp_call": "mcp_",
    "mcp_list_tools": "mcpl_",
    "mcp_approval_request": "mcpr_",
    "mcp_approval_response": "mcpa_",
    "program": "prog_",
    "program_output": "progo_",
    "agent_message": "amsg_",
    "multi_agent_call": "mac_",
    "multi_agent_call_output": "maco_",
}
_OTHER_PREFIX = "item_"
_STATUS = {"status": "completed"}
_CLIENT_SEARCH = {**_STATUS, "execution": "client", "call_id": None}
_LISTED_FIELDS: dict[str, dict[str, Any]] = {
    "shell_call": {**_STATUS, "environment": None},
    "shell_call_output": {**_STATUS, "max_output_length": None},
    "local_shell_call": _STATUS,
    "local_shell_call_output": _STATUS,
    "apply_patch_call": _STATUS,
    "tool_search_call": _CLIENT_SEARCH,
    "tool_search_output": _CLIENT_SEARCH,
    "computer_call_output": _STATUS,
    "code_interpreter_call": {"code": None, "outputs": None},
    "image_generation_call": {"result": None},
}
"""Fields that lists of items always have, and requests may leave out, with their values."""

_WITH_PARTS = ("message", "function_call_output", "custom_tool_call_output")
_WHOLE = "context."
"""The beginning of sealed content that is a ``SealedContext``: it is recognised without the key."""

TextType = Literal["input_text", "output_text"]
ItemData = dict[str, Any]
"""An item as the API shows it, without its id."""


@dataclass(frozen=True, slots=True)
class IdentifiedItem:
    """An item and its id."""

    id: str
    data: ItemData

    def wire(self) -> dict[str, Any]:
        """Return the item as the API shows it."""
        return {"id": self.id, **self.data}


def from_wire(item: Mapping[str, Any]) -> IdentifiedItem:
    """Return the item that the API shows like this."""
    return IdentifiedItem(item["id"], {key: item[key] for key in item if key != "id"})


def new_item(data: ItemData) -> IdentifiedItem:
    """Give an item a new id."""
    return IdentifiedItem(new_id(_PREFIXES.get(data["type"], _OTHER_PREFIX)), data)


def to_data(item: InputItem) -> ItemData:
    """Return the stored form of an item. Raise TypeError for a reference."""
    if not isinstance(item, given.KeptItem):
        return _to_object(item).model_dump(exclude={"id"})
    data = {**_LISTED_FIELDS.get(item.type, {}), **item.data}
    if isinstance(item, given.ShellCallItem):
        data["action"] = {"timeout_ms": None, "max_output_length": None, **data["action"]}
    return data


def _to_object(item: InputItem) -> shown.AnyItem:
    match item:
        case given.MessageItem(role=role, content=content, phase=phase):
            kind: TextType = "output_text" if role == "assistant" else "input_text"
            parts = (
                [_text(kind, content)]
                if isinstance(content, str)
                else [_part(part, kind) for part in content]
            )
            return shown.Message(id="", status="completed", role=role, content=parts, phase=phase)
        case given.FunctionCallItem():
            return shown.FunctionCall(id="", arguments=item.arguments, **_call_fields(item))
        case given.CustomToolCallItem():
            return shown.CustomToolCall(id="", input=item.input, **_call_fields(item))
        case given.FunctionCallOutputItem() | given.CustomToolCallOutputItem():
            output = item.output
            return shown.CallOutput(
                id="",
                type=item.type,
                status="completed",
                call_id=item.call_id,
                output=output
                if isinstance(output, str)
                else [_part(part, "input_text") for part in output],
                name=getattr(item, "name", None),
                namespace=getattr(item, "namespace", None),
                caller=item.caller,
            )
        case given.ReasoningItem(summary=summary, content=content, encrypted_content=encrypted):
            texts = [shown.TextPart(type="reasoning_text", text=t.text) for t in content or ()]
            return shown.ReasoningItem(
                id="",
                summary=[shown.TextPart(type="summary_text", text=s.text) for s in summary or ()],
                content=texts or None,
                encrypted_content=encrypted,
            )
        case given.CompactionItem(encrypted_content=encrypted):
            return shown.Compaction(id="", encrypted_content=encrypted)
        case given.ItemReference():
            raise TypeError("A reference has no data of its own.")
    raise TypeError(f"The item {item.type} is kept as it is.")


def _call_fields(call: given.FunctionCallItem | given.CustomToolCallItem) -> dict[str, Any]:
    names = ("call_id", "name", "namespace", "caller")
    status = "incomplete" if call.status == "incomplete" else "completed"
    return {"status": status, **{name: getattr(call, name) for name in names}}


def _part(part: given.Part, text_type: TextType) -> shown.Part:
    match part:
        case given.InputText(text=text) | given.OutputText(text=text):
            return _text(text_type, text)
        case given.Refusal(refusal=refusal):
            return shown.Refusal(refusal=refusal)
        case given.InputImage(image_url=url, file_id=file_id, detail=detail):
            return shown.InputImage(detail=detail or "auto", image_url=url, file_id=file_id)
        case given.InputFile(filename=name, file_data=data, file_id=file_id, file_url=url):
            return shown.InputFile(filename=name, file_data=data, file_id=file_id, file_url=url)


def _text(type_: TextType, text: str) -> shown.Part:
    if type_ == "output_text":
        return shown.OutputText(text=text, annotations=[], logprobs=[])
    return shown.TextPart(type=type_, text=text)


def new_items(
    project_id: int, items: Sequence[InputItem], param: str = "input"
) -> list[IdentifiedItem]:
    """Return the items of a request, each with a new id; a reference is replaced by a copy.

    ``param`` is the request's field with the items. Raise NotFoundError for a reference to an item
    that is not stored, InvalidRequestError if the copies have more than ``MAX_BODY_BYTES``
    together.
    """
    stored = _read_references(project_id, {i.id for i in items if isinstance(i, ItemReference)})
    new, copied = list[IdentifiedItem](), 0
    for position, item in enumerate(items):
        if not isinstance(item, ItemReference):
            new.append(new_item(to_data(item)))
            continue
        if item.id not in stored:
            raise NotFoundError(
                f"Item with id '{item.id[:100]}' not found. Items are not persisted when `store` "
                "is set to false.",
                param=f"{path_of(places_of(items)[position], param)}.id",
            )
        data, size = stored[item.id]
        copied += size
        if copied > settings.MAX_BODY_BYTES:
            raise InvalidRequestError(
                f"The items that '{param}' refers to are too large: together they have more than "
                f"{settings.MAX_BODY_BYTES} bytes.",
                param=param,
            )
        new.append(new_item(data))
    return new


def _read_references(project_id: int, ids: set[str]) -> dict[str, tuple[ItemData, int]]:
    """Return the stored items with these ids, each with its size in bytes as JSON."""
    if not ids:
        return {}
    deleted = Q(response__deleted_at__isnull=False, conversation__isnull=True)
    rows = Item.objects.filter(~deleted, project_id=project_id, public_id__in=ids)
    found, size = dict[str, tuple[ItemData, int]](), 0
    texts = rows.values_list("public_id", Cast("data", TextField()))
    with transaction.atomic():  # Rows are read in pieces only in a transaction.
        for public_id, text in texts.iterator(100):
            size += len(text)
            found[public_id] = orjson.loads(text), len(text)
            if size > settings.MAX_BODY_BYTES:
                break  # Too large already: each item is copied at least once.
    return found


def size_of(data: ItemData) -> int:
    """Return the bytes of an item's text that any chat template puts into the prompt.

    Reasoning does not count, because most templates leave it out, nor does encrypted content.
    """
    kind = data.get("type", "")
    content = data.get("content" if kind == "message" else "output")
    texts = list(texts_of(data))
    if isinstance(content, str) and kind == "message":
        texts.append(content)
    elif isinstance(content, list) and kind in _WITH_PARTS:
        texts += [part.get("text") or part.get("refusal") or "" for part in content]
    return sum(map(text_bytes, texts))


def is_instruction(data: ItemData) -> bool:
    """Whether the item is a message of the system or the developer."""
    return data.get("type") == "message" and data.get("role") in ("system", "developer")


@dataclass(frozen=True, slots=True)
class SealedContext:
    """A compacted context. ``items`` are those before it that gave the model tools.

    A compaction that a response begins with holds the whole context: what comes before it is not
    sent to the model any more. One of ``POST /v1/responses/compact`` is a summary, which stands
    beside the messages of the user.
    """

    context: CompactedContext
    items: list[dict[str, Any]] = field(default_factory=list)


_CONTEXT = TypeAdapter(SealedContext)


def holds_context(item: dict[str, Any]) -> bool:
    """Whether the data of an item is a compaction that holds the whole context before it."""
    is_compaction = item.get("type") == "compaction"
    return is_compaction and str(item["encrypted_content"]).startswith(_WHOLE)


def seal_context(sealed: SealedContext, project_id: int) -> str:
    """Return the context as sealed content for a project."""
    return _WHOLE + seal(_CONTEXT.dump_json(sealed).decode(), project_id)


def unseal_context(sealed: str, project_id: int, param: str) -> SealedContext:
    """Return the context. Raise InvalidRequestError as ``unseal`` does."""
    text = unseal(sealed.removeprefix(_WHOLE), project_id, param)
    try:
        return _CONTEXT.validate_json(text)
    except ValidationError as exc:
        raise unreadable(param) from exc


def require_readable(item: ItemData, project_id: int, param: str) -> None:
    """Raise InvalidRequestError if the item has sealed content that no prompt can be made of.

    Sealed reasoning is not read if the item has the same text as ``content``.
    """
    if item["type"] not in ("compaction", "reasoning") or item.get("content"):
        return
    sealed, param = item.get("encrypted_content"), f"{param}.encrypted_content"
    if holds_context(item):
        unseal_context(item["encrypted_content"], project_id, param)
    elif sealed or item["type"] == "compaction":
        unseal(sealed or "", project_id, param)


def split_sealed(sealed: str) -> tuple[str, str]:
    """Return the prefix of sealed content, which may be empty, and the rest, for ``unseal``."""
    prefix = _WHOLE if sealed.startswith(_WHOLE) else ""
    return prefix, sealed.removeprefix(prefix)
