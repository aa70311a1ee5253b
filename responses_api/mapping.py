"""From a request and its context to the generation request: messages, tools, constraint.

An assistant's turn is several items (reasoning, message, calls), and one message for the engine.
The outputs of its calls follow that message in the order of the calls, wherever they were.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inference_site.core.domain import messages as domain
from inference_site.core.domain import request
from inference_site.core.domain.messages import Message, ToolCall
from inference_site.core.domain.request import (
    Constraint,
    GenerationRequest,
    custom_arguments,
    custom_tool,
)
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.request_fields.capabilities import require_fields, require_media
from inference_site.gateway.request_fields.constraint import (
    json_object_constraint,
    json_schema_constraint,
    to_constraint,
)
from inference_site.gateway.request_fields.mapping import (
    ToolPlan,
    join_parts,
    select_tools,
    text_constraint,
    to_file,
    to_grammar,
    to_image,
    to_reasoning_budget,
    to_sampled_request,
    to_stop,
    to_template_vars,
)
from inference_site.gateway.request_fields.wire import GrammarInput, InputFile, JsonObjectFormat
from inference_site.gateway.submission.model_access import ResolvedModel
from responses_api.context import ContextItem
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
)

ENCRYPTED_REASONING = "reasoning.encrypted_content"
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_SUMMARY_TASK = (
    "Summarise the conversation that follows, so that it can be continued from the summary alone. "
    "Keep names, numbers, decisions, results of tools and what is still to be done."
)
_MAX_SUMMARY_TOKENS = 1024


def to_generation_request(
    body: ResponseRequest, items: Sequence[ContextItem], model: ResolvedModel, project_id: int
) -> GenerationRequest:
    """Return the request for the engine. Raise InvalidRequestError for contradictory fields."""
    plan = to_tool_plan(body)
    format_: Constraint | None = None
    match body.text.format if body.text else None:
        case JsonObjectFormat() as given:
            format_ = json_object_constraint(given, "text.format")
        case JsonSchemaFormat() as given:
            format_ = json_schema_constraint(given.json_schema, "text.format.schema", given)
    constraint = to_constraint(body, format_)
    require_fields(model, "chat", body, () if plan.tools else ("tools",))
    messages = to_messages(body.instructions, items, project_id)
    require_media(model, messages)
    return replace(
        to_sampled_request(body, model.spec),
        messages=messages,
        max_output_tokens=body.max_output_tokens,
        stop=to_stop(body.stop),
        # Engines compute them only if the answer includes them.
        top_logprobs=body.top_logprobs or 0 if body.includes_logprobs else None,
        constraint=text_constraint(constraint, plan),
        template_vars=to_template_vars(
            {**_template_switches(body), "enable_thinking": body.enable_thinking},
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
    body: ContextFields, items: Sequence[ContextItem], model: ResolvedModel, project_id: int
) -> GenerationRequest:
    """Return the request to render the prompt of a context, in order to count its tokens."""
    require_fields(model, "render", body, unused=("tools", "text.format"))
    messages = to_messages(body.instructions, items, project_id)
    require_media(model, messages)
    return GenerationRequest(
        model=model.spec.id,
        operation="render",
        messages=messages,
        template_vars=to_template_vars(_template_switches(body)),
        tools=to_tool_plan(body).tools,
    )


def _template_switches(body: ContextFields) -> dict[str, Any]:
    return {
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
    }


def to_summary_request(
    instructions: str | None, items: Sequence[IdentifiedItem], model: ResolvedModel
) -> GenerationRequest:
    """Return the request to summarise a conversation, for a compaction."""
    transcript = "\n".join(filter(None, (_transcript_line(item.data) for item in items)))
    has_template = "chat_template" in model.capabilities
    return GenerationRequest(
        model=model.spec.id,
        messages=(
            Message(
                "system", f"{instructions}\n\n{_SUMMARY_TASK}" if instructions else _SUMMARY_TASK
            ),
            Message("user", transcript),
        ),
        sampling=model.spec.sampling,
        max_output_tokens=min(_MAX_SUMMARY_TOKENS, model.spec.context_length // 4),
        template_vars={"enable_thinking": False} if has_template else {},
    )


def _transcript_line(data: ItemData) -> str:
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


def to_tool_plan(body: ContextFields) -> ToolPlan:
    """Return the tools that the model sees, and whether it must call one.

    Hosted tools are left out. Raise InvalidRequestError if ``tool_choice`` requires a tool that is
    not there.
    """
    tools = tuple(_to_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedTool))
    match body.tool_choice:
        case "none":
            return ToolPlan()
        case "required":
            return ToolPlan(_require_any(tools), must_call=True)
        case NamedTool(name=name):
            return ToolPlan(select_tools(tools, [name]), must_call=True)
        case AllowedTools(mode=mode, tools=allowed):
            allowed_tools = select_tools(
                tools, [t.name for t in allowed if isinstance(t, NamedTool)]
            )
            must_call = mode == "required"
            return ToolPlan(_require_any(allowed_tools) if must_call else allowed_tools, must_call)
        case HostedChoice(type=kind):
            raise InvalidRequestError(
                f"Invalid value for 'tool_choice': tools of the type '{kind}' do not run here.",
                param="tool_choice",
                code="unsupported_value",
            )
        case _:
            return ToolPlan(tools)


def _require_any(tools: tuple[request.Tool, ...]) -> tuple[request.Tool, ...]:
    if not tools:
        raise InvalidRequestError(
            "Invalid value for 'tool_choice': there is no tool that could be called.",
            param="tool_choice",
        )
    return tools


def _to_tool(tool: FunctionTool | CustomTool) -> request.Tool:
    if isinstance(tool, CustomTool):
        grammar = tool.format if isinstance(tool.format, GrammarInput) else None
        return custom_tool(tool.name, tool.description, to_grammar(grammar))
    is_strict, parameters = bool(tool.strict), tool.parameters or {}
    return request.Tool(tool.name, tool.description, parameters, is_strict=is_strict)


def hosted_tools(body: ContextFields) -> list[str]:
    """Return the names of the hosted tools, which are ignored, for the header that lists these."""
    return [f"tools.{tool.type}" for tool in body.tools or () if isinstance(tool, HostedTool)]


def to_messages(
    instructions: str | None, items: Sequence[ContextItem], project_id: int
) -> tuple[Message, ...]:
    """Return the messages of a context.

    Raise InvalidRequestError for a call without its output, and for an output without its call.
    """
    builder = _MessageBuilder(items, project_id)
    if instructions:
        builder.messages.append(Message("system", instructions))
    for item in items:
        builder.add(item)
    builder.end_turn()
    return tuple(builder.messages)


@dataclass(slots=True)
class _Turn:
    """The items of an assistant's turn so far. ``is_answered``: one of its calls has its output."""

    reasoning: str | None = None
    text: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    is_answered: bool = False


