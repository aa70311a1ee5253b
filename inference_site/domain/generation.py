"""Domain values of one generation: what an engine is asked for and what it yields.

Frozen values without I/O, HTTP or JSON. The names follow docs/glossary.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made; ``arguments`` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text between media."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image by its URL: http(s) until the worker has fetched it, then ``data:``.

    ``param`` names the field of the request it came from, for errors.
    """

    url: str
    param: str


@dataclass(frozen=True, slots=True)
class AudioPart:
    """A sound, as base64 of a file of this format."""

    audio: str
    format: Literal["wav", "mp3"]
    param: str


Part = TextPart | ImagePart | AudioPart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the conversation, as the model's chat template receives it.

    A turn with media has ``parts``, in order, and no ``text``. Otherwise ``text`` is None only for
    an assistant turn that made calls and said nothing. A turn of the role ``tool`` answers the
    call with the id ``tool_call_id``. ``reasoning`` is what came before an assistant's answer.
    """

    role: Role
    text: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    parts: tuple[Part, ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; ``parameters`` is the JSON schema of its arguments.

    ``is_custom``: it stands for a tool that takes one text (see ``inference_site.domain.custom_tools``).
    """

    name: str
    description: str | None
    parameters: dict[str, Any]
    is_custom: bool = False


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
        left_out = {
            name: value
            for name in self.__slots__
            if getattr(self, name) in (None, ()) and (value := getattr(defaults, name)) is not None
        }
        return replace(self, **left_out) if left_out else self


ConstraintKind = Literal["json_object", "json_schema", "gbnf", "lark", "regex", "llguidance"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer's text must match.

    ``source`` is the schema as JSON text for ``json_schema``, a llguidance grammar as JSON text for
    ``llguidance``, the grammar or expression itself for the others, and empty for ``json_object``.
    ``param`` names the request's field it came from.
    """

    kind: ConstraintKind
    source: str
    param: str


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

    @property
    def answers(self) -> int:
        """How many choices there are in all; each has exactly one ``Finish``."""
        return self.choices * (len(self.prompts) or 1)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability.

    ``text_bytes`` is the token's part of the UTF-8 text, which may end inside a character.
    ``top`` holds the likeliest tokens at this place, best first; those have no ``top`` themselves.
    """

    token: str
    logprob: float
    text_bytes: bytes
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text; never splits a Unicode character.

    ``logprobs`` are those of the tokens it is made of, when they were asked for.
    """

    text: str
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning, which is not part of the answer."""

    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first of a call has its id and name; the later ones have none.

    ``call`` numbers the calls of one choice from 0; the pieces of ``arguments`` add up to JSON, or
    to the text of a call that ``is_custom``.
    """

    call: int
    arguments: str
    id: str | None = None
    name: str | None = None
    index: int = 0
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingDelta:
    """The embedding of one prompt: little-endian 32-bit floats, of length 1 as a vector."""

    vector: bytes
    index: int = 0


@dataclass(frozen=True, slots=True)
class TokensDelta:
    """The token ids of one prompt, with those the model begins every prompt with."""

    ids: tuple[int, ...]
    index: int = 0


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """The prompt that a chat comes to, and its tokens."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice; each choice has exactly one.

    ``stop`` is the stop text, or the stop token's id, that ended it, if one did.
    """

    reason: FinishReason
    index: int = 0
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the served model's tokenizer: cached ⊂ input, reasoning ⊂ output.

    ``prefill_ms`` is the time spent on the prompts, ``decode_ms`` that on the longest answer.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


Delta = (
    TextDelta
    | ReasoningDelta
    | ToolCallDelta
    | EmbeddingDelta
    | TokensDelta
    | PromptDelta
    | Finish
    | Usage
)
"""What an engine yields, in order: pieces, one ``Finish`` a choice, and ``Usage`` last.

``Usage`` may also come earlier, as a running count; each replaces the one before. A generation that
is stopped before its end is accounted by the last one seen.
"""


class Sink(Protocol):
    """Where an engine puts its deltas, and where it learns that nobody wants more of them."""

    def feed(self, delta: Delta) -> None:
        """Take the next delta. Called on the engine's thread; must not block."""

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now. Read for every token, so it costs an attribute."""
