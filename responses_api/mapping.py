"""From a request and its context to the generation request: messages, tools, constraint.

An assistant's turn is several items (reasoning, message, calls), and one message for the engine.
The outputs of its calls follow that message in the order of the calls, wherever they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from inference_site.core.domain import request as domain
from inference_site.core.domain.request import (
    Compaction,
    Constraint,
    GenerationRequest,
    Message,
    ToolCall,
)
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.cipher import unseal
from inference_site.gateway.request_fields.capabilities import require_fields, require_media
from inference_site.gateway.request_fields.constraint import (
    json_object_constraint,
    json_schema_constraint,
    to_constraint,
)
from inference_site.gateway.request_fields.mapping import (
    ToolPlan,
    join_parts,
    text_constraint,
    to_file,
    to_image,
    to_reasoning_budget,
    to_sampled_request,
    to_stop,
    to_template_vars,
)
from inference_site.gateway.request_fields.wire import InputFile, JsonObjectFormat
from inference_site.gateway.submission.context_bound import ContextBound
from inference_site.gateway.submission.model_access import ResolvedModel
from responses_api.client_tools import SITE_SEARCH, OfferedTools, offer_tools
from responses_api.context import ContextItem
from responses_api.items import ItemData, holds_context, is_instruction, unseal_context
from responses_api.prompt_items import CALLS, RESULTS, WHOLE_CALLS, WORDS, PromptCall
from responses_api.wire.requests import ContextFields, JsonSchemaFormat, ResponseRequest
from responses_api.wire.tools import AllowedTools, NamedChoice, TypedChoice

ENCRYPTED_REASONING = "reasoning.encrypted_content"
_MAX_SUMMARY_TOKENS = 1024


def to_generation_request(
    body: ResponseRequest,
    items: Sequence[ContextItem],
    model: ResolvedModel,
    project_id: int,
    offered: OfferedTools,
) -> GenerationRequest:
    """Return the request for the engine. Raise InvalidRequestError for contradictory fields."""
    plan = to_tool_plan(body, offered)
    format_: Constraint | None = None
    match body.text.format if body.text else None:
        case JsonObjectFormat() as given:
            format_ = json_object_constraint(given, "text.format")
        case JsonSchemaFormat() as given:
            format_ = json_schema_constraint(given.json_schema, "text.format.schema", given)
    constraint = to_constraint(body, format_)
    require_fields(model, "chat", body, () if plan.tools else ("tools",))
    prompt = _Prompt(body.instructions, items, project_id, offered)
    messages = tuple(prompt.messages)
    if body.compacts_now and len(messages) == bool(body.instructions):
        raise InvalidRequestError("Invalid 'input': there is nothing to compact.", param="input")
    if body.reasoning and body.reasoning.context == "current_turn":
        messages = _without_earlier_reasoning(messages)
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
        only_tools=plan.only_tools,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        truncate=body.truncation == "auto",
        compaction=_to_compaction(body, prompt, model),
    )


def _without_earlier_reasoning(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages without the reasoning before the last message of the user."""
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=0)
    return tuple(
        replace(message, reasoning=None) if i < last and message.reasoning else message
        for i, message in enumerate(messages)
    )


def to_counting_request(
    body: ContextFields, items: Sequence[ContextItem], model: ResolvedModel, project_id: int
) -> GenerationRequest:
    """Return the request to render the prompt of a context, in order to count its tokens."""
    require_fields(model, "render", body, unused=("tools", "text.format"))
    offered = offer_tools(body.tools or (), items, project_id=project_id)
    messages = to_messages(body.instructions, items, project_id, offered)
    require_media(model, messages)
    return GenerationRequest(
        model=model.spec.id,
        operation="render",
        messages=messages,
        template_vars=to_template_vars(_template_switches(body)),
        tools=to_tool_plan(body, offered).tools,
    )


def _template_switches(body: ContextFields) -> dict[str, Any]:
    return {
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
    }


