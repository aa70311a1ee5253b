"""What one run of a model is asked to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from inference_site.domain.messages import Message


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampler settings. ``None`` means "the model's own default"; an explicit 0 is honoured.

    ``repetition_penalty`` multiplies (1 is off), the presence and frequency penalties subtract.
    ``dry_*`` is the DRY sampler ("don't repeat yourself"), ``xtc_*`` "exclude top choices";
    both are off until their multiplier or probability is above 0. ``logit_bias`` holds pairs of a
    token id of the served model and what is added to its logit.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def over(self, defaults: Sampling) -> Sampling:
        """Return these settings, and the defaults for what is left out."""
        if self == _NOTHING:
            return defaults
        if defaults == _NOTHING:
            return self
        left_out = {
            name: value
            for name in self.__slots__
            if getattr(self, name) in (None, ()) and (value := getattr(defaults, name)) is not None
        }
        return replace(self, **left_out) if left_out else self


_NOTHING = Sampling()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; ``parameters`` is the JSON schema of its arguments.

    ``is_custom``: it stands for a tool that takes one text (see ``domain.custom_tools``), which is
    of the ``grammar`` if there is one. ``is_strict``: its calls must match the schema, also those
    that the model chooses to make; forced ones always do.
    """

    name: str
    description: str | None
    parameters: dict[str, Any]
    is_custom: bool = False
    grammar: Constraint | None = None
    is_strict: bool = False


ConstraintKind = Literal["json_object", "json_schema", "gbnf", "lark", "regex", "llguidance"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer's text must match.

    ``source`` is the schema as JSON text for ``json_schema``, a llguidance grammar as JSON text for
    ``llguidance``, the grammar or expression itself for the others, and empty for ``json_object``.
    ``param`` names the request's field it came from. ``named`` is what the client says of a schema
    beside it: ``name``, ``description`` and ``strict``.
    """

    kind: ConstraintKind
    source: str
    param: str
    named: dict[str, Any] = field(default_factory=dict, hash=False)


Operation = Literal["chat", "complete", "embed", "tokenize", "detokenize", "render"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What one run of a model is asked to do.

    ``operation`` names the method of the engine. ``chat`` and ``render`` take ``messages``; the
    others take ``prompts``, each of which is text or token ids.

    ``max_output_tokens=None`` means "until the context is full".
    ``stop`` holds texts and ``stop_token_ids`` tokens; none of them ever appears in the output.
    ``ignore_eos`` goes on past the model's end-of-sequence token (for benchmarks).
    ``choices`` answers are sampled from one prefill of the prompt.
    ``top_logprobs=None`` asks for no log probabilities; 0 asks for those of the chosen tokens only.
    ``template_vars`` are variables of the chat template, over those of the model's record.
    ``prompt_template`` names a template in place of the model's own.
    ``reasoning_budget`` ends the reasoning after so many tokens.
    ``prompts`` are continued as they are, without a chat template. Each has ``choices`` answers;
    the one numbered ``prompt × choices + choice`` has that index. With a ``suffix`` they are
    continued by what fits between the two.
    ``must_call`` has the answer be a call of one of the ``tools`` and nothing else; otherwise the
    model chooses.
    ``response_prefix`` is how the answer begins; it is not part of the output.
    ``add_generation_prompt=False`` leaves out the template's beginning of an answer.
    ``cache_prompt=False`` computes the whole prompt anew.
    ``lora`` pairs names of the model's adapters with their scales.
    ``truncate`` drops the oldest turns, but no instructions, when the context is too short.
    ``echo`` puts each prompt before its answers, with the log probabilities of its tokens if any
    are asked for; with it ``max_output_tokens`` may be 0.
    ``return_progress`` has an engine that can feed ``PromptProgress`` while it reads a prompt.
    ``token_ids`` has the engine feed ``PromptTokens`` and ``AnswerTokens``, and ``prompt_logprobs``
    has it feed ``PromptTokens`` with so many of the likeliest tokens at each place.
    ``tokens_as_ids`` names the tokens of log probabilities ``token_id:ID``.
    ``extensions`` are fields of other servers that are passed on, by their names here.
    ``running_usage`` has the engine feed ``Usage`` before each piece of the answer.
    ``add_special_tokens=False`` leaves out the tokens that the model begins every prompt with, and
    ``token_texts`` has tokens come with their texts; both are of ``tokenize``.
    """

    model: str
    messages: tuple[Message, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    max_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    choices: int = 1
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    template_vars: dict[str, Any] = field(default_factory=dict)
    reasoning_budget: int | None = None
    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    parallel_tool_calls: bool = True
    operation: Operation = "chat"
    prompts: tuple[str | tuple[int, ...], ...] = ()
    suffix: str | None = None
    response_prefix: str = ""
    add_generation_prompt: bool = True
    cache_prompt: bool = True
    lora: tuple[tuple[str, float], ...] = ()
    truncate: bool = False
    echo: bool = False
    return_progress: bool = False
    running_usage: bool = False
    add_special_tokens: bool = True
    token_texts: bool = False
    prompt_template: str = ""
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: int | None = None
    extensions: dict[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        """How many choices there are in all; each has exactly one ``Finish``."""
        return self.choices * (len(self.prompts) or 1)

    @property
    def forced_grammar(self) -> Constraint | None:
        """What the text of the one call that must come is bound to, if it is a text with a grammar.

        Where the model chooses what to call, it is only shown the grammar.
        """
        return self.tools[0].grammar if self.must_call and len(self.tools) == 1 else None

    @property
    def scores_prompts(self) -> bool:
        """Whether the log probabilities of the prompts' tokens are asked for."""
        return self.echo and self.top_logprobs is not None

    @property
    def names_prompt_tokens(self) -> bool:
        """Whether the tokens of the prompts are asked for."""
        return self.token_ids or self.prompt_logprobs is not None

    @property
    def subject(self) -> str:
        """The field of the API's request that holds what the model reads, for errors."""
        if self.operation == "embed":
            return "input"
        return "prompt" if self.prompts else "messages"


# The module's text:
# """Custom tools: tools that take one text instead of JSON.
#
# A model knows functions only, so it is shown a function whose one argument is the text. What it
# calls that function with is JSON again, which comes in pieces cut anywhere, and is turned back into
# the pieces of the text.
# """


_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_tool(name: str, description: str | None, grammar: Constraint | None = None) -> Tool:
    """Return the function that stands for a custom tool; the model is shown its grammar."""
    if grammar is not None:
        told = f"Its input is a text of this {grammar.kind} grammar:\n{grammar.source}"
        description = f"{description}\n\n{told}" if description else told
    return Tool(name, description, _SCHEMA, is_custom=True, grammar=grammar)


def custom_arguments(text: str) -> str:
    """Return the arguments that this text was in the call of such a function."""
    return json.dumps({"input": text}, ensure_ascii=False)


# The module's text:
# """JSON schemas, as far as their size is concerned."""


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a JSON value, whether it is a schema or holds some."""
    layer = [schema]
    while layer:
        value = layer.pop()
        if isinstance(value, dict):
            yield value
            layer.extend(value.values())
        elif isinstance(value, list):
            layer.extend(value)
