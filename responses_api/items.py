"""Items: from the wire to the form that is stored and shown, which is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference_site.generations.queue import new_id
from responses_api.wire.items import (
    CompactionItem,
    Content,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputFile,
    InputImage,
    InputItem,
    InputText,
    ItemReference,
    MessageItem,
    OutputText,
    Part,
    ReasoningItem,
    Refusal,
)

_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
    "compaction": "cmp_",
}

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


def to_data(item: InputItem) -> ItemData:
    """Return the item with all that the API shows of it. References must be resolved before."""
    match item:
        case MessageItem():
            return _message(item)
        case FunctionCallItem():
            return {**_call(item), "arguments": item.arguments}
        case CustomToolCallItem():
            return {**_call(item), "input": item.input}
        case FunctionCallOutputItem() | CustomToolCallOutputItem():
            return _completed(item.type, call_id=item.call_id, output=_output(item.output))
        case ReasoningItem():
            return _reasoning(item)
        case CompactionItem():
            return {"type": "compaction", "encrypted_content": item.encrypted_content}
        case ItemReference():
            raise TypeError("A reference has no data of its own.")


def _completed(type_: str, **fields: Any) -> ItemData:
    return {"type": type_, "status": "completed", **fields}


def _call(item: FunctionCallItem | CustomToolCallItem) -> ItemData:
    status = "incomplete" if item.status == "incomplete" else "completed"
    return {"type": item.type, "status": status, "call_id": item.call_id, "name": item.name}


def _message(item: MessageItem) -> ItemData:
    kind = "output_text" if item.role == "assistant" else "input_text"
    if isinstance(item.content, str):
        parts = [_text(kind, item.content)]
    else:
        parts = [_part(part, kind) for part in item.content]
    phase = {} if item.phase is None else {"phase": item.phase}
    return _completed("message", role=item.role, content=parts, **phase)


def _output(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(part, "input_text") for part in content]


def _text(kind: str, text: str) -> dict[str, Any]:
    if kind == "output_text":
        return output_text(text)
    return {"type": "input_text", "text": text}


def output_text(text: str) -> dict[str, Any]:
    """Return a part with what an assistant said."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _part(part: Part, text_kind: str) -> dict[str, Any]:
    match part:
        case InputText() | OutputText():
            return _text(text_kind, part.text)
        case Refusal():
            return {"type": "refusal", "refusal": part.refusal}
        case InputImage():
            shown = {"detail": part.detail or "auto", "image_url": part.image_url}
            return {"type": "input_image", **shown, **_given(file_id=part.file_id)}
        case InputFile():
            given = _given(
                filename=part.filename,
                file_data=part.file_data,
                file_id=part.file_id,
                file_url=part.file_url,
            )
            return {"type": "input_file", **given}


def _reasoning(item: ReasoningItem) -> ItemData:
    data: ItemData = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": part.text} for part in item.summary or ()],
    }
    if item.content:
        data["content"] = [{"type": "reasoning_text", "text": part.text} for part in item.content]
    return {**data, **_given(encrypted_content=item.encrypted_content)}


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