def to_summary_request(
    instructions: str | None, items: Sequence[ContextItem], model: ResolvedModel, project_id: int
) -> GenerationRequest:
    """Return the request to summarise a conversation, with the given instructions."""
    return GenerationRequest(
        model=model.spec.id,
        messages=to_messages(instructions, items, project_id, OfferedTools()),
        compaction=Compaction(
            threshold=0,
            summary_tokens=_summary_tokens(model),
            instructions=bool(instructions),
            leading=bool(instructions),
            keeps_newest=False,
            is_whole_answer=True,
        ),
    )


def _to_compaction(
    body: ResponseRequest, prompt: _Prompt, model: ResolvedModel
) -> Compaction | None:
    """Return when the request is compacted; None if it does not ask for that.

    Where the context is known, it is compacted when it is three quarters full at the latest.
    """
    given = body.context_management or ()
    if not given and not body.compacts_now:
        return None
    context_length = ContextBound.of(model.spec).context_length
    least = [entry.compact_threshold for entry in given if entry.compact_threshold is not None]
    threshold = 0 if body.compacts_now else min([*least, context_length * 3 // 4])
    return Compaction(
        threshold=threshold,
        summary_tokens=_summary_tokens(model, threshold),
        instructions=bool(body.instructions),
        leading=prompt.leading,
        has_summary=prompt.has_summary,
        is_whole_answer=body.compacts_now,
        counts="render" in model.capabilities,
    )


def _summary_tokens(model: ResolvedModel, threshold: int = 0) -> int:
    """Return the most tokens of a summary: a quarter of what may stand in the context."""
    room = [model.spec.context_length, *([threshold] if threshold else [])]
    return min(_MAX_SUMMARY_TOKENS, min(room) // 4)


def to_tool_plan(body: ContextFields, offered: OfferedTools) -> ToolPlan:
    """Return the tools that the model sees, and whether it must call one.

    Raise InvalidRequestError if ``tool_choice`` requires a tool that is not there.
    """
    match body.tool_choice:
        case "none":
            return ToolPlan(only_tools=True)
        case "required":
            return ToolPlan(_require_any(offered.tools, offered), must_call=True)
        case NamedChoice() as choice:
            return ToolPlan(offered.select([choice]), must_call=True)
        case AllowedTools(mode=mode, tools=allowed):
            tools = offered.select(allowed, "tool_choice.tools[{}]")
            # What is allowed is loaded: a search of the site could load only what is not.
            search = offered.names.get(SITE_SEARCH)
            tools = tuple(tool for tool in tools if tool.name != search)
            must_call = mode == "required"
            tools = _require_any(tools, offered) if must_call else tools
            return ToolPlan(tools, must_call, only_tools=True)
        case TypedChoice(type=kind) as choice:
            if kind == "tool_search" and offered.is_hosted and SITE_SEARCH not in offered.names:
                return ToolPlan(offered.tools)  # All is loaded.
            if not (tools := offered.select([choice])) and not offered.first_calls:
                raise InvalidRequestError(
                    f"Invalid value for 'tool_choice': there is no tool of the type '{kind}' that "
                    "runs here or at the client.",
                    param="tool_choice",
                    code="unsupported_value",
                )
            return ToolPlan(tools, must_call=True)
        case _:
            return ToolPlan(offered.tools)


def _require_any(tools: tuple[domain.Tool, ...], offered: OfferedTools) -> tuple[domain.Tool, ...]:
    """Return the tools. Raise InvalidRequestError if there are none, and none are to be listed."""
    if not tools and not offered.first_calls:
        raise InvalidRequestError(
            "Invalid value for 'tool_choice': there is no tool that could be called.",
            param="tool_choice",
        )
    return tools


def to_messages(
    instructions: str | None,
    items: Sequence[ContextItem],
    project_id: int,
    offered: OfferedTools,
) -> tuple[Message, ...]:
    """Return the messages of a context. Its calls have the names of the offered tools.

    Raise InvalidRequestError for a call without its output, and for an output without its call.
    """
    return tuple(_Prompt(instructions, items, project_id, offered).messages)


@dataclass(slots=True)
class _Turn:
    """The items of an assistant's turn so far. ``is_answered``: one of its calls has its output."""

    reasoning: str | None = None
    text: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    is_answered: bool = False


class _Prompt:
    """The messages of a prompt, made from the items of its context in their order."""

    def __init__(
        self,
        instructions: str | None,
        items: Sequence[ContextItem],
        project_id: int,
        offered: OfferedTools,
    ) -> None:
        self.messages = [Message("system", instructions)] if instructions else []
        first = sum(1 for _ in takewhile(lambda item: is_instruction(item.data), items))
        self.leading = len(self.messages) + first
        """The number of first messages that are instructions."""
        self.has_summary = False
        """Whether the message after these is the summary of a compaction."""
        self._project_id, self._offered = project_id, offered
        self._turn = _Turn()
        self._places: dict[str, str] = {}
        """The field of the request that each call is in, by its id, for errors."""
        self._outputs: dict[str | None, list[ContextItem]] = {}
        for item in items:
            if item.data["type"] in RESULTS:
                self._outputs.setdefault(item.data.get("call_id"), []).append(item)
        self._called = {i.data.get("call_id") for i in items if i.data["type"] in CALLS}
        for item in items:
            self._add(item)
        self._end_turn()

    def _add(self, item: ContextItem) -> None:
        data = item.data
        match data["type"]:
            case "message" if data["role"] == "assistant":
                if self._turn.text is not None or self._turn.calls:
                    self._end_turn()
                self._turn.text = _plain_text(data["content"])
            case "message":
                self._end_turn()
                role: domain.Role = "user" if data["role"] == "user" else "system"
                text, parts = _to_content(data["content"], f"{item.param}.content")
                self.messages.append(Message(role, text, parts=parts))
            case kind if kind in CALLS:
                self._add_call(data, CALLS[kind](data), item.param)
            case kind if kind in WHOLE_CALLS:
                # The call and its result are one item, which has no ``call_id``.
                call = WHOLE_CALLS[kind](data)
                call_id = f"call_{len(self.messages)}_{len(self._turn.calls)}"
                result = {"type": "function_call_output", "call_id": call_id, "output": call.result}
                self._outputs[call_id] = [ContextItem(result, item.param)]
                self._add_call({"call_id": call_id}, call, item.param)
                self._turn.is_answered = True
            case kind if kind in WORDS:
                self._end_turn()
                words = WORDS[kind](data)
                self.messages.append(Message(words.role, words.text))
            case kind if kind in RESULTS:
                self._add_result(item)
            case "reasoning":
                self._end_turn()
                if content := data.get("content"):
                    self._turn.reasoning = _plain_text(content)
                elif data.get("encrypted_content"):
                    self._turn.reasoning = self._unseal(item)
                else:
                    self._turn.reasoning = _plain_text(data.get("summary", []))
            case "compaction" if holds_context(data):
                self._end_turn()
                self._add_context(item)
            case "compaction":
                self._end_turn()
                if data["encrypted_content"]:  # It is removed with its user (``forget``).
                    self.messages.append(Message("system", self._unseal(item)))

    def _add_context(self, item: ContextItem) -> None:
        """Add a compacted context, the first item but for instructions, which it may repeat."""
        param = f"{item.param}.encrypted_content"
        sealed = unseal_context(item.data["encrypted_content"], self._project_id, param)
        new = [one for one in sealed.context.leading if one not in self.messages]
        self.messages += replace(sealed.context, leading=tuple(new)).messages
        self.leading += len(new)
        self.has_summary = bool(sealed.context.summary)

    def _end_turn(self) -> None:
        """Add the message of the assistant's turn, if any, and the outputs of its calls."""
        turn, self._turn = self._turn, _Turn()
        if turn.reasoning is None and turn.text is None and not turn.calls:
            return
        text = turn.text if turn.calls else turn.text or ""
        self.messages.append(
            Message("assistant", text, tool_calls=tuple(turn.calls), reasoning=turn.reasoning)
        )
        for call in turn.calls:
            outputs = self._outputs.get(call.id)
            if outputs is None:
                raise InvalidRequestError(
                    f"No tool output found for function call {call.id}.",
                    param=self._places[call.id],
                )
            # Some clients reuse the ids of calls in each turn: the first call has the first output.
            text, parts = self._result(outputs.pop(0) if len(outputs) > 1 else outputs[0])
            result = Message("tool", text, call.name, tool_call_id=call.id, parts=parts)
            self.messages.append(result)

    def _add_result(self, item: ContextItem) -> None:
        """Note that a call has its result, which is added with the call.

        The output of a tool without a call becomes a message of the user. The result of a tool
        search without a call, which the site or OpenAI ran, is not shown to the model.
        """
        call_id = item.data.get("call_id")
        if call_id is None and item.data["type"] == "function_call_output":
            self._end_turn()
            text, parts = self._result(item)
            name = item.data.get("name") or "a tool"
            note = domain.TextPart(f"Output of {name}:\n")
            text, parts = join_parts([note, *(parts or [domain.TextPart(text or "")])])
            self.messages.append(Message("user", text, parts=parts))
        elif call_id is not None and call_id not in self._called:
            raise InvalidRequestError(
                f"No tool call found for function call output with call_id {call_id}.",
                param=item.param,
            )
        self._turn.is_answered |= any(call.id == call_id for call in self._turn.calls)

    def _add_call(self, data: ItemData, call: PromptCall, param: str) -> None:
        call_id = data.get("call_id")
        is_whole = data.get("status", "completed") == "completed"
        if call_id is None or (not is_whole and call_id not in self._outputs):
            return  # The token limit or a failure ended it, and the client did not answer it.
        if self._turn.is_answered:  # The model made this call after the output of another.
            self._end_turn()
        name = self._offered.name_of(call.type, call.name, call.namespace)
        self._turn.calls.append(ToolCall(call_id, name, call.arguments))
        self._places[call_id] = param

    def _result(self, item: ContextItem) -> tuple[str | None, tuple[domain.Part, ...]]:
        output = RESULTS[item.data["type"]](item.data)
        return (
            (output, ()) if isinstance(output, str) else _to_content(output, f"{item.param}.output")
        )

    def _unseal(self, item: ContextItem) -> str:
        param = f"{item.param}.encrypted_content"
        return unseal(item.data["encrypted_content"], self._project_id, param)


def _plain_text(parts: list[dict[str, Any]]) -> str:
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts)


def _to_content(
    given: list[dict[str, Any]], param: str
) -> tuple[str | None, tuple[domain.Part, ...]]:
    """Return the text, or None and the parts if some are not text."""
    parts: list[domain.Part] = []
    for position, part in enumerate(given):
        where = f"{param}[{position}]"
        match part["type"]:
            case "input_image" if part["image_url"]:
                parts.append(to_image(part["image_url"], f"{where}.image_url"))
            case "input_image" if part.get("file_id"):
                parts.append(domain.FilePart(f"{where}.file_id", part["file_id"]))
            case "input_image":
                raise InvalidRequestError(
                    f"Missing required parameter: '{where}.image_url'.",
                    param=f"{where}.image_url",
                    code="missing_required_parameter",
                )
            case "input_file":
                fields = {key: part.get(key) for key in InputFile.model_fields}
                parts.append(to_file(InputFile.model_validate(fields), where))
            case _:
                parts.append(domain.TextPart(part.get("text") or part.get("refusal") or ""))
    return join_parts(parts)
