"""Domain values of one generation: what an engine is asked for and what it yields.

Frozen values without I/O, HTTP or JSON. The names follow docs/glossary.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the conversation, as the model's chat template receives it."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampler settings. ``None`` means "the model's own default"; an explicit 0 is honoured."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What one run of a model is asked to do.

    ``max_output_tokens=None`` means "until the context is full".
    ``stop`` holds texts; none of them ever appears in the output.
    ``ignore_eos`` goes on past the model's end-of-sequence token (for benchmarks).
    """

    model: str
    messages: tuple[Message, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text; never splits a Unicode character."""

    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning, which is not part of the answer."""

    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice; each choice has exactly one."""

    reason: FinishReason
    index: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the served model's tokenizer: cached ⊂ input, reasoning ⊂ output."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


Delta = TextDelta | ReasoningDelta | Finish | Usage
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
