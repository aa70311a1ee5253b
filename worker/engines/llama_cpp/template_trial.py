"""The trial of a model's chat template: llama.cpp renders it without bounds on time and memory.

So each conversation is rendered in a limited process first. Only whether that is too much counts:
what the template refuses, llama.cpp may know a way around.
"""

from __future__ import annotations

from typing import Any

from inference_site.catalogue.engines.llama_cpp import LlamaCppOptions
from inference_site.catalogue.gguf_files import metadata
from inference_site.domain.errors import EngineLoadError, InvalidRequest
from inference_site.domain.messages import TextPart
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.chat.configuration import named_template
from worker.engines.chat.template import TOO_COMPLEX, rendered, template_tool, wire_message
from worker.engines.limited_process import LOAD_PATIENCE_S, PATIENCE_S

_KEY = "tokenizer.chat_template"
"""In the header of a GGUF file; another template, for tools, may be at a key that begins so."""
_TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * 40}]
_TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
_CONVERSATIONS: tuple[dict[str, Any], ...] = (
    {"messages": _TURNS[:1]},
    {"messages": _TURNS[:1], "tools": [{"type": "function", "function": _TOOL}]},
    {"messages": _TURNS * 250},
)
"""What every model is asked sooner or later, at least."""


class TemplateTrial:
    """The templates of one model. Raise EngineLoadError for one that takes too much at once."""

    def __init__(self, spec: ModelSpec, options: LlamaCppOptions) -> None:
        self._variables = dict(spec.options.get("chat_template_kwargs", {}))
        named = named_template(spec, options)
        self._sources = [named] if named else _templates_of_file(spec)
        for source in self._sources:
            for conversation in _CONVERSATIONS:
                error, _ = self._rendered(source, conversation, LOAD_PATIENCE_S)
                if error == TOO_COMPLEX:
                    raise EngineLoadError(f"Model '{spec.id}': its chat template: {TOO_COMPLEX}.")

    def check(self, request: GenerationRequest) -> str:
        """Return the shortest prompt of a conversation, as far as it is known.

        llama.cpp chooses among the model's templates, and knows a way around what one refuses: then
        it is the text of the messages. Raise InvalidRequest for a conversation that takes too much.
        """
        messages = [
            wire_message(
                message,
                "".join(part.text for part in message.parts if isinstance(part, TextPart))
                or message.text,
                str,
            )
            for message in request.messages
        ]
        tools = [template_tool(tool) for tool in request.tools] or None
        variables = {**request.template_vars, "messages": messages, "tools": tools}
        prompts = []
        for source in self._sources:
            error, prompt = self._rendered(source, variables)
            if error == TOO_COMPLEX:
                raise InvalidRequest(f"TemplateError: {TOO_COMPLEX}", "messages")
            prompts += [] if error else [prompt]
        plain = (str(message.get("content") or "") for message in messages)
        return min(prompts, key=len) if prompts else "".join(plain)

    def _rendered(
        self, source: str, variables: dict[str, Any], patience_s: float = PATIENCE_S
    ) -> tuple[str, str]:
        asked = {"add_generation_prompt": True, **self._variables, **variables}
        return rendered(source, asked, patience_s)


def _templates_of_file(spec: ModelSpec) -> list[str]:
    """Return the templates in the model's file; none of one that is damaged."""
    assert spec.file is not None
    try:
        found = [value for key, value in metadata(spec.file) if key.startswith(_KEY)]
    except (OSError, ValueError):
        return []
    return [value for value in found if isinstance(value, str)]
