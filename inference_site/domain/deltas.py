"""What an engine feeds into its sink: pieces of the answer, ends of choices, token counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability.

    ``logprob`` is NaN for the first token of a prompt, which nothing comes before.
    ``text_bytes`` is the token's part of the UTF-8 text, which may end inside a character.
    ``top`` holds the likeliest tokens at this place, best first; those have no ``top`` themselves.
    ``id`` is None where the engine does not tell it.
    """

    token: str
    logprob: float
    text_bytes: bytes
    top: tuple[TokenLogprob, ...] = ()
    id: int | None = None

    def named_by_id(self) -> TokenLogprob:
        """Return the entry, and those of ``top``, with tokens named ``token_id:ID`` as in vLLM."""
        top = tuple(other.named_by_id() for other in self.top)
        token = self.token if self.id is None else f"token_id:{self.id}"
        return replace(self, token=token, top=top)


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
    """The token ids of one prompt; ``texts`` are theirs, if they were asked for."""

    ids: tuple[int, ...]
    index: int = 0
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankedLogprob:
    """A token that a prompt has, or could have had, at one place (vLLM's ``Logprob``).

    ``logprob`` is the natural logarithm of its probability. ``rank`` is 1 for the likeliest token,
    and None for a token that is not among the likeliest ones that were asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The token ids of the prompt of one choice.

    ``logprobs``, if they were asked for, has an entry for each token: the token itself and the
    likeliest ones at its place, by their ids. The first token has None.
    """

    ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[Mapping[int, RankedLogprob] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Token ids of the answer of one choice, in their order; the deltas after it have their text.

    All tokens are named: those of thoughts and calls, and the one that ends the answer.
    """

    ids: tuple[int, ...]
    index: int = 0


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """The prompt that a chat comes to, and its tokens."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a prompt has been read, in tokens; cached ⊂ processed ⊂ total."""

    total: int
    cached: int
    processed: int
    elapsed_ms: float


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
    | PromptTokens
    | AnswerTokens
    | PromptProgress
    | Finish
    | Usage
)
"""What an engine feeds into its sink: pieces, one ``Finish`` a choice, and ``Usage`` last.

``Usage`` may also come earlier, as a running count; each replaces the one before. A generation that
is stopped before its end is accounted by the last one seen, or by its pieces if they are more.
"""


def is_output(delta: Delta) -> bool:
    """Whether this is a piece of an answer, which a token at least was made for."""
    if isinstance(delta, ToolCallDelta):
        return bool(delta.arguments)
    return isinstance(delta, TextDelta | ReasoningDelta)
