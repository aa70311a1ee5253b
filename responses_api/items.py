"""Items in the form in which they are stored and shown: from the items of requests to that form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from django.conf import settings
from django.db.models import Q, TextField
from django.db.models.functions import Cast

from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.gateway.submission.context_bound import text_bytes
from inference_site.runs.queue import new_id
from responses_api.models import Item
from responses_api.wire import input_items as given
from responses_api.wire import objects as shown
from responses_api.wire.input_items import InputItem, ItemReference

_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
    "compaction": "cmp_",
}

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
    return IdentifiedItem(new_id(_PREFIXES[data["type"]]), data)


def to_data(item: InputItem) -> ItemData:
    """Return the stored form of an item. Raise TypeError for a reference."""
    return _to_object(item).model_dump(exclude={"id"})


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
        case given.FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
            status = _call_status(item)
            return shown.FunctionCall(
                id="", status=status, call_id=call_id, name=name, arguments=arguments
            )
        case given.CustomToolCallItem(call_id=call_id, name=name, input=text):
            status = _call_status(item)
            return shown.CustomToolCall(
                id="", status=status, call_id=call_id, name=name, input=text
            )
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


def _call_status(call: given.FunctionCallItem | given.CustomToolCallItem) -> given.ItemStatus:
    return "incomplete" if call.status == "incomplete" else "completed"


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


def new_items(project_id: int, items: Sequence[InputItem]) -> list[IdentifiedItem]:
    """Return the items of a request, each with a new id; a reference is replaced by a copy.

    Raise NotFoundError for a reference to an item that is not stored, InvalidRequestError if the
    copies have more than ``MAX_BODY_BYTES`` together.
    """
    stored = _read_references(project_id, {i.id for i in items if isinstance(i, ItemReference)})
    new, copied = list[IdentifiedItem](), 0
    for item in items:
        if not isinstance(item, ItemReference):
            new.append(new_item(to_data(item)))
            continue
        if item.id not in stored:
            raise NotFoundError(
                f"Item with id '{item.id[:100]}' not found. Items are not persisted when `store` "
                "is set to false.",
                param="input",
            )
        data, size = stored[item.id]
        copied += size
        if copied > settings.MAX_BODY_BYTES:
            raise InvalidRequestError(
                "The items that 'input' refers to are too large: together they have more than "
                f"{settings.MAX_BODY_BYTES} bytes.",
                param="input",
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
    for public_id, text in rows.values_list("public_id", Cast("data", TextField())).iterator(100):
        size += len(text)
        found[public_id] = orjson.loads(text), len(text)
        if size > settings.MAX_BODY_BYTES:
            break  # Too large already: each item is copied at least once.
    return found


def size_of(data: ItemData) -> int:
    """Return the bytes of an item's text that any chat template puts into the prompt.

    Reasoning does not count, because most templates leave it out, nor does encrypted content.
    """
    texts = [data.get(name) or "" for name in ("name", "arguments", "input")]
    content = data.get("content" if data.get("type") == "message" else "output")
    if isinstance(content, str):
        texts.append(content)
    else:
        texts += [part.get("text") or part.get("refusal") or "" for part in content or ()]
    return sum(map(text_bytes, texts))


def is_instruction(data: ItemData) -> bool:
    """Whether the item is a message of the system or the developer."""
    return data.get("type") == "message" and data.get("role") in ("system", "developer")
