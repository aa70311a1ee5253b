"""Options of an entry that only its engine understands, and the chat options that engines share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo

from inference_site.catalogue.operator_settings import (
    InvalidSetting,
    OperatorSettings,
    Text,
    resolve_path,
)
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec

GuardName = Literal["llama_guard", "qwen3_guard", "shield_gemma"]


class EngineOptions(OperatorSettings):
    """The options of one engine.

    ``guard``: the model is a guard of this family, which judges texts for moderations in chats.
    """

    guard: GuardName | None = None

    _shows_input: ClassVar[bool] = False
    _cache: ClassVar[dict[str, tuple[Any, Any]]] = {}
    """By model id: ``ModelSpec.options`` and the object parsed from it. Every request reads it."""

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Return the options of a model. Raise EngineLoadError naming the model and the key."""
        source, options = cls._cache.get(spec.id, (None, None))
        if source is spec.options and isinstance(options, cls):
            return options
        try:
            options = cls.read(spec.options)
        except InvalidSetting as exc:
            raise EngineLoadError(f"Model '{spec.id}': '{'.'.join(exc.path)}': {exc}.") from exc
        cls._cache[spec.id] = spec.options, options
        return options


TEMPLATE_FAMILIES = ("chatml", "gemma", "llama3", "mistral", "phi3", "zephyr")
"""The names of the templates that come with the product (``worker.engines.chat.template``)."""
_TEMPLATE_ENDING = ".jinja"
Channels = Literal["tags", "named", "harmony"]
ToolFormatName = Literal[
    "deepseek", "harmony", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"
]


def is_template_text(template: str) -> bool:
    """Whether the option ``chat_template`` holds the text of a template instead of a name."""
    return "{{" in template or "{%" in template


def _resolve_template(name: str, info: ValidationInfo) -> str:
    """Return a family's name or a template's text unchanged, and the path of a file."""
    if name in TEMPLATE_FAMILIES or is_template_text(name):
        return name
    if not name.endswith(_TEMPLATE_ENDING):
        raise ValueError(
            f"Could not find a chat template '{name[:100]}'; "
            f"there are {', '.join(TEMPLATE_FAMILIES)}. It may also be a file whose name ends in "
            f"{_TEMPLATE_ENDING}, or the text of a template"
        )
    return resolve_path(name, info, (_TEMPLATE_ENDING,))


def _resolve_template_file(name: str, info: ValidationInfo) -> str:
    if not name.endswith(_TEMPLATE_ENDING):
        raise ValueError(f"must be a file whose name ends in {_TEMPLATE_ENDING}")
    return resolve_path(name, info, (_TEMPLATE_ENDING,))


TemplateName = Annotated[Text, AfterValidator(_resolve_template)]
"""The name of a template family, a ``.jinja`` file, or the text of a template."""
TemplateFile = Annotated[Text, AfterValidator(_resolve_template_file)]


class TemplateOptions(EngineOptions):
    """The chat template that replaces the one in the model's file, and its variables.

    ``prompt_templates`` maps the names that requests may use to files of other templates.
    """

    chat_template: TemplateName | None = None
    prompt_templates: dict[str, TemplateFile] = {}
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class ChatOptions(TemplateOptions):
    """How an engine that only completes text chats with a model; see docs/engines.md.

    None means that the template decides. Every reasoning begins with ``reasoning_header``, which
    is not part of the output. ``stop_texts`` end a turn, as those of a template family do.
    """

    channels: Channels | None = None
    force_enable_thinking: bool = False
    reasoning_end: str | None = None
    reasoning_has_calls: bool | None = None
    reasoning_header: str | None = None
    reasoning_reenters: bool | None = None
    reasoning_start: str | None = None
    stop_texts: list[Text] = []
    tool_format: ToolFormatName | None = None


PARSING_OPTIONS = frozenset(ChatOptions.model_fields) - frozenset(TemplateOptions.model_fields)
"""The chat options that control how output is parsed; the others control the prompt."""


def chat_capabilities(own: frozenset[str]) -> frozenset[str]:
    """Return the capabilities of an engine that completes text, with the chat adapter added."""
    chat = {"chat", "chat_template", "prompt_template", "response_prefix", "tools"}
    return own | chat | ({"render"} if "tokens" in own else set())
