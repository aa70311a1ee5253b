"""The kinds of generations: how the deltas of each become frames and a stored result.

This is the contract between the worker and the API apps. The ``AppConfig`` of an API app lists in
``kinds`` the kinds that the app enqueues. ``KINDS`` of the app's module ``kinds`` has a
``GenerationKind`` for each. That module is imported when a kind is first used: beat needs one only
when it ends a generation. The assembler runs once, in the worker, for streaming and other clients
alike, so the streamed and the stored answer cannot differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from importlib import import_module
from typing import Any, Generic, Literal, Protocol

import orjson
from django.apps import AppConfig, apps
from django.db.models import Model

from inference_site.core.domain.deltas import Delta, PromptDelta, Usage
from inference_site.core.domain.errors import Cancelled, ContextLengthExceeded
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult
from inference_site.core.errors.api_errors import ApiError
from inference_site.core.errors.exceptions import api_error
from inference_site.runs.models import Status
from inference_site.runs.streams.batches import Ending, Sent, StoredStream
from inference_site.runs.streams.request_documents import Assembly, AssemblyT, Document, ToStore

StreamForm = Literal["events", "lines", "bytes"]
"""How the frames of a stream are written: server-sent events, lines of JSON, or bytes as they are,
after a first frame that is their media type."""


class Assembler(ABC):
    """A fold over the deltas of one generation: it returns frames, and at last an ending."""

    pieces: int = 0
    """How many pieces of output were recovered."""

    @property
    def sources(self) -> Sequence[Source]:
        """The places that the results of calls so far quote, each URL once."""
        return ()

    def restart(self, sent: Sent, saved: Mapping[str, Any] | None = None) -> Sequence[bytes]:
        """Continue the stream of an earlier attempt; return the frames that close its output.

        Called first, and only if an earlier attempt has sent frames or saved its state. ``sent``
        has no frames if they are lost. The output up to the state ``saved`` stays part of the
        answer.
        """
        return ()

    def recover(self, sent: Sent) -> None:  # noqa: B027  # Whole answers have sent nothing.
        """Continue after the sent frames, to end the stream in place of its worker."""

    def begin(self) -> Sequence[bytes]:
        """Return the frames before the first delta."""
        return ()

    @abstractmethod
    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the frames to send now (none when nothing is streamed)."""

    def calls(self) -> Sequence[SiteCall]:
        """Return the calls that the site must run now, in order.

        There are some before the first delta, after the last one of a turn of the model, or once
        ``next_request`` has returned None: then it is called again after their results.
        """
        return ()

    def save(self) -> Mapping[str, Any]:
        """Return the state before the ``calls`` are run, as JSON, for ``restart``."""
        return {}

    def add_result(self, result: ToolResult) -> Sequence[bytes]:
        """Take the result of the first of the ``calls``; return its frames."""
        raise NotImplementedError

    def next_request(self, request: GenerationRequest) -> GenerationRequest | None:
        """Return the request of the next turn, once there are no ``calls``; None to end.

        ``request`` is that of the request document. After this, a new turn has begun.
        """
        return None

    @abstractmethod
    def complete(self) -> Ending:
        """End after the engine's last delta."""

    @abstractmethod
    def cancel(self) -> Ending:
        """End because the generation was cancelled."""

    @abstractmethod
    def fail(self, error: Exception) -> Ending:
        """End because of this error."""


class StoreResult(Protocol):
    """Stores the result of a generation."""

    def __call__(
        self, generation_id: str, status: str, assembler: Assembler, store: ToStore | None
    ) -> None:
        """Store it. Runs in the transaction of the final row, once, for each terminal status.

        ``store`` is that of the request document; None if the document is lost.
        """


class Replay(Protocol):
    """Rebuilds the stream of an ended generation from what is stored."""

    def __call__(
        self, public_id: str, after: int = -1, *, may_renumber: bool = True
    ) -> StoredStream | None:
        """Return the stream for a reader with the frames up to number ``after``.

        None if the result is not stored or was deleted; without ``may_renumber`` also None if the
        original numbers of the frames are unknown.
        """


class Failure(Protocol):
    """Makes an ending of an error without an assembler."""

    def __call__(self, error: Exception, *, first: int = 0) -> Ending:
        """Return the ending; ``first`` is the number of its first frame."""


