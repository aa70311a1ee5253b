"""Maps Anthropic's requests to chat completions, which the site runs.

Each message, part and tool of the chat is ``Placed``: it knows the path of what the client sent, so
that errors about the chat name the client's field (``client_path``).
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from django.utils.crypto import salted_hmac

from completions.anthropic import wire
from completions.anthropic.server_tools import unseal_result
from completions.anthropic.tool_changes import PlacedTool
from inference_site.core.domain.request import (
    GenerationRequest,
    Message,
    TextPart,
    Tool,
    function_name,
    short_name,
)
from inference_site.core.domain.site_tools import WebResult, web_results_text
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.cipher import unseal
from inference_site.gateway.api.payload import shown_name
from inference_site.gateway.request_fields.mcp import MCP

Body = dict[str, Any]

_EFFORTS = {"xhigh": "high", "max": "high"}
"""Levels that only Anthropic has → the nearest level of chat templates."""
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""How a message of the role ``system`` in the middle, or such a block, is put before the model:
most chat templates take such a message at the beginning alone."""
_NO_RESULT = "The call has no result."
"""The result of a call that has none, because the answer ended before the site ran the call."""
_BASH = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The bash command to run."},
        "restart": {"type": "boolean", "description": "Restart the shell instead."},
    },
}
_FILE_EDITS: Body = {
    "file_text": {"type": "string", "description": "For create: the whole file."},
    "old_str": {"type": "string", "description": "For str_replace: what is replaced."},
    "new_str": {"type": "string", "description": "For str_replace: what takes its place."},
    "insert_line": {"type": "integer", "description": "For insert: after which line."},
    "insert_text": {"type": "string", "description": "For insert: the text."},
    "view_range": {"type": "array", "items": {"type": "integer"}},
}
_EDITOR: Body = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
        "path": {"type": "string"},
        **_FILE_EDITS,
    },
    "required": ["command", "path"],
}
_MEMORY: Body = {
    "type": "object",
    "properties": {
        "command": {
            "type": "string",
            "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
        },
        "path": {"type": "string", "description": "A file or folder below /memories."},
        **_FILE_EDITS,
        "old_path": {"type": "string", "description": "For rename: the path now."},
        "new_path": {"type": "string", "description": "For rename: the path afterwards."},
    },
    "required": ["command"],
}
_CLIENT_TOOLS = {
    "bash_": ("Run a command in a bash shell that keeps its state.", _BASH),
    "memory_": ("Keep notes for later conversations in files below /memories.", _MEMORY),
    "text_editor_": ("View, create and edit text files.", _EDITOR),
}
"""Tools that Anthropic defines and the client runs, by how their types begin. Their schemas are not
part of a request; the models of Anthropic know them."""


_FIELDS = {
    "enable_thinking": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
}
"""Fields of a chat, and those of Anthropic's that they are made from; others have the same name."""
_STEP = re.compile(r"[^.\[\]]+")


class Placed(dict[str, Any]):
    """A part of a chat. ``where`` is the path of what the client sent for it."""

    __slots__ = ("where",)

    def __init__(self, where: str, /, **fields: Any) -> None:
        super().__init__(fields)
        self.where = where


def client_path(chat: Body, param: str) -> str:
    """Return the path in the client's request for a path in its chat."""
    first, *rest = _STEP.findall(param) or [""]
    value = chat.get(first)
    where = value.where if isinstance(value, Placed) else ""
    for step in rest:
        match value:
            case list() if step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            case dict():
                value = value.get(step)
            case _:
                break
        if isinstance(value, Placed):
            where = value.where
    return where or client_field(param)


def client_field(param: str) -> str:
    """Return the client's field for a path in its chat or in the request of a model server.

    Positions in lists are left out: they are not those of the client's lists. Paths of the client
    have dots only, and stay as they are.
    """
    field_ = _STEP.match(param)
    name = field_[0] if field_ else param
    return _FIELDS.get(name, name if "[" in param else param)


