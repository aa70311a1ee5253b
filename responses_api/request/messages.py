"""From items to the turns of a conversation.

An assistant's turn is several items: what it thought, what it said, what it called. The results of
its calls follow it in the order of the calls, wherever they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_site.domain import messages as domain
from inference_site.domain.messages import Message, ToolCall
from inference_site.domain.request import custom_arguments
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.content import joined, to_file, to_image
from inference_site.request_fields.wire.content import InputFile
from responses_api.output.sealing import unseal
from responses_api.state.context import PlacedItem

_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


@dataclass(slots=True)
class _Turn:
    """What an assistant's turn has come to so far."""

    reasoning: str | None = None
    text: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    is_answered: bool = False

    @property
    def is_empty(self) -> bool:
        return self.reasoning is None and self.text is None and not self.calls


def to_messages(
    instructions: str | None, items: Sequence[PlacedItem], project_id: int
) -> tuple[Message, ...]:
    """Return the turns. Raise InvalidRequestError for a call without its result, and for a result
    without its call."""
    fold = _Fold(items, project_id)
    if instructions:
        fold.messages.append(Message("system", instructions))
    for item in items:
        fold.take(item)
    fold.end_turn()
    return tuple(fold.messages)


class _Fold:
    def __init__(self, items: Sequence[PlacedItem], project_id: int) -> None:
        self.messages: list[Message] = []
        self._project_id = project_id
        self._turn = _Turn()
        self._outputs: dict[str, list[PlacedItem]] = {}
        for item in items:
            if item.data["type"] in _OUTPUTS:
                self._outputs.setdefault(item.data["call_id"], []).append(item)
        self._called = {i.data["call_id"] for i in items if i.data["type"] in _CALLS}

    def take(self, item: PlacedItem) -> None:
        """Add the next item."""
        data = item.data
        match data["type"]:
            case "message" if data["role"] == "assistant":
                self._assistant(_plain_text(data["content"]))
            case "message":
                self.end_turn()
                role: domain.Role = "user" if data["role"] == "user" else "system"
                text, parts = self._content(data["content"], f"{item.param}.content")
                self.messages.append(Message(role, text, parts=parts))
            case "function_call" | "custom_tool_call":
                self._call(item)
            case "function_call_output" | "custom_tool_call_output":
                self._check_output(item)
            case "reasoning":
                self.end_turn()
                self._turn.reasoning = self._reasoning(item)
            case "compaction":
                self.end_turn()
                param = f"{item.param}.encrypted_content"
                summary = unseal(data["encrypted_content"], self._project_id, param)
                self.messages.append(Message("system", summary))

    def end_turn(self) -> None:
        """Add the assistant's turn, if there is one, and the results of its calls."""
        turn, self._turn = self._turn, _Turn()
        if turn.is_empty:
            return
        text = turn.text if turn.calls else turn.text or ""
        self.messages.append(
            Message("assistant", text, tool_calls=tuple(turn.calls), reasoning=turn.reasoning)
        )
        for call in turn.calls:
            self.messages.append(self._result(call))

    def _assistant(self, text: str) -> None:
        if self._turn.text is not None or self._turn.calls:
            self.end_turn()
        self._turn.text = text

    def _call(self, item: PlacedItem) -> None:
        data = item.data
        if data["status"] != "completed" and data["call_id"] not in self._outputs:
            return  # The token limit or a failure cut it, and nobody answered it.
        if self._turn.is_answered:  # The model made this one when it knew the result of another.
            self.end_turn()
        arguments = (
            custom_arguments(data["input"])
            if data["type"] == "custom_tool_call"
            else data["arguments"]
        )
        self._turn.calls.append(ToolCall(data["call_id"], data["name"], arguments))

    def _result(self, call: ToolCall) -> Message:
        outputs = self._outputs.get(call.id)
        if outputs is None:
            raise InvalidRequestError(
                f"No tool output found for function call {call.id}.", param="input"
            )
        # Some clients number their calls anew each turn: the first call has the first result.
        output = outputs.pop(0) if len(outputs) > 1 else outputs[0]
        given = output.data["output"]
        text: str | None = None
        parts: tuple[domain.Part, ...] = ()
        if isinstance(given, str):
            text = given
        else:
            text, parts = self._content(given, f"{output.param}.output")
        return Message("tool", text, call.name, tool_call_id=call.id, parts=parts)

    def _check_output(self, item: PlacedItem) -> None:
        call_id = item.data["call_id"]
        if call_id not in self._called:
            raise InvalidRequestError(
                f"No tool call found for function call output with call_id {call_id}.",
                param="input",
            )
        self._turn.is_answered |= any(call.id == call_id for call in self._turn.calls)

    def _reasoning(self, item: PlacedItem) -> str:
        data = item.data
        if content := data.get("content"):
            return _plain_text(content)
        if sealed := data.get("encrypted_content"):
            return unseal(sealed, self._project_id, f"{item.param}.encrypted_content")
        return _plain_text(data.get("summary", []))

    def _content(
        self, parts: list[dict[str, Any]], where: str
    ) -> tuple[str | None, tuple[domain.Part, ...]]:
        """Return the text, or None and the parts when there is more than text."""
        return joined([self._part(part, f"{where}[{i}]") for i, part in enumerate(parts)])

    def _part(self, part: dict[str, Any], where: str) -> domain.Part:
        match part["type"]:
            case "input_image":
                if not part["image_url"]:
                    raise InvalidRequestError(
                        f"Missing required parameter: '{where}.image_url'.",
                        param=f"{where}.image_url",
                        code="missing_required_parameter",
                    )
                return to_image(part["image_url"], f"{where}.image_url")
            case "input_file":
                return self._file(part, where)
            case _:
                return domain.TextPart(part.get("text") or part.get("refusal") or "")

    def _file(self, part: dict[str, Any], where: str) -> domain.Part:
        if "file_url" in part:
            raise InvalidRequestError(
                f"Unsupported parameter: '{where}.file_url'; send 'file_data'.",
                param=f"{where}.file_url",
                code="unsupported_parameter",
            )
        fields = {key: part.get(key) for key in ("file_data", "file_id", "filename")}
        return to_file(InputFile.model_validate(fields), where)


def _plain_text(parts: list[dict[str, Any]]) -> str:
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts)