@dataclass(frozen=True, slots=True)
class GenerationKind(Generic[AssemblyT]):
    """How generations of one kind are assembled and stored.

    ``assembler`` creates the assembler from the ``assembly`` of the request document, which has the
    type ``assembly``. ``failure`` ends a generation without an assembler: its document is lost, it
    never reached a worker, or its frames are lost. ``form`` is that of its streams.

    Kinds whose results are stored have the others, too. ``store_result`` stores the result.
    ``recover`` makes an assembler from the id and the sent frames, to end a generation in place of
    its worker; None if too little is known. ``rebuild`` makes a lost request document again; None
    if it cannot. ``replay`` rebuilds the stream of an ended generation. ``is_deleted`` returns
    whether the result may not be read any more.

    ``ping`` is the event that keeps a silent stream open, in APIs that have one; it is no frame.
    """

    assembly: type[AssemblyT]
    assembler: Callable[[AssemblyT], Assembler]
    failure: Failure
    store_result: StoreResult | None = None
    recover: Callable[[str, Sent], Assembler | None] | None = None
    rebuild: Callable[[str], Document[AssemblyT] | None] | None = None
    replay: Replay | None = None
    is_deleted: Callable[[str], bool] | None = None
    form: StreamForm = "events"
    ping: bytes = b""


@cache
def kind_of(name: str) -> GenerationKind[Any]:
    """Return a kind, importing it at the first call. Raise KeyError for an unknown one."""
    for config in apps.get_app_configs():
        if name in _names(config):
            kinds: dict[str, GenerationKind[Any]] = import_module(f"{config.name}.kinds").KINDS
            return kinds[name]
    raise KeyError(name)


def import_kinds() -> list[GenerationKind[Any]]:
    """Import all kinds, so that no generation waits for it; return the first kind of each app."""
    firsts: list[GenerationKind[Any]] = []
    for config in apps.get_app_configs():
        kinds = [kind_of(name) for name in _names(config)]
        firsts += kinds[:1]
    return firsts


def stored_model_of(public_id: str) -> type[Model] | None:
    """Return the model whose rows are stored results of generations with such an id, if any.

    An app names its model in ``stored_as`` of its ``AppConfig``, by the prefix of the ids.
    """
    for config in apps.get_app_configs():
        prefixes: Mapping[str, str] = getattr(config, "stored_as", {})
        for prefix, model in prefixes.items():
            if public_id.startswith(prefix):
                return config.get_model(model)
    return None


def _names(config: AppConfig) -> Sequence[str]:
    names: Sequence[str] = getattr(config, "kinds", ())
    return names


def _modules(field: str) -> list[Any]:
    """Return the modules that apps name in this attribute of their ``AppConfig``."""
    named = [getattr(config, field, None) for config in apps.get_app_configs()]
    return [import_module(name) for name in named if name]


class Mending(Protocol):
    """A module that an app names in ``mending``: it repairs results that contradict their rows."""

    def contradictions(self) -> Mapping[str, int]:
        """Count the stored results that contradict their generations, by kind of contradiction."""

    def mend(self) -> None:
        """End the stored results that contradict their generations."""


@cache
def mendings() -> Collection[Mending]:
    """Return these modules of all apps. Beat calls each of them every second."""
    return _modules("mending")


class Closing(Protocol):
    """A module that an app names in ``closing``: it has rows of generations that must be closed."""

    def usage_of_saved_turns(self, generation_id: str) -> Usage:
        """Return what the turns that are saved of it have used; call it before ``close``."""

    def close(self, generation_id: str) -> object:
        """Close them, in the transaction that ends the generation in place of its worker."""


@cache
def closings() -> Collection[Closing]:
    """Return these modules of all apps."""
    return _modules("closing")


class Delivery(Protocol):
    """A module that an app names in ``delivery``: it keeps the answers of generations."""

    def deliver(self, generation_id: str, status: Status, ending: Ending, cost: Decimal) -> None:
        """Keep the answer, in the transaction that ends the generation in its worker.

        Called if the request document ``is_delivered``.
        """


@cache
def deliveries() -> Collection[Delivery]:
    """Return these modules of all apps."""
    return _modules("delivery")


class Retention(Protocol):
    """A module that an app names in ``retention``: it deletes what is past its retention."""

    def prune(self, until: float) -> int:
        """Delete until the monotonic clock passes ``until``; return how much was deleted."""