def with_client_paths(asked: GenerationRequest, chat: Body) -> GenerationRequest:
    """Return the request whose parts, tools and format name the client's fields in errors."""
    messages = list[Message]()
    for message in asked.messages:
        parts = tuple(
            part
            if isinstance(part, TextPart)
            else replace(part, param=client_path(chat, part.param))
            for part in message.parts
        )
        messages.append(replace(message, parts=parts) if parts else message)
    tools = tuple(
        replace(tool, param=client_path(chat, tool.param)) if tool.param else tool
        for tool in asked.tools
    )
    constraint, format_ = asked.constraint, chat.get("response_format")
    if constraint is not None and isinstance(format_, Placed):
        constraint = replace(constraint, param=f"{format_.where}.schema")
    return replace(asked, messages=tuple(messages), tools=tools, constraint=constraint)


def signature_of(thinking: str, project_id: int) -> str:
    """Return the signature of thoughts that a model of this site has written for a project."""
    salt = f"completions.anthropic.thinking.{project_id}"
    return str(salted_hmac(salt, thinking, algorithm="sha256").hexdigest())


@dataclass(frozen=True, slots=True)
class History:
    """What the messages of a request bring along: their project, and what is read from them.

    ``results`` are those of earlier searches.
    """

    project_id: int
    results: list[WebResult] = field(default_factory=list)


def to_chat(
    body: wire.Prompt,
    history: History,
    clients: Iterable[PlacedTool],
    functions: Iterable[Tool] = (),
    *,
    has_template: bool,
) -> Body:
    """Return the body of a chat completion; the results of searches are added to the history.

    ``clients`` are the tools of the client, ``functions`` those that the site runs.
    ``has_template``: the model takes variables of its
    chat template, such as whether it thinks. Raise InvalidRequestError for thoughts and results of
    searches that are not of this site, for calls without results, and for contradictions.
    """
    given = body.system or ""
    text = given if isinstance(given, str) else "\n\n".join(block.text for block in given)
    system = [Placed("system", role="system", content=text)] if text else []
    messages = [*system, *_messages(body.messages, history)]
    _require_results(messages)
    chat: Body = {
        "model": body.model,
        # A last message of the assistant is continued, as it is by Anthropic's API.
        "messages": messages,
        **_tools(body, clients, functions),
        **(_thinking(body) if has_template else {}),
    }
    format_ = body.output_config.format if body.output_config else None
    where = "output_format" if format_ is None else "output_config.format"
    if (format_ := format_ or body.output_format) is not None:
        schema = {"name": "answer", "schema": format_.schema_, "strict": True}
        chat["response_format"] = Placed(where, type="json_schema", json_schema=schema)
    if isinstance(body, wire.MessagesRequest):
        sampling: Body = {
            # 0 only reads the prompt into the cache. Most servers generate one token at least.
            "max_tokens": max(1, body.max_tokens),
            "stop": body.stop_sequences or None,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k or None,
            "user": (body.metadata.user_id or "")[:512] if body.metadata else None,
        }
        chat |= {name: value for name, value in sampling.items() if value is not None}
    return chat


def ignored_tools(clients: Iterable[PlacedTool]) -> list[str]:
    """Return the types of tools that would run at Anthropic; the model is not shown them."""
    return [f"tools[].{tool.type}" for _, tool in clients if _schema_of(tool) is None]


def unused_thinking(body: wire.Prompt, chat: Body) -> list[str]:
    """Return the fields that ask for reasoning and have no effect on the chat."""
    names = []
    if body.thinking is not None and body.thinking.type in ("enabled", "adaptive"):
        names += [] if "enable_thinking" in chat else ["thinking"]
    if body.output_config is not None and body.output_config.effort is not None:
        names += [] if "reasoning_effort" in chat else ["output_config.effort"]
    return names


def long_names(clients: Iterable[PlacedTool]) -> dict[str, str]:
    """Return the names of the client's tools that are too long for the model, by the shorter ones.

    The model calls a tool by the shorter name.
    """
    names = {short_name(tool.name): tool.name for _, tool in clients}
    return {called: name for called, name in names.items() if called != name}


