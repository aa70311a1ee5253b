"""The base of what only one engine understands of an entry in the models file."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo

from inference_site.catalogue.operator_settings import BadKey, OperatorSettings, Text, located
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec


class EngineOptions(OperatorSettings):
    """The options of one engine."""

    _shows_input: ClassVar[bool] = False
    _read: ClassVar[dict[str, tuple[Any, Any]]] = {}
    """What was read last of each model, with what it was read of: every request asks for it."""

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Return the options of a model. Raise EngineLoadError naming the model and the key."""
        given, options = cls._read.get(spec.id, (None, None))
        if given is spec.options and isinstance(options, cls):
            return options
        try:
            options = cls.read(spec.options)
        except BadKey as exc:
            raise EngineLoadError(f"Model '{spec.id}': '{'.'.join(exc.path)}': {exc}.") from exc
        cls._read[spec.id] = spec.options, options
        return options


FAMILIES = ("chatml", "gemma", "llama3", "mistral", "phi3", "zephyr")
"""The names of the templates that come with the product (``worker.engines.chat.families``)."""
_TEMPLATE = ".jinja"
Channels = Literal["tags", "named", "harmony"]
ToolFormatName = Literal[
    "deepseek", "harmony", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"
]


def is_template_text(template: str) -> bool:
    """Return whether the option has the text of a template, and not the name of one."""
    return "{{" in template or "{%" in template


def _located_template(name: str, info: ValidationInfo) -> str:
    """Return a family's name or a template's text as it is, and the path of a file."""
    if name in FAMILIES or is_template_text(name):
        return name
    if not name.endswith(_TEMPLATE):
        raise ValueError(
            f"Could not find a chat template '{name[:100]}'; there are {', '.join(FAMILIES)}. "
            f"It may also be a file whose name ends in {_TEMPLATE}, or the text of a template"
        )
    return located(name, info, (_TEMPLATE,))


def _template_file(name: str, info: ValidationInfo) -> str:
    if not name.endswith(_TEMPLATE):
        raise ValueError(f"must be a file whose name ends in {_TEMPLATE}")
    return located(name, info, (_TEMPLATE,))


TemplateName = Annotated[Text, AfterValidator(_located_template)]
"""The name of a family of templates, a file whose name ends in ``.jinja``, or a template's text."""
TemplateFile = Annotated[Text, AfterValidator(_template_file)]


class TemplateOptions(EngineOptions):
    """Which chat template a model has, in place of its file's, and its variables.

    ``prompt_templates`` are files of others, by the names that requests may use.
    """

    chat_template: TemplateName | None = None
    prompt_templates: dict[str, TemplateFile] = {}
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class ChatOptions(TemplateOptions):
    """How a model chats whose engine only continues texts; see docs/engines.md.

    What is None is what the template shows. ``reasoning_header`` always begins the reasoning and
    is left out of it. ``stop_texts`` end a turn, like those of a family of templates.
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


READING = frozenset(ChatOptions.model_fields) - frozenset(TemplateOptions.model_fields)
"""The options that say how answers are read, and not only how prompts are written."""


def chat_capabilities(own: frozenset[str]) -> frozenset[str]:
    """Return what requests may ask for of an engine with these capabilities once it is adapted."""
    chat = {"chat", "chat_template", "prompt_template", "response_prefix", "tools"}
    return own | chat | ({"render"} if "tokens" in own else set())
