"""How a model chats: its template and its syntax, from its entry in the models file.

Options of an engine that is adapted, beside its own:

- ``chat_template``: the name of a built-in family, or a file; else the model file's template.
- ``chat_template_kwargs``: variables of the template, under those of the request.
- ``force_enable_thinking``: gives the template ``enable_thinking: true``, whatever is asked for.
- ``tool_format``: how the model writes calls; else what its template shows.
- ``reasoning_start``, ``reasoning_end``, ``reasoning_header``: the tags of its reasoning, and a
  text that always begins it and is left out; else what its template shows.
- ``reasoning_reenters``, ``reasoning_has_calls``: it may reason again after content; calls in its
  reasoning are calls.
- ``channels``: ``tags``, ``named`` (``<|channel>NAME``) or ``harmony``; else what its template
  shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inference_site.catalogue.engines.chat import CHAT_OPTIONS
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec
from worker.engines.chat.families import FAMILIES, Family
from worker.engines.chat.parser import HARMONY, TOOL_FORMATS, Reasoning, Syntax, syntax_of
from worker.engines.chat.template import ChatTemplate

_FLAGS = ("force_enable_thinking", "reasoning_has_calls", "reasoning_reenters")
_TEXTS = ("reasoning_end", "reasoning_header", "reasoning_start")
_CHANNELS = ("tags", "named", HARMONY)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model file says of its chats.

    ``chat_template`` is its template, if it has one. ``bos`` and ``eos`` are the texts of these
    tokens, and ``adds_bos`` says whether the tokenizer puts the first before every prompt.
    ``special_tokens`` are others by the names of template variables (``pad_token``).
    """

    chat_template: str | None = None
    bos: str = ""
    eos: str = ""
    adds_bos: bool = True
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatConfiguration:
    """How one model chats; ``stop`` are the texts that end its turns."""

    template: ChatTemplate
    syntax: Syntax
    stop: tuple[str, ...]
    bos: str


def configure_chat(spec: ModelSpec, vocabulary: Vocabulary) -> ChatConfiguration:
    """Return how the model chats. Raise EngineLoadError for an option that makes no sense."""
    options = spec.options
    for name in _FLAGS:
        _check(spec, name, isinstance(options.get(name, False), bool), "be true or false")
    for name in _TEXTS:
        _check(spec, name, isinstance(options.get(name, ""), str), "be text")
    own_vars = options.get("chat_template_kwargs", {})
    _check(spec, "chat_template_kwargs", isinstance(own_vars, dict), "be a mapping")
    source = named_template(spec) or _own_template(spec, vocabulary)
    family = FAMILIES.get(options.get("chat_template", ""))
    variables = {
        **vocabulary.special_tokens,
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        **own_vars,
    }
    try:
        template = ChatTemplate(
            source, variables, forces_thinking=options.get("force_enable_thinking", False)
        )
    except ValueError as exc:
        raise EngineLoadError(f"Model '{spec.id}': its chat template is not valid: {exc}") from exc
    return ChatConfiguration(
        template,
        _syntax(spec, source, family),
        family.stop if family else (),
        vocabulary.bos if vocabulary.adds_bos else "",
    )


def named_template(spec: ModelSpec) -> str | None:
    """Return the text of the template that the entry names: a family's, or a file's.

    Raise EngineLoadError for a name that is neither.
    """
    name = spec.options.get("chat_template")
    if name is None:
        return None
    _check(spec, "chat_template", isinstance(name, str), "be text")
    if family := FAMILIES.get(name):
        return family.template
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise EngineLoadError(
            f"Model '{spec.id}': Could not find a chat template '{name}'; {_known_families()}."
        ) from exc
    _check(spec, "chat_template", bool(text.strip()), f"be a template: {name} is empty")
    return text


def _own_template(spec: ModelSpec, vocabulary: Vocabulary) -> str:
    """Return the template of the model's file."""
    if vocabulary.chat_template is None:
        raise EngineLoadError(
            f"Model '{spec.id}': its file has no chat template; name one as 'chat_template': "
            f"{_known_families()}, or a file."
        )
    return vocabulary.chat_template


def _known_families() -> str:
    return f"there are {', '.join(sorted(FAMILIES))}"


def _syntax(spec: ModelSpec, source: str, family: Family | None) -> Syntax:
    """Return what the template shows, and what the options say instead."""
    options, syntax = spec.options, syntax_of(source)
    if family and family.tool_format:
        syntax = replace(syntax, tool_format=TOOL_FORMATS[family.tool_format])
    if (tool_format := options.get("tool_format")) is not None:
        known = sorted((*TOOL_FORMATS, HARMONY))
        _check(spec, "tool_format", tool_format in known, f"be one of {', '.join(known)}")
        if tool_format == HARMONY:
            return Syntax(channels=HARMONY)
        within = "tags" if syntax.channels == HARMONY else syntax.channels
        syntax = replace(syntax, tool_format=TOOL_FORMATS[tool_format], channels=within)
    if (channels := options.get("channels")) is not None:
        _check(spec, "channels", channels in _CHANNELS, f"be one of {', '.join(_CHANNELS)}")
        syntax = replace(syntax, channels=channels)
    return replace(syntax, reasoning=_reasoning(spec, syntax.reasoning))


def _reasoning(spec: ModelSpec, shown: Reasoning | None) -> Reasoning | None:
    """Return the tags of reasoning: those of the template, but for what the options say."""
    given: dict[str, Any] = {
        name.removeprefix("reasoning_"): value
        for name, value in spec.options.items()
        if name.startswith("reasoning_") and name in CHAT_OPTIONS
    }
    if not given:
        return shown
    reasoning = replace(shown or Reasoning(), **given)
    are_tags = bool(reasoning.start and reasoning.end and reasoning.start != reasoning.end)
    _check(spec, "reasoning_start", are_tags, "differ from 'reasoning_end', and both must be text")
    return replace(reasoning, header=reasoning.header.strip())


def _check(spec: ModelSpec, option: str, is_good: bool, must: str) -> None:
    if not is_good:
        raise EngineLoadError(f"Model '{spec.id}': '{option}' must {must}.")