class _MessageBuilder:
    def __init__(self, items: Sequence[ContextItem], project_id: int) -> None:
        self.messages: list[Message] = []
        self._project_id = project_id
        self._turn = _Turn()
        self._outputs: dict[str, list[ContextItem]] = {}
        for item in items:
            if item.data["type"] in _OUTPUTS:
                self._outputs.setdefault(item.data["call_id"], []).append(item)
        self._called = {i.data["call_id"] for i in items if i.data["type"] in _CALLS}

    def add(self, item: ContextItem) -> None:
        """Add the next item."""
        data = item.data
        match data["type"]:
            case "message" if data["role"] == "assistant":
                if self._turn.text is not None or self._turn.calls:
                    self.end_turn()
                self._turn.text = _plain_text(data["content"])
            case "message":
                self.end_turn()
                role: domain.Role = "user" if data["role"] == "user" else "system"
                text, parts = _to_content(data["content"], f"{item.param}.content")
                self.messages.append(Message(role, text, parts=parts))
            case "function_call" | "custom_tool_call":
                self._add_call(data)
            case "function_call_output" | "custom_tool_call_output":
                call_id = data["call_id"]
                if call_id not in self._called:
                    raise InvalidRequestError(
                        f"No tool call found for function call output with call_id {call_id}.",
                        param="input",
                    )
                self._turn.is_answered |= any(call.id == call_id for call in self._turn.calls)
            case "reasoning":
                self.end_turn()
                if content := data.get("content"):
                    self._turn.reasoning = _plain_text(content)
                elif data.get("encrypted_content"):
                    self._turn.reasoning = self._unseal(item)
                else:
                    self._turn.reasoning = _plain_text(data.get("summary", []))
            case "compaction":
                self.end_turn()
                self.messages.append(Message("system", self._unseal(item)))

    def end_turn(self) -> None:
        """Add the message of the assistant's turn, if any, and the outputs of its calls."""
        turn, self._turn = self._turn, _Turn()
        if turn.reasoning is None and turn.text is None and not turn.calls:
            return
        text = turn.text if turn.calls else turn.text or ""
        self.messages.append(
            Message("assistant", text, tool_calls=tuple(turn.calls), reasoning=turn.reasoning)
        )
        for call in turn.calls:
            self.messages.append(self._output_of(call))

    def _add_call(self, data: ItemData) -> None:
        if data["status"] != "completed" and data["call_id"] not in self._outputs:
            return  # The token limit or a failure ended it, and the client did not answer it.
        if self._turn.is_answered:  # The model made this call after the output of another.
            self.end_turn()
        arguments = (
            custom_arguments(data["input"])
            if data["type"] == "custom_tool_call"
            else data["arguments"]
        )
        self._turn.calls.append(ToolCall(data["call_id"], data["name"], arguments))

    def _output_of(self, call: ToolCall) -> Message:
        outputs = self._outputs.get(call.id)
        if outputs is None:
            raise InvalidRequestError(
                f"No tool output found for function call {call.id}.", param="input"
            )
        # Some clients reuse the ids of calls in each turn: the first call has the first output.
        item = outputs.pop(0) if len(outputs) > 1 else outputs[0]
        output = item.data["output"]
        text: str | None = None
        parts: tuple[domain.Part, ...] = ()
        if isinstance(output, str):
            text = output
        else:
            text, parts = _to_content(output, f"{item.param}.output")
        return Message("tool", text, call.name, tool_call_id=call.id, parts=parts)

    def _unseal(self, item: ContextItem) -> str:
        param = f"{item.param}.encrypted_content"
        return unseal(item.data["encrypted_content"], self._project_id, param)


def _plain_text(parts: list[dict[str, Any]]) -> str:
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts)


def _to_content(
    parts: list[dict[str, Any]], param: str
) -> tuple[str | None, tuple[domain.Part, ...]]:
    """Return the text, or None and the parts if some are not text."""
    return join_parts([_to_part(part, f"{param}[{i}]") for i, part in enumerate(parts)])


def _to_part(part: dict[str, Any], param: str) -> domain.Part:
    match part["type"]:
        case "input_image":
            if not part["image_url"]:
                raise InvalidRequestError(
                    f"Missing required parameter: '{param}.image_url'.",
                    param=f"{param}.image_url",
                    code="missing_required_parameter",
                )
            return to_image(part["image_url"], f"{param}.image_url")
        case "input_file":
            if "file_url" in part:
                raise InvalidRequestError(
                    f"Unsupported parameter: '{param}.file_url'; send 'file_data'.",
                    param=f"{param}.file_url",
                    code="unsupported_parameter",
                )
            fields = {key: part.get(key) for key in ("file_data", "file_id", "filename")}
            return to_file(InputFile.model_validate(fields), param)
        case _:
            return domain.TextPart(part.get("text") or part.get("refusal") or "")
