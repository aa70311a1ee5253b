"""``POST /api/pull``: has a worker fetch a model of the hub, and follows that pull.

The pull is the same as the console's (``model_store.models.Pull``): a row that a worker takes. So
it goes on when its client leaves, and whoever asks for the same meanwhile follows the same row.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator

import django.db
import orjson
import redis.exceptions
from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.ollama import wire
from completions.ollama.assembler import failure
from completions.ollama.views import OllamaView
from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Scope
from inference_site.api.authentication import caller_of
from inference_site.api.payload import WireObject, parse
from inference_site.api.schema import documented
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.hub import HubError, Reference
from inference_site.domain.model_spec import ModelSpec
from inference_site.errors.api_errors import (
    ConflictError,
    ForbiddenError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    RateLimitError,
)
from inference_site.fleet import fleet
from inference_site.gateway.handoff import Feed, hand_feed
from inference_site.model_store.models import MOST_UNFINISHED, Pull, PullState, TooManyPulls
from inference_site.storage.postgresql import release_connection_after
from inference_site.streams.batches import Ending
from inference_site.submission.model_access import may_use

logger = logging.getLogger(__name__)

_LONGEST_NAME = 200
_HOST = re.compile(
    r"(?!(?:hf|https|hf\.co|huggingface\.co)[:/])(?:localhost|[^/:]*[.:][^/]*)/", re.IGNORECASE
)
"""How a name of Ollama's begins that says where it is: what is before its first slash is a host."""
_LOOK_S = 0.5
_REPEAT_S = 10.0
"""A line is repeated after so long: a proxy may end a stream that is silent."""
_CLAIMED_WITHIN_S = 5.0
"""A worker that is free takes a pull within this time."""
_TAKEN_UP_WITHIN_S = 10.0
"""This process and the workers know a new model within this time."""
_LOADED_WITHIN_S = 60.0
"""A load that takes longer is not waited for."""
_MANIFEST = wire.OllamaProgress(status="pulling manifest")