def _messages(given: Sequence[wire.RequestMessage], history: History) -> Iterator[Placed]:
    """Yield the turns. Turns of one role that follow each other are one, as in Anthropic's API.

    Texts of two messages of the user have an empty line between them.
    """
    turn: Placed | None = None
    for position, message in enumerate(given):
        where = f"messages.{position}.content"
        if message.role == "assistant":
            made = list(_assistant(message.content, where, history))
        else:
            made = list(_user(message, where))
        for entry in made:
            if turn is None or turn["role"] != entry["role"] or entry["role"] == "tool":
                if turn is not None:
                    yield turn
                turn = entry
                continue
            ends = [*turn["content"][-1:], *entry["content"][:1]]
            if turn["role"] == "user" and [part["type"] for part in ends] == ["text", "text"]:
                turn["content"].append(_text("\n\n", where))
            turn["content"] += entry["content"]
            for name in ("tool_calls", "reasoning_content"):
                if entry.get(name):
                    turn[name] = (turn[name] + entry[name]) if turn.get(name) else entry[name]
    if turn is not None:
        yield turn


def _require_results(messages: Iterable[Placed]) -> None:
    """Raise InvalidRequestError for a result without its call, and a call without its result."""
    calls = dict[str, Placed]()
    missing = dict[str, Placed]()
    for message in messages:
        if message["role"] == "tool":
            id_ = message["tool_call_id"]
            if id_ not in calls:
                raise InvalidRequestError(
                    f"{message.where}: unexpected `tool_use_id` found in `tool_result` blocks: "
                    f"{shown_name(id_)}. Each `tool_result` block must have a corresponding "
                    "`tool_use` block in the previous message.",
                    param=message.where,
                )
            missing.pop(id_, None)
            continue
        _require_none(missing)
        calls = {call["id"]: call for call in message.get("tool_calls", ())}
        missing = dict(calls)
    _require_none(missing)


def _require_none(missing: dict[str, Placed]) -> None:
    for id_, call in missing.items():
        raise InvalidRequestError(
            f"{call.where}: `tool_use` ids were found without `tool_result` blocks immediately "
            f"after: {shown_name(id_)}. Each `tool_use` block must have a corresponding "
            "`tool_result` block in the next message.",
            param=call.where,
        )