@cache
def retentions() -> Collection[Retention]:
    """Return these modules of all apps."""
    return _modules("retention")


class Forgetting(Protocol):
    """A module that an app names in ``forgetting``: it deletes what is stored of an end user."""

    def forget(
        self, end_user: str, project_id: int | None, generation_ids: Sequence[str]
    ) -> Mapping[str, int]:
        """Delete the results of these generations, and what else names the end user.

        Return how many objects of each kind had content, by the plural of the kind's name. A
        second call does nothing. Without a project, of all projects.
        """


@cache
def forgettings() -> Collection[Forgetting]:
    """Return these modules of all apps."""
    return _modules("forgetting")


class Naming(Protocol):
    """A module that an app names in ``naming``: the metadata of its results may name end users."""

    def results_naming(self, end_user: str, project_id: int | None) -> Collection[str]:
        """Return the generations with results that name the end user; without a project, of all."""


@cache
def namings() -> Collection[Naming]:
    """Return these modules of all apps."""
    return _modules("naming")


def recovered(
    kind: GenerationKind[Any], generation_id: str, sent: Sent
) -> tuple[Assembler | None, int]:
    """Return an assembler that ends a generation, and the number of the first frame of the end.

    A generation that can be recovered has sent frames, so an empty log means that they are lost.
    """
    if kind.recover is None:
        return None, sent.next
    if sent.next:
        return kind.recover(generation_id, sent), sent.next
    lost = sent.beyond()
    assembler = kind.recover(generation_id, lost)
    return assembler, 0 if assembler is None else lost.next


class WholeAnswerAssembler(Assembler):
    """The base of assemblers that never stream: they send nothing but the ending."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the answer, after all deltas."""

    def complete(self) -> Ending:
        return Ending([], 200, orjson.dumps(self.answer()), finish_reason="stop")

    def cancel(self) -> Ending:
        return cancelled(self.fail(Cancelled()))

    def fail(self, error: Exception) -> Ending:
        return failure(error)


class PromptCountAssembler(WholeAnswerAssembler):
    """The base of assemblers that only count the tokens of a prompt."""

    def __init__(self, _: Assembly) -> None:
        self.count = 0

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Count the tokens of the prompt."""
        if isinstance(delta, PromptDelta):
            self.count = len(delta.tokens)
        return ()


DONE = b"data: [DONE]\n\n"
"""The last frame of a stream of OpenAI's completions, chat or not."""


def cancelled(refusal: Ending, frames: Sequence[bytes] = ()) -> Ending:
    """Return the ending of a cancel with these frames; ``refusal`` is the failure of Cancelled.

    The client that cancelled has left or was answered already. A client that sent the same request
    again, with the same idempotency key, reads the error and may retry.
    """
    return replace(refusal, frames=frames, error_code="", is_early=False)


def failure(error: Exception, partial: dict[str, Any] | None = None, *, first: int = 0) -> Ending:
    """Return the ending of a failed completion: a status before the first byte, an event after it.

    ``partial`` is the object of the answer so far. Events of completions have no numbers, so
    ``first`` is not used (see ``Failure``).
    """
    answer = api_error(error)
    envelope = answer.envelope
    if partial is not None:
        envelope["error"]["partial_response"] = partial
    body = orjson.dumps(envelope)
    return error_ending(answer, body, [b"data: " + body + b"\n\n", DONE])


def error_with_names(error: Exception, subject: str, names: Mapping[str, str]) -> ApiError:
    """Return the API error with the names that the fields have in the client's request.

    ``subject`` is the field with the model's input; ``names`` are those of other fields by the
    names that engines know.
    """
    if isinstance(error, ContextLengthExceeded):  # Its message names the field too.
        error = error.of(subject)
    client_error = api_error(error)
    if client_error.param is not None:
        client_error.param = names.get(client_error.param, client_error.param)
    return client_error


def error_ending(
    error: ApiError, body: bytes, frames: Sequence[bytes], *, is_early: bool = True
) -> Ending:
    """Return the ending of a failure: this body for a whole answer, these frames for a stream."""
    return Ending(
        frames,
        error.status,
        body,
        error_code=error.code or error.type,
        is_early=is_early,
        retry_after_s=error.retry_after_s,
    )
