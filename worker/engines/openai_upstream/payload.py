"""From a generation request to the JSON body for an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import orjson

from inference_site.catalogue.engines.openai_upstream import RESPONSE_FORMAT
from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import Constraint, GenerationRequest
from worker.engines.chat.template import wire_message, wire_part, wire_tool
from worker.engines.chat.tools import call_schema, plain_schema
from worker.engines.grammars import check_grammar, check_schemas, lark_or_schema, regex_as_lark
from worker.engines.openai_upstream.choices import must_find_stops
from worker.engines.openai_upstream.server import Server

_COMMON_EFFORTS = ("low", "medium", "high")
"""Levels of every server with the field; others reach the template as a variable only."""
_OWN_VARIABLES = {"enable_thinking", "reasoning_effort", "verbosity"}
_MAX_INTEGER = 2**31 - 1


class Payloads:
    """Builds the request bodies for one model, without its name: each server may use another."""

    def __init__(self, spec: ModelSpec, server: Server) -> None:
        self._server = server
        self._fields, self._flavor = server.fields, server.flavor
        self._context_length = spec.context_length
        self._own_vars = server.template_vars

    def chat(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the payload of a chat. Raise InvalidRequest for what the server cannot do."""
        payload = {
            **self._shared(request),
            **self._top_logprobs(request),
            **self._beginning(request),
            **self._tools(request),
        }
        return {**payload, **self._template_fields(request, payload)}

    def complete(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the payload of a completion. Raise InvalidRequest as ``chat`` does."""
        files = "".join(f"{text}\n" for _, text in request.other_files)
        prompts = [list(p) if isinstance(p, tuple) else files + p for p in request.prompts]
        payload = {
            **self._shared(request),
            "prompt": prompts[0] if len(prompts) == 1 else prompts,
            **self.named({"suffix": request.suffix}),
            **({"echo": True} if request.echo else {}),
        }
        if request.top_logprobs is not None:
            payload["logprobs"] = max(self._flavor.least_top_logprobs, request.top_logprobs)
        return payload

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values under the server's field names, without None and missing fields."""
        body: dict[str, Any] = {}
        for name, value in values.items():
            target = self._fields.get(name)
            if target is None or value is None:
                continue
            place = body
            *path, last = target.split(".")
            for step in path:
                place = place.setdefault(step, {})
            place[last] = value
        return body

    def _shared(self, request: GenerationRequest) -> dict[str, Any]:
        options: dict[str, Any] = {"include_usage": True}
        body: dict[str, Any] = {"stream": True, "stream_options": options}
        match self._flavor.running_usage:
            case "continuous_usage_stats" as field:
                options[field] = True
            case "timings_per_token" as field:
                # ``verbose`` adds the stop text that ended the answer.
                body |= {field: True, "verbose": bool(request.stop)}
        sampling = request.sampling
        settings = asdict(sampling)
        settings["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias} or None
        if (last_n := sampling.dry_penalty_last_n) is not None:
            # -1 means the whole context. The server reserves memory for this number of tokens.
            settings["dry_penalty_last_n"] = min(last_n % 2**32, self._context_length)
        if sampling.seed is not None and self._flavor.seed_limit is not None:
            settings["seed"] = sampling.seed % self._flavor.seed_limit
        values = {
            **settings,
            "max_tokens": _in_32_bits(request.max_output_tokens),
            "n": request.choices if request.choices > 1 else None,
            "stop": None if self.finds_stops(request) else list(request.stop) or None,
            "stop_token_ids": list(request.stop_token_ids) or None,
            "ignore_eos": request.goes_on_after_eos or None,
            "cache_prompt": None if request.cache_prompt else False,
            "return_token_ids": request.token_ids or None,
            "return_tokens_as_token_ids": request.tokens_as_ids or None,
            **request.extensions,
        }
        return {**body, **self.named(values), **self._constraint(request)}

    def finds_stops(self, request: GenerationRequest) -> bool:
        """Whether the reader of the answer finds the stop texts, and not the server."""
        return must_find_stops(request, self._flavor)

    def _constraint(self, request: GenerationRequest) -> dict[str, Any]:
        constraint = request.constraint
        return {} if constraint is None else constraint_fields(constraint, self._server)

    def _top_logprobs(self, request: GenerationRequest) -> dict[str, Any]:
        if request.top_logprobs is None:
            return {}
        top = max(self._flavor.least_top_logprobs, request.top_logprobs)
        return {"logprobs": True, "top_logprobs": top}

    def _beginning(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the messages; a response prefix is a last message to continue."""
        reasoning_field = self._fields.get("reasoning_content")
        messages = []
        for message in request.messages:
            content = [wire_part(part) for part in message.parts] if message.parts else message.text
            messages.append(wire_message(message, content, self._arguments, reasoning_field))
        if not request.response_prefix:
            ends_in_answer = bool(request.messages) and request.messages[-1].role == "assistant"
            unusual = {
                "add_generation_prompt": None if request.add_generation_prompt else False,
                # Some servers continue a last message of the assistant by default.
                "continue_final_message": False if ends_in_answer else None,
            }
            return {"messages": messages, **self.named(unusual)}
        prefix = {"role": "assistant", "content": request.response_prefix}
        switches = {"continue_final_message": True, "add_generation_prompt": False}
        return {"messages": [*messages, prefix], **self.named(switches)}

    def _arguments(self, text: str) -> str:
        """Return arguments as a JSON object: anything else becomes the value of ``input``.

        Servers parse the calls of the history; one malformed call must not end a conversation.
        """
        try:
            if isinstance(orjson.loads(text), dict):
                return text
        except orjson.JSONDecodeError:
            pass
        return orjson.dumps({"input": text}).decode()

    def _tools(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the tools, and whether one must be called."""
        tools = [wire_tool(tool) for tool in request.tools]
        if not tools:
            return {}
        if request.forced_grammar is not None:
            return {
                **self.named({"chat_template_kwargs": {"tools": tools, "enable_thinking": False}}),
                **constraint_fields(request.forced_grammar, self._server),
            }
        if request.must_call and self._flavor.forces_by_schema:
            # The tools are a variable of the template; the answer is parsed as a call.
            return {
                **self.named({"chat_template_kwargs": {"tools": tools}}),
                **schema_fields(call_schema(request.tools), request.tools_param, self._server),
            }
        if "tools" in self._flavor.unbounded:
            functions = [tool["function"] for tool in tools]
            for function in functions:
                function["parameters"] = plain_schema(function["parameters"])
            check_schemas([f["parameters"] for f in functions], request.tools_param)
        switches = {
            "parallel_tool_calls": request.parallel_tool_calls,
            "tool_choice": "required" if request.must_call else None,
        }
        for tool, wire in zip(request.tools, tools, strict=True):
            is_bound = request.must_call and self._flavor.forces_strictly
            wire["function"] |= self.named({"strict": tool.is_strict or is_bound or None})
        return {"tools": tools, **self.named(switches)}

    def _template_fields(
        self, request: GenerationRequest, payload: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the variables of the template, or the fields that replace them.

        Raise InvalidRequest for variables that the server has no field for.
        """
        variables = {**self._own_vars, **request.template_vars}
        effort = variables.get("reasoning_effort")
        budget = self.named({"reasoning_budget": _in_32_bits(request.reasoning_budget)})
        if field := self._fields.get("chat_template_kwargs"):
            merged = {**variables, **payload.get(field, {})}
            level = effort if effort in _COMMON_EFFORTS else None
            fields = {"chat_template_kwargs": merged or None, "reasoning_effort": level}
            return {**budget, **self.named(fields)}
        if others := request.template_vars.keys() - _OWN_VARIABLES:
            raise InvalidRequest(
                f"The server of this model takes no variables of its template ({min(others)!r}).",
                "chat_template_kwargs",
            )
        if effort is None and variables.get("enable_thinking") is False:
            effort = "none"
        fields = {"reasoning_effort": effort, "verbosity": variables.get("verbosity")}
        return {**budget, **self.named(fields)}


def _in_32_bits(limit: int | None) -> int | None:
    """Return a limit of tokens that servers can read: some refuse integers above 2**31.

    Clients send such limits for "as many as possible".
    """
    return None if limit is None else min(limit, _MAX_INTEGER)


def constraint_fields(constraint: Constraint, server: Server) -> dict[str, Any]:
    """Return the fields. Raise InvalidRequest for a constraint the server has no field for."""
    source, param = constraint.source, constraint.param
    if constraint.kind in ("lark", "regex", "llguidance") or (
        constraint.kind == "gbnf" and "gbnf" in server.flavor.unbounded
    ):
        check_grammar(constraint)  # Other GBNF, and schemas, are checked by the server.
    match constraint.kind:
        case "json_object":
            if server.flavor.schema_value:
                return schema_fields({"type": "object"}, param, server)
            target = _target("json_object", constraint, server)
            return _placed(target, {"type": "json_object"})
        case "json_schema":
            return schema_fields(orjson.loads(source), param, server, constraint.named)
        case "gbnf":
            return _placed(_target("gbnf", constraint, server), source)
        case "lark":
            return _lark(source, constraint, server)
        case "regex":
            if server.flavor.lark_prefix:
                return _lark(regex_as_lark(source), constraint, server)
            return _placed(_target("regex", constraint, server), source)
        case "llguidance":
            part = lark_or_schema(constraint)
            if isinstance(part, str):
                return _lark(part, constraint, server)
            return schema_fields(part, param, server)


def schema_fields(
    schema: dict[str, Any],
    param: str,
    server: Server,
    named: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the fields for an answer that matches a JSON schema.

    ``named`` are the client's name, description and strictness of the schema.
    Raise InvalidRequest for one that the server would follow for too long.
    """
    if "json_schema" in server.flavor.unbounded:
        schema = plain_schema(schema)
        check_schemas(schema, param)
    target = server.fields.get("json_schema", RESPONSE_FORMAT)
    if target != RESPONSE_FORMAT:
        return _placed(target, schema)
    if server.flavor.schema_value:
        return {RESPONSE_FORMAT: {"type": "json_object", "value": schema}}
    json_schema = {"name": "answer", "strict": True, **named, "schema": schema}
    return {RESPONSE_FORMAT: {"type": "json_schema", "json_schema": json_schema}}


def _lark(source: str, constraint: Constraint, server: Server) -> dict[str, Any]:
    target = _target("lark", constraint, server)
    return _placed(target, f"{server.flavor.lark_prefix}{source}")


def _target(kind: str, constraint: Constraint, server: Server) -> str:
    target = server.fields.get(kind)
    if target is None:
        raise InvalidRequest(
            f"The server of this model knows no constraints of the type '{kind}'.",
            constraint.param,
        )
    return target


def _placed(target: str, value: Any) -> dict[str, Any]:
    """Return the value as a field; each dot of ``target`` leads into a nested object."""
    for name in reversed(target.split(".")):
        value = {name: value}
    placed: dict[str, Any] = value
    return placed
