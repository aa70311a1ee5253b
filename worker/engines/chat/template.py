"""Chat templates: from messages to the prompt a model continues.

A template is Jinja text from the model's file, from another file, or of a built-in family
(``FAMILIES``). Its variables are those of Hugging Face's ``apply_chat_template``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.request import (
    AudioPart,
    FilePart,
    GenerationRequest,
    ImagePart,
    Message,
    Part,
    TextPart,
    Tool,
)
from inference_site.core.limited_process import LOAD_PATIENCE_S, PATIENCE_S, LimitedProcess
from worker.engines.chat.tools import whole_characters

_FAMILIES_FOLDER = Path(__file__).parent / "families"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models that were trained on one format, with a template for files without one.

    ``stop`` are the texts that end a turn, for models whose tokenizer does not know them as ends.
    ``tool_format`` is how the family writes calls, empty if it has none of its own.
    """

    name: str
    stop: tuple[str, ...]
    tool_format: str = ""

    @property
    def template(self) -> str:
        """The text of the template."""
        return (_FAMILIES_FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")


FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", ("<|im_end|>", "<|im_start|>"), "hermes"),
        Family("gemma", ("<end_of_turn>", "<start_of_turn>")),
        Family("llama3", ("<|eot_id|>", "<|start_header_id|>"), "llama3_json"),
        Family("mistral", ("[INST]",), "mistral"),
        Family("phi3", ("<|end|>", "<|user|>")),
        Family("zephyr", ("<|user|>", "<|system|>")),
    )
}

TOO_COMPLEX = "the template takes too much time or memory"

_RENDERING = "worker.engines.chat.rendering"
_shared_process = LimitedProcess(_RENDERING)
_own_processes: dict[str, LimitedProcess] = {}
"""Processes of templates that have ended the shared one, so that others do not wait for them."""


def rendered(
    source: str, variables: Mapping[str, Any] | None, patience_s: float = PATIENCE_S
) -> tuple[str, str]:
    """Return the error of a template, empty if there is none, and its prompt.

    Without variables only compile it, and return its own stop texts as JSON instead of a prompt.
    The error is ``TOO_COMPLEX`` if it exceeds the limits of time and memory.
    """
    answer = _own_processes.get(source, _shared_process).ask(
        source, variables, patience_s=patience_s
    )
    if answer is None:
        _own_processes.setdefault(source, LimitedProcess(_RENDERING))
        return TOO_COMPLEX, ""
    error, prompt = map(whole_characters, answer)
    return error, prompt


def stop_texts_of(source: str) -> tuple[str, ...]:
    """Return the template's own stop texts (``{% set stop_strings = [...] %}``)."""
    error, stop_texts = rendered(source, None, LOAD_PATIENCE_S)
    return () if error else tuple(json.loads(stop_texts))


def takes_tools(source: str) -> bool:
    """Whether a template renders tools."""
    return "tools" in source


class ChatTemplate:
    """A template, which is rendered in a limited process. Thread-safe.

    ``variables`` are added to those of each request; special tokens are among them.
    ``forces_thinking`` overrides the request's ``enable_thinking``. ``stop_texts`` are the
    template's own. Raise ValueError for an invalid template.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        forces_thinking: bool = False,
    ) -> None:
        self.source = source
        self._forced = {"enable_thinking": True} if forces_thinking else {}
        self._variables = dict(variables or {})
        error, stop_texts = rendered(source, None, LOAD_PATIENCE_S)
        if error:
            raise ValueError(error)
        self.stop_texts: tuple[str, ...] = tuple(json.loads(stop_texts))

    @property
    def takes_tools(self) -> bool:
        """Whether the template renders tools."""
        return takes_tools(self.source)

    def render(self, request: GenerationRequest) -> str:
        """Return the prompt, with the request's response prefix.

        Raise InvalidRequest for messages that the template refuses or cannot render.
        """
        variables = {
            **self._variables,
            **request.template_vars,
            **self._forced,
            "messages": [template_message(message) for message in request.messages],
            "tools": [wire_tool(tool) for tool in request.tools] or None,
            "add_generation_prompt": request.add_generation_prompt,
        }
        error, prompt = rendered(self.source, variables)
        if error:
            raise InvalidRequest(f"TemplateError: {error}", "messages")
        return prompt + request.response_prefix


def without_bos(prompt: str, bos: str) -> str:
    """Return the prompt without the BOS text, which the tokenizer will add."""
    return prompt.removeprefix(bos) if bos else prompt


def template_message(message: Message) -> dict[str, Any]:
    """Return a message in the format of templates. Raise InvalidRequest for one with media."""
    if not all(isinstance(part, TextPart) for part in message.parts):
        raise InvalidRequest("This model takes neither images nor sounds.", "messages")
    # Templates concatenate texts, so the content must not be None.
    return wire_message(message, message.all_text, _arguments)


def _arguments(text: str) -> dict[str, Any] | str:
    """Return arguments as an object; as text if they are malformed.

    One malformed call in the history must not end a conversation.
    """
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def wire_message(
    message: Message,
    content: Any,
    arguments: Callable[[str], Any],
    reasoning_field: str | None = "reasoning_content",
) -> dict[str, Any]:
    """Return a message with this content.

    ``arguments`` converts the text of a call's arguments to the reader's format; an empty text is
    an object without arguments. Reasoning is left out if ``reasoning_field`` is None.
    """
    wire: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        wire["name"] = message.name
    if message.reasoning is not None and reasoning_field is not None:
        wire[reasoning_field] = message.reasoning
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments(call.arguments or "{}")},
            }
            for call in message.tool_calls
        ]
    return wire


def wire_part(part: Part) -> dict[str, Any]:
    """Return a part of a content. Raise InvalidRequest for an image that was not fetched."""
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case ImagePart(url, param):
            if not url.startswith("data:"):
                # The server would fetch it itself, also from an internal host.
                raise InvalidRequest("The image was not fetched.", param)
            return {"type": "image_url", "image_url": {"url": url}}
        case AudioPart(audio, format_):
            return {"type": "input_audio", "input_audio": {"data": audio, "format": format_}}
        case FilePart(param):
            raise InvalidRequest("The file was not read.", param)


def wire_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool, its keys in the order in which llama.cpp shows them to templates."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters
    return {"type": "function", "function": function}
