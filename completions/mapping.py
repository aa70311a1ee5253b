"""From chat completions and completions on the wire to the domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from completions.wire.chat import ChatCompletionRequest, DialectChat
from completions.wire.completion import CompletionRequest, Prompt
from completions.wire.messages import (
    AllowedToolsChoice,
    AssistantMessage,
    CustomTool,
    FunctionDefinition,
    FunctionMessage,
    InstructionMessage,
    NamedCustomTool,
    NamedFunctionTool,
    RequestCustomToolCall,
    RequestMessage,
    RequestTool,
    RequestToolCall,
    ToolMessage,
    UserMessage,
)
from inference_site.core.domain.request import (
    GenerationRequest,
    Message,
    Part,
    Role,
    Tool,
    ToolCall,
    custom_arguments,
    custom_tool,
)
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import shown_name
from inference_site.gateway.request_fields.capabilities import (
    require_endpoint,
    require_fields,
    require_grammars,
    require_media,
)
from inference_site.gateway.request_fields.constraint import (
    response_format_constraint,
    to_constraint,
)
from inference_site.gateway.request_fields.mapping import (
    ToolPlan,
    require_stream_for_options,
    select_tools,
    text_constraint,
    to_choices,
    to_content,
    to_grammar,
    to_reasoning_budget,
    to_sampled_request,
    to_stop,
    to_template_vars,
    with_token_report,
)
from inference_site.gateway.request_fields.web_search import (
    ARGUMENTS,
    can_search,
    search_functions,
    search_options,
)
from inference_site.gateway.request_fields.wire import Content, NestedGrammarInput
from inference_site.gateway.submission.model_access import ResolvedModel

_MOST_NAMED = 10
"""Calls without results that an error names."""


def to_messages(messages: Sequence[RequestMessage]) -> tuple[Message, ...]:
    """Return the turns, with the results of tools in the order of their calls.

    Raise InvalidRequestError for a result without its call, and for a call without its result.
    """
    turns: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        if isinstance(message, ToolMessage):
            raise InvalidRequestError(
                "Invalid parameter: messages with role 'tool' must be a response to a preceding "
                "message with 'tool_calls'.",
                param=f"messages[{position}].role",
            )
        turns.append(_turn(message, position, turns))
        position += 1
        if isinstance(message, AssistantMessage) and message.tool_calls:
            results: list[ToolMessage] = []
            for result in messages[position:]:
                if not isinstance(result, ToolMessage):
                    break
                results.append(result)
            turns += _results_in_order(message, results, position - 1)
            position += len(results)
    return tuple(turns)


def _turn(message: RequestMessage, position: int, before: Sequence[Message]) -> Message:
    param = f"messages[{position}].content"
    match message:
        case InstructionMessage():
            return _with_content("system", message.content, param, name=message.name)
        case UserMessage():
            return _with_content("user", message.content, param, name=message.name)
        case AssistantMessage():
            calls = tuple(_call(call) for call in message.tool_calls or ())
            if message.function_call is not None:
                legacy = message.function_call
                calls = (*calls, ToolCall(f"call_{position}", legacy.name, legacy.arguments))
            if message.content is None and message.refusal is None and not calls:
                raise InvalidRequestError(
                    "No content was provided, expected tool calls to be provided.", param=param
                )
            parts: tuple[Part, ...] = ()
            text = message.refusal
            if message.content is not None:
                text, parts = to_content(message.content, param)
            return Message(
                "assistant",
                text,
                name=message.name,
                tool_calls=calls,
                parts=parts,
                reasoning=message.reasoning_content or message.reasoning or None,
            )
        case FunctionMessage():
            # It answers the last call: there are no ids.
            made = before[-1].tool_calls if before else ()
            call_id = made[-1].id if made else None
            content = message.content or ""
            return _with_content("tool", content, param, name=message.name, tool_call_id=call_id)
        case ToolMessage():
            return _with_content("tool", message.content, param, tool_call_id=message.tool_call_id)


def _with_content(role: Role, content: Content, param: str, **fields: Any) -> Message:
    """Return the message with this content: plain text, or parts if it has others than text."""
    text, parts = to_content(content, param)
    return Message(role, text, parts=parts, **fields)


def _call(call: RequestToolCall) -> ToolCall:
    if isinstance(call, RequestCustomToolCall):
        return ToolCall(call.id, call.custom.name, custom_arguments(call.custom.input))
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _results_in_order(
    message: AssistantMessage, results: list[ToolMessage], position: int
) -> list[Message]:
    """Return the results in the order of the message's calls; ``position`` is the message's."""
    calls = [_call(call) for call in message.tool_calls or ()]
    uses = Counter(call.id for call in calls)
    by_call: dict[str, list[tuple[int, ToolMessage]]] = {}
    for place, result in enumerate(results, position + 1):
        if result.tool_call_id not in uses:
            raise InvalidRequestError(
                "No tool call found for the tool message with tool_call_id "
                f"'{shown_name(result.tool_call_id)}'.",
                param=f"messages[{place}].tool_call_id",
            )
        by_call.setdefault(result.tool_call_id, []).append((place, result))
    missing = [call.id for call in calls if call.id not in by_call]
    if missing:
        shown = [shown_name(id_) for id_ in missing[:_MOST_NAMED]]
        shown += ["…"] if len(missing) > _MOST_NAMED else []
        raise InvalidRequestError(
            "An assistant message with 'tool_calls' must be followed by tool messages responding "
            "to each 'tool_call_id'. The following tool_call_ids did not have response messages: "
            f"{', '.join(shown)}",
            param=f"messages[{position}].tool_calls",
        )
    turns: list[Message] = []
    for call in calls:
        # Some servers give all calls one id: the first call has the first result.
        given = by_call[call.id]
        place, result = given.pop(0) if len(given) > 1 and uses[call.id] > 1 else given[-1]
        param = f"messages[{place}].content"
        fields = {"name": call.name, "tool_call_id": call.id}
        turns.append(_with_content("tool", result.content, param, **fields))
    return turns


def to_generation_request(body: ChatCompletionRequest, model: ResolvedModel) -> GenerationRequest:
    """Return the request for the engine. Raise InvalidRequestError for contradicting fields."""
    require_stream_for_options(body.stream_options, body.stream)
    _refuse_audio_output(body)
    plan = to_tool_plan(body)
    constraint = to_constraint(body, response_format_constraint(body.response_format))
    require_fields(model, "chat", body, () if plan.tools else ("tools", "functions"))
    plan = _with_search(body, plan, model)
    require_grammars(model, plan.tools)
    messages = to_messages(body.messages)
    require_media(model, messages)
    prefix = _response_prefix(body, plan)
    switches = {
        "enable_thinking": body.enable_thinking,
        "reasoning_effort": body.reasoning_effort,
        "verbosity": body.verbosity,
    }
    template_vars = to_template_vars(switches, body.chat_template_kwargs, body.template_vars)
    if not prefix and _continues(body, messages, model):
        if plan.must_call or constraint is not None:
            instead = " With 'add_generation_prompt': true it is a new turn."
            last_param = f"messages[{len(body.messages) - 1}]"
            raise cannot_continue(last_param, "" if isinstance(body, DialectChat) else instead)
        messages, last = messages[:-1], messages[-1]
        prefix = last.all_text
        # The reasoning ended before the text began.
        template_vars["enable_thinking"] = False
    max_tokens = body.max_completion_tokens
    request = replace(
        to_sampled_request(body, model.spec),
        messages=messages,
        max_output_tokens=body.max_tokens if max_tokens is None else max_tokens,
        stop=to_stop(body.stop),
        choices=to_choices(body.n, model.spec),
        top_logprobs=_top_logprobs(body),
        constraint=text_constraint(constraint, plan),
        template_vars=template_vars,
        prompt_template=body.prompt_template or "",
        reasoning_budget=to_reasoning_budget(body.reasoning_budget, body.thinking_token_budget),
        tools=plan.tools,
        must_call=plan.must_call,
        only_tools=plan.only_tools,
        parallel_tool_calls=body.parallel_tool_calls is not False and not plan.is_legacy,
        response_prefix=prefix,
        add_generation_prompt=bool(prefix) or body.add_generation_prompt is not False,
        truncate=bool(body.truncate_sequence),
        return_progress=bool(body.stream and body.return_progress),
        running_usage=bool(body.stream_options and body.stream_options.continuous_usage),
    )
    return with_token_report(request, body, stream=bool(body.stream))


def cannot_continue(last: str, instead: str = "") -> InvalidRequestError:
    """Return the error for a last message that would have to be continued, and cannot be.

    ``last`` is its path in the client's request, ``instead`` what else the client can ask for.
    """
    return InvalidRequestError(
        f"Invalid '{last}': an answer that must be a tool call or must match a format cannot "
        f"continue the last message of the assistant.{instead}",
        param=last,
    )


def _with_search(body: ChatCompletionRequest, plan: ToolPlan, model: ResolvedModel) -> ToolPlan:
    """Return the plan with the functions of the web search, if the request and the site have one.

    An answer that must be a call of the client's functions is not searched for.
    """
    options = body.web_search_options
    if options is None or not can_search() or plan.must_call or "tools" not in model.capabilities:
        return plan
    if (body.n or 1) > 1:
        raise InvalidRequestError(
            "Invalid 'n': with 'web_search_options' there is one choice.", param="n"
        )
    if taken := {tool.name for tool in plan.tools} & ARGUMENTS.keys():
        names = [tool.name for tool in plan.tools]
        name = next(name for name in names if name in taken)
        param = "functions" if plan.is_legacy else "tools"
        param = f"{param}[{names.index(name)}]"
        raise InvalidRequestError(
            f"Invalid '{param}': '{name}' is a function of 'web_search_options'.", param=param
        )
    return replace(plan, tools=(*plan.tools, *search_functions(options.location)))


def to_site_tools(body: ChatCompletionRequest, request: GenerationRequest) -> list[dict[str, Any]]:
    """Return the options of the web search that the request offers the model; empty if none."""
    options = body.web_search_options
    if options is None or request.must_call or all(t.name not in ARGUMENTS for t in request.tools):
        return []
    texts = [message.all_text for message in request.messages if message.role == "user"]
    return [search_options(texts, options.search_context_size, options.location)]


def _refuse_audio_output(body: ChatCompletionRequest) -> None:
    """Raise InvalidRequestError if the answer is to be audio: a text is no substitute."""
    param = "modalities" if "audio" in (body.modalities or ()) else "audio"
    if param == "modalities" or body.audio is not None:
        raise InvalidRequestError(
            f"Unsupported parameter: '{param}': answers are text; no model here makes audio.",
            param=param,
            code="unsupported_parameter",
        )


def _response_prefix(body: ChatCompletionRequest, plan: ToolPlan) -> str:
    if not body.response_prefix:
        return ""
    if plan.must_call:
        raise InvalidRequestError(
            "Invalid 'response_prefix': an answer that must be a tool call cannot have one.",
            param="response_prefix",
        )
    if body.add_generation_prompt is False:
        raise InvalidRequestError(
            "Invalid 'response_prefix': it needs 'add_generation_prompt'.", param="response_prefix"
        )
    return body.response_prefix


def _continues(
    body: ChatCompletionRequest, messages: Sequence[Message], model: ResolvedModel
) -> bool:
    """Whether the answer continues the last message, as in llama-server and vLLM.

    Raise InvalidRequestError if ``continue_final_message`` asks for what cannot be. False where the
    model's server has no field for it; the server then decides.
    """
    wanted = body.continue_final_message
    if wanted is False or (wanted is None and body.add_generation_prompt):
        return False
    *before, last = messages
    can = bool(before) and last.role == "assistant" and not last.tool_calls and bool(last.all_text)
    if wanted and (body.add_generation_prompt or not can):
        why = (
            "it needs a text of the assistant as the last message"
            if not can
            else "it cannot be used together with 'add_generation_prompt'"
        )
        raise InvalidRequestError(
            f"Invalid 'continue_final_message': {why}.", param="continue_final_message"
        )
    return can and "response_prefix" in model.capabilities


def _top_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError(
            "Invalid 'top_logprobs': it is only allowed when 'logprobs' is true.",
            param="top_logprobs",
        )
    return body.top_logprobs or 0 if body.logprobs else None


def to_tool_plan(body: ChatCompletionRequest) -> ToolPlan:
    """Return the plan. Raise InvalidRequestError for the choice of an unknown tool."""
    if body.functions is not None or body.function_call is not None:
        return _legacy_plan(body)
    tools = tuple(to_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ()))
    choice = body.tool_choice
    if choice is not None and choice != "none" and not tools:
        raise InvalidRequestError(
            "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are "
            "specified.",
            param="tool_choice",
        )
    match choice:
        case "none":
            return ToolPlan(only_tools=True)
        case "required":
            return ToolPlan(tools, must_call=True)
        case NamedFunctionTool() | NamedCustomTool():
            return ToolPlan(select_tools(tools, [choice.name]), must_call=True)
        case AllowedToolsChoice(allowed_tools=allowed):
            names = [tool.name for tool in allowed.tools]
            chosen = select_tools(tools, names, "tool_choice.allowed_tools.tools[{}]")
            return ToolPlan(chosen, must_call=allowed.mode == "required", only_tools=True)
        case _:
            return ToolPlan(tools)


def to_tool(tool: RequestTool, where: str) -> Tool:
    """Return the tool as the model sees it; ``where`` is its path in the request."""
    if isinstance(tool, CustomTool):
        input_format = tool.custom.format
        grammar = input_format.grammar if isinstance(input_format, NestedGrammarInput) else None
        param = f"{where}.custom.format.grammar.definition"
        return custom_tool(tool.custom.name, tool.custom.description, to_grammar(grammar, param))
    return _function(tool.function, f"{where}.function")


def _function(function: FunctionDefinition, where: str) -> Tool:
    return Tool(
        function.name,
        function.description,
        function.parameters or {},
        is_strict=bool(function.strict),
        param=f"{where}.parameters",
    )


def _legacy_plan(body: ChatCompletionRequest) -> ToolPlan:
    if body.tools is not None or body.tool_choice is not None:
        former = "function_call" if body.functions is None else "functions"
        raise InvalidRequestError(
            f"Invalid '{former}': it cannot be used together with 'tools'.", param=former
        )
    if body.functions is None:
        raise InvalidRequestError(
            "Invalid 'function_call': it is only allowed when 'functions' are specified.",
            param="function_call",
        )
    tools = tuple(
        _function(function, f"functions[{i}]") for i, function in enumerate(body.functions)
    )
    match body.function_call:
        case "none":
            return ToolPlan(is_legacy=True, only_tools=True)
        case "auto" | None:
            return ToolPlan(tools, is_legacy=True)
        case named:
            tools = select_tools(tools, [named.name], "function_call", "functions")
            return ToolPlan(tools, must_call=True, is_legacy=True)


_DEFAULT_MAX_TOKENS = 16  # API reference, "Completions".


def to_completion_request(body: CompletionRequest, model: ResolvedModel) -> GenerationRequest:
    """Return the request for the engine. Raise InvalidRequestError for contradicting fields.

    The engine generates ``best_of`` choices; the assembler picks the ``n`` best.
    """
    require_stream_for_options(body.stream_options, body.stream)
    require_endpoint(model, "completions")
    prompts = to_prompts(body.prompt or "")  # Null begins a new document.
    _refuse_contradictions(body, prompts)
    require_fields(model, "completions", body)
    request = replace(
        to_sampled_request(body, model.spec),
        operation="complete",
        prompts=prompts,
        suffix=body.suffix,
        max_output_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        stop=to_stop(body.stop),
        choices=to_choices(
            body.best_of or body.n, model.spec, "n" if body.best_of is None else "best_of"
        ),
        top_logprobs=0 if body.picks and body.logprobs is None else body.logprobs,
        constraint=to_constraint(body, response_format_constraint(body.response_format)),
        echo=body.reads_prompt,
        running_usage=bool(body.stream_options and body.stream_options.continuous_usage),
    )
    return with_token_report(request, body, stream=bool(body.stream))


def echoes(body: CompletionRequest, request: GenerationRequest) -> list[str]:
    """Return the text that each choice begins with: its prompt, or nothing.

    It is empty if the engine itself returns the prompt as a part of the answer.
    """
    repeats = bool(body.echo) and not request.echo
    texts = [p if repeats and isinstance(p, str) else "" for p in request.prompts]
    return [text for text in texts for _ in range(request.choices)]


def to_prompts(prompt: Prompt) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts, each of which is text or token ids."""
    match prompt:
        case str(text):
            return (text,)
        case [int(), *_] as tokens:
            return (tuple(tokens),)  # type: ignore[arg-type]  # Validated: all are token ids.
        case prompts:
            return tuple(p if isinstance(p, str) else tuple(p) for p in prompts)  # type: ignore[arg-type]  # As above.


def _refuse_contradictions(
    body: CompletionRequest, prompts: tuple[str | tuple[int, ...], ...]
) -> None:
    """Raise InvalidRequestError for fields that would otherwise be ignored silently."""
    are_texts = all(isinstance(prompt, str) for prompt in prompts)
    refusals = {
        "best_of": {
            "it must not be less than 'n'": (body.best_of or 8) < (body.n or 1),
            "it cannot be streamed": bool(body.stream) and body.picks,
            "it cannot be used together with 'echo' and 'logprobs'": body.picks
            and body.reads_prompt,
        },
        "max_tokens": {"0 needs 'echo'": body.max_tokens == 0 and not body.echo},
        "suffix": {
            "it needs prompts that are text": body.suffix is not None and not are_texts,
            "it cannot be used together with 'echo'": body.suffix is not None and bool(body.echo),
        },
    }
    for param, reasons in refusals.items():
        for reason, is_so in reasons.items():
            if is_so:
                raise InvalidRequestError(f"Invalid '{param}': {reason}.", param=param)