class PullView(OllamaView):
    """``POST /api/pull``."""

    scope = Scope.MODELS

    @documented(
        body=wire.PullRequest,
        answer=wire.OllamaPulled,
        lines=wire.OllamaPulled | wire.OllamaProgress | wire.OllamaError,
        errors=(NotFoundError, ConflictError, RateLimitError),
        error=wire.OllamaError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Have a worker fetch a model of the hub, which is served then."""
        body = parse(wire.PullRequest, request.data)
        name = (body.model or body.name or "").strip()
        if not name:
            raise InvalidRequestError("Missing required parameter: 'model'.", param="model")
        if body.insecure:
            raise InvalidRequestError(
                "Invalid 'insecure': the hub is asked as its address says.", param="insecure"
            )
        caller = caller_of(request)
        known = catalogue().named(name, caller.project_name)
        if known is not None and may_use(caller, known):
            done = wire.OllamaPulled(status="success", model=known.id)
            response: HttpResponse = Response(done.model_dump())
        else:
            response = _pulled(request, caller, name, stream=body.stream is not False)
        if body.ignored_params:
            response["x-unsupported-params"] = ",".join(body.ignored_params)
        return response


def _pulled(request: Request, caller: Caller, name: str, *, stream: bool) -> HttpResponse:
    """Join the pull of this name, and hand over how it goes on."""
    if caller.allowed_models:
        raise ForbiddenError(
            "This API key allows some models only, so it pulls no others.",
            param="model",
            code="model_not_allowed",
        )
    reference = str(_reference(name))
    try:
        pull = Pull.objects.join(reference)
    except TooManyPulls as exc:
        raise RateLimitError(f"{MOST_UNFINISHED} pulls wait or run already.") from exc
    logger.info("the pull %s of %s is asked for", pull.pk, reference)
    lines = _lines(_FollowedPull(pull.pk, caller.project_name))
    return hand_feed(request, Feed(lines, stream=stream, lines=True))


def _reference(name: str) -> Reference:
    """Return what of the hub is meant. Raise InvalidRequestError, and NotFoundError for a name of
    Ollama's library, which is no hub of this site."""
    if len(name) > _LONGEST_NAME:
        raise InvalidRequestError(
            f"Invalid 'model': it is longer than {_LONGEST_NAME} characters.", param="model"
        )
    if "/" not in name:
        raise NotFoundError(
            f"model '{name}' not found: models are pulled as hf.co/OWNER/NAME:QUANTIZATION",
            param="model",
        )
    if _HOST.match(name):
        raise InvalidRequestError(
            f"'{name.partition('/')[0]}' is no hub of this site: "
            "models are pulled as hf.co/OWNER/NAME:QUANTIZATION",
            param="model",
        )
    try:
        return Reference.read(name.removesuffix(":latest"))  # Which means no quantisation.
    except HubError as exc:
        raise InvalidRequestError(str(exc), param="model") from exc


async def _lines(followed: _FollowedPull) -> AsyncIterator[bytes | Ending]:
    """Yield how a pull goes on, as lines of JSON, and at last how it has ended."""
    sent, sent_at = _line(_MANIFEST), time.monotonic()
    yield sent
    while not isinstance(now := await asyncio.to_thread(followed.look), Ending):
        if now != sent or time.monotonic() - sent_at >= _REPEAT_S:
            sent, sent_at = now, time.monotonic()
            yield sent
        await asyncio.sleep(_LOOK_S)
    yield now


class _FollowedPull:
    """A pull as one client sees it.

    Of a split model the row tells the sizes of the part that is being fetched, one after another.
    """

    def __init__(self, pk: int, project: str) -> None:
        self._pk, self._project = pk, project
        self._began_at, self._completed_at = time.monotonic(), 0.0
        self._part, self._had = 1, 0
        self._line = _line(_MANIFEST)

    def look(self) -> bytes | Ending:
        """Return the line that says how the pull is now, or how it has ended."""
        try:
            with release_connection_after():
                pull = Pull.objects.get(pk=self._pk)
        except django.db.Error:  # PostgreSQL is away; the pull goes on.
            return self._line
        now = self._now(pull)
        if isinstance(now, bytes):
            self._line = now
        return now

    def _now(self, pull: Pull) -> bytes | Ending:
        match PullState(pull.state):
            case PullState.QUEUED:
                is_late = time.monotonic() - self._began_at > _CLAIMED_WITHIN_S
                waits = wire.OllamaProgress(status="waiting for a worker")
                return _line(waits if is_late else _MANIFEST)
            case PullState.RUNNING:
                return self._progress(pull)
            case PullState.COMPLETED:
                return self._served(pull)
            case PullState.CANCELLED:
                return failure(ConflictError("An operator has stopped the pull."))
            case PullState.FAILED:
                return failure(InternalError(pull.error))

    def _progress(self, pull: Pull) -> bytes:
        if not pull.size_bytes:
            return _line(_MANIFEST)
        if pull.have_bytes < self._had:
            self._part += 1
        self._had = pull.have_bytes
        if pull.have_bytes >= pull.size_bytes:
            return _line(wire.OllamaProgress(status="verifying sha256 digest"))
        part = f"#{self._part}" if self._part > 1 else ""
        return _line(
            wire.OllamaProgress(
                status=f"pulling {pull.reference}",
                digest=f"{pull.reference}{part}",
                total=pull.size_bytes,
                completed=pull.have_bytes,
            )
        )

    def _served(self, pull: Pull) -> bytes | Ending:
        """Return the end of a pull once its model can be used, or does not come to that soon."""
        self._completed_at = self._completed_at or time.monotonic()
        since_s = time.monotonic() - self._completed_at
        spec = catalogue().find(pull.model_id, self._project)
        status = None if spec is None else _status_of(spec)
        if since_s <= _TAKEN_UP_WITHIN_S and status is None:
            return _line(wire.OllamaProgress(status="writing manifest"))
        if since_s <= _LOADED_WITHIN_S and status == fleet.ModelStatus.LOADING:
            return _line(wire.OllamaProgress(status="loading model"))
        if spec is None:
            told = f"{pull.reference} was pulled, but your project has no model '{pull.model_id}'."
            return failure(ConflictError(told))
        done = _line(wire.OllamaPulled(status="success", model=spec.id))
        return Ending([done], 200, done)


def _status_of(spec: ModelSpec) -> fleet.ModelStatus | None:
    """Return the status of a model; None if no worker has taken it up, and none would on demand."""
    try:
        status = fleet.status_of(spec.id)
    except redis.exceptions.RedisError:
        return None
    is_taken_up = status != fleet.ModelStatus.UNLOADED or fleet.is_on_demand(spec)
    return status if is_taken_up else None


def _line(told: WireObject) -> bytes:
    return orjson.dumps(told.model_dump(exclude_none=True)) + b"\n"
