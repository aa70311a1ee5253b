"""The engine contract, and the import of an engine by its name in ``models.yaml``.

An engine takes domain values and pushes domain values into a sink: no HTTP, no JSON of the API, no
Django. It pushes because the libraries call back on the thread that drives them; an iterator would
cost a second thread and a queue hop for every token.

It raises the errors of ``inference_site.core.domain.errors``: ``InvalidRequest`` for what the
client must change, ``GenerationFailed`` when its library fails, ``EngineUnavailable`` when it
cannot run anything now. Its capabilities and the options of its models are declared in
``inference_site.catalogue.engines``, which the web process reads without the engine's library.
The module of an engine is imported on use, so that a host needs only the libraries of the engines
that it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    PromptDelta,
    TextDelta,
    TokenLogprob,
    TokensDelta,
    Usage,
)
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest

OnEnd = Callable[[Exception | None], None]
"""Takes the end of a request that ran on its own: its error, or None (see ``Engine.start``)."""


class Engine(ABC):
    """A loaded model. Thread-safe: as many requests run at once as there are slots.

    Callers use ``run`` or ``start``. An engine has a method for each operation that the
    capabilities of its models name, or a ``run`` of its own.
    """

    blocks = True
    """Whether ``start`` runs a request to its end on the calling thread."""

    def run(self, request: GenerationRequest, sink: Sink) -> None:
        """Run the request's operation; return when it is complete or the sink is cancelled.

        A cancelled run returns without a ``Finish`` and within one token's time.
        Raise EngineError, after which the sink is fed nothing more.
        """
        getattr(self, request.operation)(request, sink)

    def start(self, request: GenerationRequest, sink: Sink, ended: OnEnd) -> bool:
        """Run the request here and return False; or begin it and return True.

        In the second case the engine calls ``ended`` at the end, with the exception if there is
        one, on a thread that must not be blocked, and maybe before ``start`` has returned.
        """
        self.run(request, sink)
        return False

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate the answers to the messages."""
        raise NotImplementedError

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Continue the prompts as they are."""
        raise NotImplementedError

    def embed(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed one ``EmbeddingDelta`` and ``Finish`` for each prompt."""
        raise NotImplementedError

    def rank(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed one ``ScoreDelta`` and ``Finish`` for each prompt."""
        raise NotImplementedError

    def moderate(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed one ``ModerationDelta`` and ``Finish`` for each prompt, or for the one message."""
        raise NotImplementedError

    def transcribe(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed the transcript of the audio: ``DataDelta``, ``Finish`` and ``Usage``.

        A transcript is one delta; one that ``streams`` has a delta for the JSON of each event.
        """
        raise NotImplementedError

    def translate(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed the transcript of the audio in English (see ``transcribe``)."""
        raise NotImplementedError

    def speak(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed the bytes of the speech in pieces, or the JSON of its events if it ``streams``."""
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

    @property
    def starting(self) -> str:
        """Why the engine cannot run requests yet; empty once it can. Requests wait meanwhile."""
        return ""

    @property
    def fault(self) -> str:
        """Why the engine cannot run requests now, for the operator; empty while it can."""
        return ""

    @property
    def shows_tools(self) -> bool:
        """Whether the model's template renders tools; else they are put into the system message."""
        return True

    @property
    def server(self) -> ServerFacts:
        """The state of the process that runs the model; empty where there is none."""
        return ServerFacts()

    @property
    def context_length(self) -> int | None:
        """Context length in tokens that the server reports; None: that of the model's spec."""
        return None

    def watch(self, on_change: Callable[[], None]) -> None:  # noqa: B027  # Most have no faults.
        """Call ``on_change`` when ``starting`` or ``fault`` changes; it must not block."""

    def sleep(self) -> bool:
        """Free the GPU's memory but keep the process; return False if the engine cannot.

        No request is running when this is called. ``wake`` is called before the next one.
        """
        return False

    def wake(self) -> bool:
        """Run requests again after ``sleep``; return False if the model must be loaded again."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Free the model's memory. No request is running when this is called."""


def start_and_report(start: Callable[[], bool | None], ended: OnEnd) -> None:
    """Call ``start``; call ``ended`` with its error, or unless the request continues on its own.

    For work on behalf of an ``Engine.start`` that has returned: nothing catches its errors.
    ``start`` is an ``Engine.start``, which returns whether the request continues, or an
    ``Engine.run``, after which it never does.
    """
    try:
        continues = start()
    except Exception as exc:  # noqa: BLE001  # The caller handles it.
        ended(exc)
    else:
        if not continues:
            ended(None)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A model's server: its memory in bytes, its metrics, and the file of its output."""

    taken_bytes: int = 0
    telemetry: Mapping[str, float] = field(default_factory=dict)
    log: Path | None = None


class Sink(Protocol):
    """Receives an engine's deltas, and signals when the engine must stop."""

    def feed(self, delta: Delta) -> None:
        """Take the next delta. Called on the engine's thread; must not block."""

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now. Read for every token, so it costs an attribute."""


class Collector:
    """A sink for an answer that no client sees. It is cancelled with the run that asks for it."""

    def __init__(self, run: Sink) -> None:
        self._run = run
        self._pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.tokens: tuple[int, ...] = ()
        self.usage, self.is_complete = Usage(), False

    @property
    def cancelled(self) -> bool:
        """Whether the run is cancelled."""
        return self._run.cancelled

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def feed(self, delta: Delta) -> None:
        """Take the next delta."""
        match delta:
            case TextDelta(text=text, logprobs=logprobs):
                self._pieces.append(text)
                self.logprobs += logprobs
            case PromptDelta(tokens=tokens) | TokensDelta(ids=tokens):
                self.tokens = tokens
            case Usage():
                self.usage = delta
            case Finish():
                self.is_complete = True


def load_engine(spec: ModelSpec) -> Engine:
    """Load the model on its engine. Raise EngineLoadError naming the model and the reason."""
    module = import_module(f"worker.engines.{spec.engine}")
    try:
        engine: Engine = module.load(spec)
    except ImportError as exc:
        extra = spec.engine.replace("_", "-")
        raise EngineLoadError(
            f"Model '{spec.id}': engine '{spec.engine}' is not installed ({exc}). "
            f"Install the extra '{extra}' of pyproject.toml."
        ) from exc
    return engine