class _Turn:
    """A turn of the assistant so far: what it has said and called, and the site's results.

    ``answered`` are the calls that the site has run, with their results as they come. ``where`` is
    the path of the message.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.parts, self.calls, self.thoughts = list[Body](), list[Body](), list[str]()
        self.answered: dict[str, Placed] = {}
        self.has_results = False

    def call(self, where: str, call_id: str, name: str, given: Body, *, is_run: bool) -> None:
        """Add a call with the arguments that are given; ``is_run``: the site has run it."""
        called = {"name": name, "arguments": json.dumps(given)}
        self.calls.append(Placed(where, id=call_id, type="function", function=called))
        if is_run:
            self.answer(where, call_id, _NO_RESULT)

    def answer(self, where: str, call_id: str, text: str) -> None:
        """Set the result of a call that the site has run."""
        self.answered[call_id] = Placed(where, role="tool", tool_call_id=call_id, content=text)

    def messages(self) -> Iterator[Placed]:
        """Yield the message, and those of the results."""
        message = Placed(self.where, role="assistant", content=self.parts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        yield message
        yield from self.answered.values()


def _assistant(content: str | Sequence[Any], where: str, history: History) -> Iterator[Placed]:
    """Yield the messages of a turn of the assistant: more than one if the site has run tools."""
    if isinstance(content, str):
        yield Placed(where, role="assistant", content=[_text(content, where)])
        return
    turn, is_empty = _Turn(where), True
    for number, block in enumerate(content):
        param = f"{where}.{number}"
        if isinstance(block, wire.WebSearchResultBlock | wire.McpToolResultBlock):
            if block.tool_use_id not in turn.answered:
                raise InvalidRequestError(
                    f"{param}.tool_use_id: there is no call '{shown_name(block.tool_use_id)}' "
                    "before it.",
                    param=f"{param}.tool_use_id",
                )
            turn.answer(param, block.tool_use_id, _site_result(block, param, history))
            turn.has_results = True
            continue
        if isinstance(block, wire.ForeignBlock):
            # After a result that is left out, as after others, the next turn of the model begins.
            turn.has_results = turn.has_results or bool(turn.answered)
            continue
        if isinstance(block, wire.RedactedThinkingBlock | wire.McpToolListingBlock):
            continue
        if turn.has_results:  # The next turn of the model begins.
            yield from turn.messages()
            turn = _Turn(where)
        is_empty = False
        _add_block(turn, block, param, history.project_id)
    if is_empty or turn.parts or turn.calls or turn.thoughts:
        yield from turn.messages()


def _add_block(turn: _Turn, block: Any, param: str, project_id: int) -> None:
    match block:
        case wire.TextBlock(text=text):
            turn.parts.append(_text(text, param))
        case wire.ToolUseBlock():
            turn.call(param, block.id, short_name(block.name), block.input, is_run=False)
        case wire.ServerToolUseBlock():
            turn.call(param, block.id, block.name, block.input, is_run=True)
        case wire.McpToolUseBlock():
            name = function_name(block.name, block.server_name, MCP)
            turn.call(param, block.id, name, block.input, is_run=True)
        case wire.ThinkingBlock():
            turn.thoughts.append(_thoughts(block, param, project_id))
        case _:
            raise InvalidRequestError(
                f"{param}: a message of the assistant has no blocks of the type '{block.type}'.",
                param=param,
            )


def _thoughts(block: wire.ThinkingBlock, param: str, project_id: int) -> str:
    """Return the thoughts; those that were left out of the answer are sealed in the signature."""
    signature = signature_of(block.thinking, project_id)
    if hmac.compare_digest(signature.encode(), block.signature.encode()):
        return block.thinking
    if not block.thinking:
        with suppress(InvalidRequestError):
            return unseal(block.signature, project_id, param)
    raise InvalidRequestError(
        f"{param}.signature: Invalid `signature` in `thinking` block: this site has not written it "
        "for this project.",
        param=f"{param}.signature",
    )


def _site_result(
    block: wire.WebSearchResultBlock | wire.McpToolResultBlock, param: str, history: History
) -> str:
    """Return the text of a result, as the model was shown it."""
    match block:
        case wire.McpToolResultBlock(content=content):
            return content if isinstance(content, str) else _all_text(content or ())
        case wire.WebSearchResultBlock(content=wire.WebSearchError(error_code=code)):
            return f"Error: {code}"
    assert isinstance(block.content, list)
    results = [
        unseal_result(
            one.encrypted_content,
            history.project_id,
            f"{param}.content.{place}.encrypted_content",
        )
        for place, one in enumerate(block.content)
    ]
    history.results.extend(results)
    return web_results_text(results)


def _user(message: wire.RequestMessage, where: str) -> Iterator[Placed]:
    """Yield the results of tools, and then what else a message of the user has."""
    if message.role == "system":
        if text := _all_text(message.content):  # It may consist of changes of tools only.
            yield Placed(where, role="user", content=[_text(_REMINDER.format(text), where)])
        return
    if isinstance(message.content, str):
        yield Placed(where, role="user", content=[_text(message.content, where)])
        return
    if not message.content:
        raise InvalidRequestError(f"{where}: a message of the user must have content.", param=where)
    parts: list[Body] = []
    for number, block in enumerate(message.content):
        place = f"{where}.{number}"
        if not isinstance(block, wire.ToolResultBlock):
            parts += _parts(block, place)
            continue
        given = block.content or ""
        result = [_text(given, f"{place}.content")] if isinstance(given, str) else []
        if not isinstance(given, str):
            for n, one in enumerate(given):
                result += _parts(one, f"{place}.content.{n}")
        text = "\n".join(part["text"] for part in result if part["type"] == "text")
        text = f"Error: {text}" if block.is_error else text
        yield Placed(place, role="tool", tool_call_id=block.tool_use_id, content=text)
        # The images of a result stand in the message after it.
        parts += [part for part in result if part["type"] != "text"]
    if parts:
        yield Placed(where, role="user", content=parts)


def _parts(block: Any, where: str) -> list[Body]:
    """Return the parts of a chat message that a block of a user is."""
    match block:
        case wire.ForeignBlock():
            return []
        case wire.TextBlock(text=text):
            return [_text(text, where)]
        case wire.ImageBlock(source=wire.UrlSource(url=url)):
            return [_image(url, f"{where}.source.url")]
        case wire.ImageBlock(source=wire.Base64Source(media_type=kind, data=data)):
            return [_image(f"data:{kind};base64,{data}", f"{where}.source.data")]
        case wire.ImageBlock(source=wire.FileSource(file_id=id_)):
            return [_file(f"{where}.source.file_id", file_id=id_)]
        case wire.SearchResultBlock():
            texts = "\n".join(text.text for text in block.content)
            return [_text(f"{block.title} ({block.source})\n{texts}", where)]
        case wire.ToolReferenceBlock(tool_name=name):
            return [_text(f"The tool {short_name(name)} can be called.", where)]
        case wire.SystemBlock():
            return [_text(_REMINDER.format(_all_text(block.content)), where)]
        case wire.DocumentBlock():
            head = "\n".join(filter(None, (block.title, block.context)))
            return [*([_text(f"{head}\n", where)] if head else []), *_document(block, where)]
        case _:
            raise InvalidRequestError(
                f"{where}: a message of the user has no blocks of the type '{block.type}'.",
                param=where,
            )


def _document(block: wire.DocumentBlock, where: str) -> list[Body]:
    name = {"filename": block.title} if block.title else {}
    match block.source:
        case wire.TextSource(data=data):
            return [_text(data, where)]
        case wire.ContentSource(content=str(text)):
            return [_text(text, where)]
        case wire.ContentSource(content=blocks):
            return [
                part
                for number, one in enumerate(blocks)
                for part in _parts(one, f"{where}.source.content.{number}")
            ]
        case wire.FileSource(file_id=id_):
            return [_file(f"{where}.source.file_id", file_id=id_)]
        case wire.Base64Source(media_type=kind, data=data):
            data = f"data:{kind};base64,{data}"
            return [_file(f"{where}.source.data", file_data=data, **name)]
        case wire.UrlSource(url=url):
            return [_file(f"{where}.source.url", file_url=url, **name)]


def _text(text: str, where: str) -> Body:
    return Placed(where, type="text", text=text)


def _image(url: str, where: str) -> Body:
    return Placed(where, type="image_url", image_url={"url": url})


def _file(where: str, **file: str) -> Body:
    return Placed(where, type="file", file=file)


def _all_text(content: str | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, wire.TextBlock))


def _tools(body: wire.Prompt, clients: Iterable[PlacedTool], functions: Iterable[Tool]) -> Body:
    tools: list[Body] = []
    for path, tool in clients:
        if (schema := _schema_of(tool)) is None:
            continue
        where = f"{path}.input_schema" if tool.input_schema else path
        function = _function(where, short_name(tool.name), *schema)
        if tool.strict is not None:
            function["function"]["strict"] = tool.strict
        tools.append(function)
    tools += [_function(one.param, one.name, one.description, one.parameters) for one in functions]
    choice = body.tool_choice
    if not tools:
        return {}
    chat: Body = {"tools": tools}
    match choice:
        case wire.ToolChoice(type="any"):
            chat["tool_choice"] = "required"
        case wire.ToolChoice(type="none"):
            chat["tool_choice"] = "none"
        case wire.ToolChoice(type="tool", name=name):
            called = short_name(name or "")
            if called not in {offered["function"]["name"] for offered in tools}:
                raise InvalidRequestError(
                    f"tool_choice.name: there is no tool named '{shown_name(name or '')}' in "
                    "`tools`.",
                    param="tool_choice.name",
                )
            chat["tool_choice"] = {"type": "function", "function": {"name": called}}
    if choice is not None and choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    return chat


def _schema_of(tool: wire.RequestTool) -> tuple[str | None, Body] | None:
    """Return the description and the schema of a tool; None for one that Anthropic would run."""
    if tool.type in (None, "custom"):
        return tool.description, tool.input_schema or {"type": "object"}
    known = (shown for start, shown in _CLIENT_TOOLS.items() if str(tool.type).startswith(start))
    return next(known, None)


def _function(where: str, name: str, description: str | None, parameters: Body) -> Body:
    function = {"name": name, "description": description, "parameters": parameters}
    return Placed(where, type="function", function=function)


def _thinking(body: wire.Prompt) -> Body:
    """Return the template variables for reasoning, which is off by default."""
    chat: Body = {"enable_thinking": False}
    match body.thinking:
        case wire.Thinking(type="enabled", budget_tokens=budget):
            chat = {"enable_thinking": True, "reasoning_budget": budget}
        case wire.Thinking(type="adaptive"):
            chat = {"enable_thinking": True}
    effort = body.output_config.effort if body.output_config else None
    if effort is not None and chat["enable_thinking"]:
        chat["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return chat
