"""The chat template and the output syntax of a model, from its options and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from inference_site.catalogue.engines.options import ChatOptions, TemplateOptions, is_template_text
from inference_site.core.domain.errors import EngineLoadError, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from worker.engines.chat.parser.formats import HARMONY, TOOL_FORMATS, syntax_of
from worker.engines.chat.parser.output import Reasoning, Syntax
from worker.engines.chat.template import FAMILIES, ChatTemplate, Family


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The template and the tokens of a model file that chats need.

    ``chat_template`` is its template, if any. ``bos`` and ``eos`` are the texts of these tokens;
    ``adds_bos``: the tokenizer begins every prompt with the first. ``special_tokens`` are others by
    the names of their template variables (``pad_token``).
    """

    chat_template: str | None = None
    bos: str = ""
    eos: str = ""
    adds_bos: bool = True
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatConfiguration:
    """Template and output syntax of one model; ``stop`` are the texts that end its turns."""

    template: ChatTemplate
    syntax: Syntax
    stop: tuple[str, ...]
    bos: str


def configure_chat(
    spec: ModelSpec, options: ChatOptions, vocabulary: Vocabulary
) -> ChatConfiguration:
    """Return the configuration. Raise EngineLoadError without a valid template."""
    source = named_template(spec, options) or vocabulary.chat_template
    if source is None:
        raise EngineLoadError(
            f"Model '{spec.id}': its file has no chat template; name one as 'chat_template': "
            f"{_known_families()}, or a file."
        )
    family = FAMILIES.get(options.chat_template or "")
    variables = {
        **vocabulary.special_tokens,
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        **options.chat_template_kwargs,
    }
    try:
        template = ChatTemplate(source, variables, forces_thinking=options.force_enable_thinking)
    except ValueError as exc:
        raise EngineLoadError(f"Model '{spec.id}': its chat template is not valid: {exc}") from exc
    return ChatConfiguration(
        template,
        _syntax(spec, options, source, family),
        (*(family.stop if family else ()), *template.stop_texts, *options.stop_texts),
        vocabulary.bos if vocabulary.adds_bos else "",
    )


def options_with(options: ChatOptions, name: str) -> ChatOptions:
    """Return the options with the template that a request names; without a name, as they are.

    Raise InvalidRequest for an unknown name.
    """
    if not name:
        return options
    known = {**{family: family for family in FAMILIES}, **options.prompt_templates}
    if name not in known:
        raise InvalidRequest(
            f"Could not find the prompt template '{name[:100]}'; there are "
            f"{', '.join(sorted(known))}.",
            "prompt_template",
        )
    return options.model_copy(update={"chat_template": known[name]})


def check_prompt_templates(spec: ModelSpec, options: TemplateOptions) -> None:
    """Raise EngineLoadError for a missing file of a template that requests may name."""
    for file in options.prompt_templates.values():
        named_template(spec, options.model_copy(update={"chat_template": file}))


def named_template(spec: ModelSpec, options: TemplateOptions) -> str | None:
    """Return the text of the template that the options name: a family's, a file's, or their own.

    Raise EngineLoadError for a file that cannot be read.
    """
    name = options.chat_template
    if name is None:
        return None
    if family := FAMILIES.get(name):
        return family.template
    if is_template_text(name):
        return name
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise EngineLoadError(
            f"Model '{spec.id}': Could not find a chat template '{name}'; {_known_families()}."
        ) from exc
    if not text.strip():
        raise EngineLoadError(
            f"Model '{spec.id}': 'chat_template' must be a template: {name} is empty."
        )
    return text


def _known_families() -> str:
    return f"there are {', '.join(sorted(FAMILIES))}"


def _syntax(spec: ModelSpec, options: ChatOptions, source: str, family: Family | None) -> Syntax:
    """Return the syntax that the template shows, with the options' overrides."""
    syntax = syntax_of(source)
    if family and family.tool_format:
        syntax = replace(syntax, tool_format=TOOL_FORMATS[family.tool_format])
    if options.tool_format == HARMONY:
        return Syntax(channels=HARMONY)
    if options.tool_format is not None:
        channels = "tags" if syntax.channels == HARMONY else syntax.channels
        syntax = replace(syntax, tool_format=TOOL_FORMATS[options.tool_format], channels=channels)
    if options.channels is not None:
        syntax = replace(syntax, channels=options.channels)
    overrides = {
        name.removeprefix("reasoning_"): value
        for name, value in options.model_dump(exclude_unset=True).items()
        if name.startswith("reasoning_")
    }
    if not overrides:
        return syntax
    reasoning = replace(syntax.reasoning or Reasoning(), **overrides)
    if not reasoning.start or not reasoning.end or reasoning.start == reasoning.end:
        raise EngineLoadError(
            f"Model '{spec.id}': 'reasoning_start' and 'reasoning_end' must be two different texts."
        )
    return replace(syntax, reasoning=replace(reasoning, header=reasoning.header.strip()))
