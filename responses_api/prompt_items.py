"""How stored calls and their results are put into the prompt: one entry for each type of item.

Models know function calls and their results. Every call becomes one: those that the client ran, and
those of OpenAI's own tools, whose items hold their result. An item that is neither becomes words of
the system or of a user, or is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inference_site.core.domain.request import Role, custom_arguments

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromptCall:
    """A call: the type, name and namespace of its tool, and its arguments as JSON text.

    ``result`` is set if the item holds the result of the call too.
    """

    type: str
    name: str
    arguments: str
    namespace: str | None = None
    result: str | None = None


@dataclass(frozen=True, slots=True)
class PromptWords:
    """A message that stands for an item."""

    role: Role
    text: str


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _without(value: Any, *names: str) -> str:
    """Return an object as JSON text, without these fields and without empty ones."""
    given = value if isinstance(value, dict) else {}
    empty: tuple[Any, ...] = (None, {})
    return _json({k: v for k, v in given.items() if k not in names and v not in empty})


def _objects(value: Any) -> list[Data]:
    """Return the objects of an array, which no wire model has checked."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _action_type(data: Data) -> Any:
    action = data.get("action")
    return action.get("type") if isinstance(action, dict) else None


def _of_tool(type_: str, field: str, *left_out: str) -> Callable[[Data], PromptCall]:
    return lambda data: PromptCall(type_, type_, _without(data.get(field), *left_out))


CALLS: dict[str, Callable[[Data], PromptCall]] = {
    "function_call": lambda data: PromptCall(
        "function", data["name"], data["arguments"], data.get("namespace")
    ),
    "custom_tool_call": lambda data: PromptCall(
        "custom", data["name"], custom_arguments(data["input"]), data.get("namespace")
    ),
    "shell_call": _of_tool("shell", "action"),
    "local_shell_call": _of_tool("local_shell", "action", "type"),
    "apply_patch_call": _of_tool("apply_patch", "operation"),
    "tool_search_call": _of_tool("tool_search", "arguments"),
    "computer_call": _of_tool("computer", "action"),
    "program": lambda data: PromptCall("program", "program", _json({"code": data.get("code")})),
    "multi_agent_call": lambda data: PromptCall(
        "multi_agent", str(data.get("action")), _json(data.get("arguments") or {})
    ),
}
"""Calls whose result is an item of its own, with the same ``call_id``."""

WHOLE_CALLS: dict[str, Callable[[Data], PromptCall]] = {
    "mcp_call": lambda data: PromptCall(
        "mcp",
        str(data.get("name")),
        _json(data.get("arguments") or {}),
        str(data.get("server_label")),
        result=_json(data.get("output") or data.get("error") or ""),
    ),
    "web_search_call": lambda data: PromptCall(
        "web_search",
        "open_page" if _action_type(data) == "open_page" else "web_search",
        _without(data.get("action"), "type", "queries", "sources"),
        result="(The results were not kept.)",
    ),
    "file_search_call": lambda data: PromptCall(
        "file_search",
        "file_search",
        _json({"queries": data.get("queries")}),
        result="\n".join(
            f"{found.get('filename') or ''}: {found.get('text') or ''}"
            for found in _objects(data.get("results"))
        )
        or "(The results were not kept.)",
    ),
    "code_interpreter_call": lambda data: PromptCall(
        "code_interpreter",
        "code_interpreter",
        _json({"code": data.get("code")}),
        result="\n".join(
            str(output.get("logs") or "(an image)") for output in _objects(data.get("outputs"))
        ),
    ),
    "image_generation_call": lambda data: PromptCall(
        "image_generation",
        "image_generation",
        _json({"prompt": data.get("revised_prompt") or ""}),
        result="(an image)",
    ),
}
"""Calls of OpenAI's own tools, whose items hold their result."""


def _shell_result(data: Data) -> str:
    texts = list[str]()
    for one in data["output"]:
        outcome = one["outcome"]
        end = f"exit code {outcome.get('exit_code')}" if outcome["type"] == "exit" else "timed out"
        texts.append("\n".join(filter(None, (one["stdout"], one["stderr"], f"({end})"))))
    return "\n".join(texts)


def _plain(parts: Any) -> str:
    """Return the texts of parts as lines; what is no text is named."""
    texts = [
        str(part.get("text") or part.get("refusal") or f"({part.get('type')})")
        for part in _objects(parts)
    ]
    return "\n".join(texts)


def _loaded(data: Data) -> str:
    names = list[str]()
    for tool in data["tools"]:
        inner = tool.get("tools") if tool["type"] == "namespace" else None
        named = ("name", "server_label", "type")
        names += [next(str(one[key]) for key in named if one.get(key)) for one in inner or (tool,)]
    return f"Loaded: {', '.join(names)}" if names else "No tool was found."


RESULTS: dict[str, Callable[[Data], str | list[Data]]] = {
    "function_call_output": lambda data: data["output"],
    "custom_tool_call_output": lambda data: data["output"],
    "shell_call_output": _shell_result,
    "local_shell_call_output": lambda data: data["output"],
    "apply_patch_call_output": lambda data: (
        f"{data['status']}: {data['output']}" if data.get("output") else str(data["status"])
    ),
    "tool_search_output": _loaded,
    "computer_call_output": lambda data: "(a screenshot)",
    "program_output": lambda data: _json(data.get("result") or ""),
    "multi_agent_call_output": lambda data: _plain(data.get("output")),
}
"""Results of ``CALLS``: a text, or parts of a message."""


WORDS: dict[str, Callable[[Data], PromptWords]] = {
    "mcp_approval_request": lambda data: PromptWords(
        "system",
        f"Approval was asked to call {data.get('name')} of {data.get('server_label')} "
        f"with {data.get('arguments')}",
    ),
    "mcp_approval_response": lambda data: PromptWords(
        "system",
        f"The user {'approved' if data.get('approve') else 'refused'} the call"
        + (f": {data['reason']}" if data.get("reason") else ""),
    ),
    # Not of the system: a model has written it, who may have read anything.
    "agent_message": lambda data: PromptWords(
        "user",
        f"Message of the agent {data.get('author')} to the agent {data.get('recipient')}:\n"
        + _plain(data.get("content")),
    ),
}
"""Items that become words."""


def texts_of(data: Data) -> Sequence[str]:
    """Return the texts of an item that go into the prompt, but for parts of messages."""
    kind = data.get("type", "")
    if make := CALLS.get(kind) or WHOLE_CALLS.get(kind):
        call = make(data)
        return call.name, call.arguments, call.result or ""
    if kind in WORDS:
        return (WORDS[kind](data).text,)
    result = RESULTS[kind](data) if kind in RESULTS else ""
    return (result if isinstance(result, str) else "",)
