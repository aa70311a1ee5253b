"""From items to the turns of a conversation.

An assistant's turn is several items: what it thought, what it said, what it called. The results of
its calls follow it in the order of the calls, wherever they came.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inference_site.domain import messages as domain
from inference_site.domain import request
from inference_site.domain.custom_tools import custom_arguments, custom_tool
from inference_site.domain.messages import Message, ToolCall
from inference_site.domain.request import Constraint, GenerationRequest
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.capabilities import require_fields, require_media
from inference_site.request_fields.constraint import (
    of_json_object,
    of_json_schema,
    text_constraint,
    to_constraint,
)
from inference_site.request_fields.content import joined, to_file, to_image
from inference_site.request_fields.mapping import (
    ToolPlan,
    only,
    to_grammar,
    to_reasoning_budget,
    to_sampled_request,
    to_stop,
    to_template_vars,
)
from inference_site.request_fields.wire.constraint import JsonObjectFormat
from inference_site.request_fields.wire.content import InputFile
from inference_site.request_fields.wire.tools import GrammarInput
from inference_site.submission.model_access import ResolvedModel
from responses_api.context import PlacedItem
from responses_api.items import IdentifiedItem, ItemData
from responses_api.sealing import unseal
from responses_api.wire.requests import (
    AllowedTools,
    ContextFields,
    CustomTool,
    FunctionTool,
    HostedChoice,
    HostedTool,
    JsonSchemaFormat,
    NamedTool,
    ResponseRequest,
    Tool,
)

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


def to_tool_plan(body: ContextFields) -> ToolPlan:
    """Return the plan. Raise InvalidRequestError for a choice of a tool that is not there.

    Tools of OpenAI's servers do not run here: the model does not see them, and cannot be forced to
    call one.
    """
    tools = tuple(_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedTool))
    match body.tool_choice:
        case "none":
            return ToolPlan()
        case "required":
            return ToolPlan(_some(tools), must_call=True)
        case NamedTool(name=name):
            return ToolPlan(only(tools, [name]), must_call=True)
        case AllowedTools(mode=mode, tools=allowed):
            names = [tool.name for tool in allowed if isinstance(tool, NamedTool)]
            chosen = only(tools, names)
            must_call = mode == "required"
            return ToolPlan(_some(chosen) if must_call else chosen, must_call)
        case HostedChoice(type=kind):
            raise InvalidRequestError(
                f"Invalid value for 'tool_choice': tools of the type '{kind}' do not run here.",
                param="tool_choice",
                code="unsupported_value",
            )
        case _:
            return ToolPlan(tools)


def hosted_tools(body: ContextFields) -> list[str]:
    """Return names for the tools that are left out, for a header of the answer."""
    return [f"tools.{tool.type}" for tool in body.tools or () if isinstance(tool, HostedTool)]


def _some(tools: tuple[request.Tool, ...]) -> tuple[request.Tool, ...]:
    if not tools:
        raise InvalidRequestError(
            "Invalid value for 'tool_choice': there is no tool that could be called.",
            param="tool_choice",
        )
    return tools


def _tool(tool: Tool) -> request.Tool:
    match tool:
        case CustomTool():
            given = tool.format if isinstance(tool.format, GrammarInput) else None
            return custom_tool(tool.name, tool.description, to_grammar(given))
        case FunctionTool():
            is_strict, parameters = bool(tool.strict), tool.parameters or {}
            return request.Tool(tool.name, tool.description, parameters, is_strict=is_strict)
        case HostedTool():
            raise TypeError("A hosted tool is not for a model.")


ENCRYPTED_REASONING = "reasoning.encrypted_content"


def to_generation_request(
    body: ResponseRequest, items: Sequence[PlacedItem], model: ResolvedModel, project_id: int
) -> GenerationRequest:
    """Return what the engine is asked. Raise InvalidRequestError for fields that contradict."""
    plan = to_tool_plan(body)
    constraint = to_constraint(body, _formatted(body))
    require_fields(model, "chat", body, () if plan.tools else ("tools",))
    messages = to_messages(body.instructions, items, project_id)
    require_media(model, messages)
    return replace(
        to_sampled_request(body, model.spec),
        messages=messages,
        max_output_tokens=body.max_output_tokens,
        stop=to_stop(body.stop),
        # They are computed only for who includes them in the answer.
        top_logprobs=body.top_logprobs or 0 if body.includes_logprobs else None,
        constraint=text_constraint(constraint, plan),
        template_vars=to_template_vars(
            {**_switches(body), "enable_thinking": body.enable_thinking},
            body.chat_template_kwargs,
            body.template_vars,
        ),
        reasoning_budget=to_reasoning_budget(body.reasoning_budget, body.thinking_token_budget),
        tools=plan.tools,
        must_call=plan.must_call,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        truncate=body.truncation == "auto",
    )


def to_counting_request(
    body: ContextFields, items: Sequence[PlacedItem], model: ResolvedModel, project_id: int
) -> GenerationRequest:
    """Return what the engine is asked in order to count the tokens of a context."""
    require_fields(model, "render", body, unused=("tools", "text.format"))
    messages = to_messages(body.instructions, items, project_id)
    require_media(model, messages)
    return GenerationRequest(
        model=model.spec.id,
        operation="render",
        messages=messages,
        template_vars=to_template_vars(_switches(body)),
        tools=to_tool_plan(body).tools,
    )


def _formatted(body: ResponseRequest) -> Constraint | None:
    match body.text.format if body.text else None:
        case JsonObjectFormat() as given:
            return of_json_object(given, "text.format")
        case JsonSchemaFormat() as given:
            return of_json_schema(given.json_schema, "text.format.schema", given)
        case _:
            return None


def _switches(body: ContextFields) -> dict[str, Any]:
    return {
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
    }


_TASK = (
    "Summarise the conversation that follows, so that it can be continued from the summary alone. "
    "Keep names, numbers, decisions, results of tools and what is still to be done."
)


_MAX_TOKENS = 1024


def to_summary_request(
    instructions: str | None, items: Sequence[IdentifiedItem], model: ResolvedModel
) -> GenerationRequest:
    """Return what the engine is asked."""
    transcript = "\n".join(filter(None, (_line(item.data) for item in items)))
    may_think = "chat_template" in model.capabilities
    return GenerationRequest(
        model=model.spec.id,
        messages=(
            Message("system", f"{instructions}\n\n{_TASK}" if instructions else _TASK),
            Message("user", transcript),
        ),
        sampling=model.spec.sampling,
        max_output_tokens=min(_MAX_TOKENS, model.spec.context_length // 4),
        template_vars={"enable_thinking": False} if may_think else {},
    )


def _line(data: ItemData) -> str:
    match data:
        case {"type": "message", "role": role, "content": parts}:
            texts = (part.get("text") or part.get("refusal") or "[media]" for part in parts)
            return f"{role}: {''.join(texts)}"
        case {"type": "function_call", "name": name, "arguments": arguments}:
            return f"assistant calls {name}: {arguments}"
        case {"type": "custom_tool_call", "name": name, "input": text}:
            return f"assistant calls {name}: {text}"
        case {"output": output}:
            return f"result: {output if isinstance(output, str) else json.dumps(output)}"
        case _:
            return ""
