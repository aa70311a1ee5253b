"""The engine contract.

An engine takes domain values and pushes domain values into a sink: no HTTP, no JSON of the API, no
Django. It pushes, rather than being iterated, because the libraries call back on the thread that
drives them; an iterator would cost a second thread and a queue hop for every token.

    EngineError
    ├── InvalidRequest            the request cannot be served as it stands (the client's fault)
    │   └── ContextLengthExceeded
    ├── GenerationFailed          the library failed while generating
    └── EngineUnavailable         the engine cannot run anything now; try again
        ├── EngineLoadError       the model could not be loaded; says which file and why
        └── RateLimited           too much is asked of the engine now
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from inference_site.domain.generation import GenerationRequest, Sampling, Sink


class EngineError(Exception):
    """The engine failed."""


class InvalidRequest(EngineError):
    """The engine cannot serve this request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room in the model's context. Both counts are tokens."""

    def __init__(self, context_length: int, input_tokens: int, param: str = "messages") -> None:
        super().__init__(
            f"This model's maximum context length is {context_length} tokens. "
            f"However, your {param} resulted in {input_tokens} tokens. "
            f"Please reduce the length of the {param}.",
            param=param,
        )
        self.context_length = context_length
        self.input_tokens = input_tokens


class GenerationFailed(EngineError):
    """The engine failed while generating."""


class EngineUnavailable(EngineError):
    """The engine cannot run anything now; another time, or another worker, may.

    ``retry_after_s`` is when, in seconds from now, if the engine knows.
    """

    def __init__(self, message: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineLoadError(EngineUnavailable):
    """The model could not be loaded."""


class RateLimited(EngineUnavailable):
    """Too much is asked of the engine now."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost, in the site's currency. ``input`` is for those not cached."""

    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> Decimal:
        """Return what these cost, to the billionth; cached ⊂ input."""
        millionths = (
            Decimal(str(self.input)) * (input_tokens - cached_tokens)
            + Decimal(str(self.cached)) * cached_tokens
            + Decimal(str(self.output)) * output_tokens
        )
        return (millionths / 1_000_000).quantize(Decimal("1e-9"))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One served model: an entry of the catalogue.

    ``slots`` is how many sequences run at once; ``context_length`` is tokens for each of them.
    ``gpu_layers`` is how many layers lie on the GPU, −1 for all that fit. ``aliases`` are other
    names; only what ``is_listed`` is shown to clients. ``projects`` are the names of those that may
    use it, none for all.
    ``lora_adapters`` are files by the names that requests use. ``sampling`` holds what requests
    leave out. ``options`` belong to the engine alone; each engine documents its own.
    """

    id: str
    engine: str
    file: Path | None = None
    slots: int = 8
    context_length: int = 2048
    threads: int = 1
    gpu_layers: int = -1
    aliases: tuple[str, ...] = ()
    is_listed: bool = True
    projects: tuple[str, ...] = ()
    price: Price = field(default_factory=Price)
    lora_adapters: dict[str, Path] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    options: dict[str, Any] = field(default_factory=dict)

    def is_for(self, project: str) -> bool:
        """Whether the project of this name may use the model."""
        return not self.projects or project in self.projects


class Engine(ABC):
    """A loaded model. Thread-safe: as many calls run at once as there are slots.

    The method of an operation that the model's capabilities do not name is never called.
    """

    @abstractmethod
    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate the answers into the sink; return when it is complete or the sink is cancelled.

        A cancelled run returns without a ``Finish`` and within one token's time.
        Raise EngineError, after which the sink is fed nothing more.
        """

    @abstractmethod
    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Continue the request's prompts as they are; otherwise like ``chat``."""

    def embed(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed one ``EmbeddingDelta`` and ``Finish`` for each prompt; otherwise like ``chat``."""
        raise NotImplementedError

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed one ``TokensDelta`` and ``Finish`` for each prompt, which is text."""
        raise NotImplementedError

    def detokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed one ``TextDelta`` and ``Finish`` for each prompt, which is token ids."""
        raise NotImplementedError

    def render(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed the prompt that ``chat`` would begin with, as one ``PromptDelta``."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Free the model's memory. Nothing is running when this is called."""
