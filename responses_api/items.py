"""Items: from those that are given to the form that is stored and shown, which is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from django.conf import settings
from django.db.models import Q, TextField
from django.db.models.functions import Cast

from inference_site.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.generations.queue import new_id
from inference_site.submission.context_bound import text_bytes
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
"""An item as the API shows it, but for its id."""


@dataclass(frozen=True, slots=True)
class IdentifiedItem:
    """An item and its id."""

    id: str
    data: ItemData

    def wire(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        return {"id": self.id, **self.data}


def from_wire(item: Mapping[str, Any]) -> IdentifiedItem:
    """Return the item that is shown as this."""
    return IdentifiedItem(item["id"], {key: item[key] for key in item if key != "id"})


def new_item(data: ItemData) -> IdentifiedItem:
    """Give an item an id."""
    return IdentifiedItem(new_id(_PREFIXES[data["type"]]), data)


def to_data(item: given.InputItem) -> ItemData:
    """Return the item with all that the API shows of it. References must be resolved before."""
    return _shown(item, "").model_dump(exclude={"id"})


def size_of(data: ItemData) -> int:
    """Return how many bytes of text every template shows of an item.

    Nothing of what the assistant thought, which most leave out, and of what is sealed.
    """
    return sum(map(text_bytes, _texts(data)))


def _texts(data: ItemData) -> Iterator[str]:
    for name in ("name", "arguments", "input"):
        yield data.get(name) or ""
    content = data.get("content" if data.get("type") == "message" else "output")
    if isinstance(content, str):
        yield content
    else:
        yield from (part.get("text") or part.get("refusal") or "" for part in content or ())


def is_instruction(data: ItemData) -> bool:
    """Whether it is a message of the system or of the developer."""
    return data.get("type") == "message" and data.get("role") in ("system", "developer")


def _shown(item: given.InputItem, id_: str) -> shown.AnyItem:
    match item:
        case given.MessageItem(role=role, content=content, phase=phase):
            kind: TextType = "output_text" if role == "assistant" else "input_text"
            parts = [_text(kind, content)] if isinstance(content, str) else _parts(content, kind)
            return shown.Message(id=id_, status="completed", role=role, content=parts, phase=phase)
        case given.FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
            return shown.FunctionCall(
                id=id_, status=_status(item), call_id=call_id, name=name, arguments=arguments
            )
        case given.CustomToolCallItem(call_id=call_id, name=name, input=text):
            return shown.CustomToolCall(
                id=id_, status=_status(item), call_id=call_id, name=name, input=text
            )
        case given.FunctionCallOutputItem() | given.CustomToolCallOutputItem():
            content = item.output
            output = content if isinstance(content, str) else _parts(content, "input_text")
            return shown.CallOutput(
                id=id_, type=item.type, status="completed", call_id=item.call_id, output=output
            )
        case given.ReasoningItem(summary=summary, content=thoughts, encrypted_content=sealed):
            return shown.ReasoningItem(
                id=id_,
                summary=[shown.TextPart(type="summary_text", text=s.text) for s in summary or ()],
                content=[shown.TextPart(type="reasoning_text", text=t.text) for t in thoughts or ()]
                or None,
                encrypted_content=sealed,
            )
        case given.CompactionItem(encrypted_content=sealed):
            return shown.Compaction(id=id_, encrypted_content=sealed)
        case given.ItemReference():
            raise TypeError("A reference has no data of its own.")


def _status(call: given.FunctionCallItem | given.CustomToolCallItem) -> given.ItemStatus:
    return "incomplete" if call.status == "incomplete" else "completed"


def _parts(parts: list[given.Part], text_type: TextType) -> list[shown.Part]:
    return [_part(part, text_type) for part in parts]


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


def new_items(project_id: int, given: Sequence[InputItem]) -> list[IdentifiedItem]:
    """Return the items of a request, each with an id of its own. Raise NotFoundError for a
    reference to an item that is not there."""
    referred = _referred(project_id, {i.id for i in given if isinstance(i, ItemReference)})
    new, copied = list[IdentifiedItem](), 0
    for item in given:
        if not isinstance(item, ItemReference):
            new.append(new_item(to_data(item)))
            continue
        if item.id not in referred:
            raise NotFoundError(
                f"Item with id '{item.id[:100]}' not found. Items are not persisted when `store` "
                "is set to false.",
                param="input",
            )
        data, size = referred[item.id]
        copied += size
        if copied > settings.MAX_BODY_BYTES:
            raise InvalidRequestError(
                "The items that 'input' refers to are too large: together they have more than "
                f"{settings.MAX_BODY_BYTES} bytes.",
                param="input",
            )
        new.append(new_item(data))
    return new


def _referred(project_id: int, ids: set[str]) -> dict[str, tuple[ItemData, int]]:
    """Return the stored items with these ids, each with its size in bytes as JSON."""
    if not ids:
        return {}
    hidden = Q(response__deleted_at__isnull=False, conversation__isnull=True)
    rows = Item.objects.filter(~hidden, project_id=project_id, public_id__in=ids)
    found, size = dict[str, tuple[ItemData, int]](), 0
    for public_id, text in rows.values_list("public_id", Cast("data", TextField())).iterator(100):
        size += len(text)
        found[public_id] = orjson.loads(text), len(text)
        if size > settings.MAX_BODY_BYTES:
            break  # Each of them is copied at least once, which is refused.
    return found
