"""Deltas: pieces of the answers, ends of choices and token counts, which engines feed to a sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Literal

from inference_site.core.domain.compaction import CompactedContext

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]

MAX_TOKENS = 10**9
"""The greatest count of tokens of a generation: the sum of two is an ``integer`` of PostgreSQL."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability.

    ``logprob`` is NaN for the first token of a prompt. ``text_bytes`` is the token's part of the
    UTF-8 text, which may end inside a character. ``top`` has the likeliest tokens at this position,
    best first, without a ``top`` of their own. ``id`` is None if the engine does not report it.
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

    ``logprobs`` are those of its tokens, if they were requested.
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
class RefusalDelta:
    """A piece of the text in which the model refuses to answer; it takes the place of the text."""

    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. Only the first piece of a call has its id and name.

    ``call`` numbers the calls of one choice from 0. The ``arguments`` of all pieces together are
    JSON, or the text of a call of a custom tool (``is_custom``).
    """

    call: int
    arguments: str
    id: str | None = None
    name: str | None = None
    index: int = 0
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingDelta:
    """The embedding of one prompt: little-endian 32-bit floats, a vector of length 1."""

    vector: bytes
    index: int = 0


@dataclass(frozen=True, slots=True)
class ScoreDelta:
    """How well one prompt answers its query: more is better, on the model's own scale."""

    score: float
    index: int = 0


@dataclass(frozen=True, slots=True)
class ModerationDelta:
    """What is harmful in one input, by the API's categories, such as ``hate/threatening``.

    ``scores`` are from 0 to 1. ``input_types`` has for each category what its score is about:
    ``text`` and ``image``. A model may flag an input for a reason that no category names.
    """

    is_flagged: bool
    categories: Mapping[str, bool]
    scores: Mapping[str, float]
    input_types: Mapping[str, tuple[str, ...]]
    index: int = 0


@dataclass(frozen=True, slots=True)
class DataDelta:
    """A piece of speech, the JSON of one event about it, or a whole transcript: sent as it is."""

    data: bytes
    index: int = 0


@dataclass(frozen=True, slots=True)
class TokensDelta:
    """The token ids of one prompt, and the tokens' ``texts`` if they were requested."""

    ids: tuple[int, ...]
    index: int = 0
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankedLogprob:
    """A token of a prompt, or one of the likeliest tokens at its position (vLLM's ``Logprob``).

    ``logprob`` is the natural logarithm of its probability. ``rank`` is 1 for the likeliest token,
    and None for a token that is not among the requested number of likeliest tokens.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The token ids of the prompt of one choice.

    ``logprobs``, if they were requested, has an entry for each token: the token itself and the
    likeliest tokens at its position, by their ids. The entry of the first token is None.
    """

    ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[Mapping[int, RankedLogprob] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Token ids of the answer of one choice, in order; the deltas that follow have their text.

    Tokens of reasoning and calls are included, and the token that ends the answer.
    """

    ids: tuple[int, ...]
    index: int = 0


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """The prompt that the chat template renders from the messages, and its tokens."""

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
class CompactionDelta:
    """The conversation was compacted before a turn. The worker feeds it, not an engine."""

    context: CompactedContext


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice; each choice has exactly one.

    ``stop`` is the stop text or the id of the stop token that ended it, if one did.
    """

    reason: FinishReason
    index: int = 0
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the served model's tokenizer: cached ⊂ input, reasoning ⊂ output.

    ``cache_write_tokens``, a part of the input, were written to a cache, where a server says so.
    ``prefill_ms`` is the time for the prompts, ``decode_ms`` the time for the longest answer.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    cache_write_tokens: int = 0

    def plus(self, other: Usage) -> Usage:
        """Return the usage of two turns of one generation."""
        return Usage(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def bounded(self) -> Usage:
        """Return it with counts that can be stored, whatever a server has reported."""
        read = min(max(self.input_tokens, 0), MAX_TOKENS)
        written = min(max(self.output_tokens, 0), MAX_TOKENS)
        return replace(
            self,
            input_tokens=read,
            cached_tokens=min(max(self.cached_tokens, 0), read),
            output_tokens=written,
            reasoning_tokens=min(max(self.reasoning_tokens, 0), written),
            cache_write_tokens=min(max(self.cache_write_tokens, 0), read),
        )


Delta = (
    TextDelta
    | ReasoningDelta
    | RefusalDelta
    | ToolCallDelta
    | EmbeddingDelta
    | ScoreDelta
    | ModerationDelta
    | DataDelta
    | TokensDelta
    | PromptDelta
    | PromptTokens
    | AnswerTokens
    | PromptProgress
    | CompactionDelta
    | Finish
    | Usage
)
"""Values that an engine feeds to its sink: pieces, a ``Finish`` for each choice, ``Usage`` last.

``Usage`` may also come earlier, as a running count; each replaces the last. A generation that is
stopped before its end is charged for the last ``Usage``, or for the number of its pieces if that is
higher.
"""


def is_output(delta: Delta) -> bool:
    """Whether this is a piece of an answer, for which at least one token was generated."""
    if isinstance(delta, ToolCallDelta):
        return bool(delta.arguments)
    return isinstance(delta, TextDelta | ReasoningDelta | RefusalDelta)
