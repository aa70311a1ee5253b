"""Ollama's views of models: ``/api/tags``, ``/api/ps``, ``/api/show`` and ``/api/pull``.

A pull is a row that a worker claims (``model_store.models.Pull``), as from the console. So it
continues when its client disconnects, and two requests for the same model share one row.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import django.db
import orjson
import redis.exceptions
from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.ollama import wire
from completions.ollama.assembler import failure
from completions.ollama.views import OllamaView
from completions.views.models import wire_models, wire_route
from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Scope
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.gguf_files import chat_template, metadata_before_vocabulary
from inference_site.catalogue.hub import HubError, Reference
from inference_site.catalogue.model_files import architecture_of, quantisation_of
from inference_site.catalogue.model_store.models import (
    MOST_UNFINISHED,
    Pull,
    PullState,
    TooManyPulls,
)
from inference_site.catalogue.models_file import Route
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.errors.api_errors import (
    ConflictError,
    ForbiddenError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    RateLimitError,
)
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.payload import WireObject
from inference_site.gateway.api.schema import documented
from inference_site.gateway.handoff import Feed, hand_feed
from inference_site.gateway.submission.model_access import may_use
from inference_site.runs.streams.batches import Ending

logger = logging.getLogger(__name__)

_VERSION = "0.12.0"
"""The release of Ollama with this API. Clients check for a minimal version."""
_FOR_EVER = "2318-01-01T00:00:00Z"
_CAPABILITIES = {
    "chat": "completion",
    "embeddings": "embedding",
    "suffix": "insert",
    "tools": "tools",
    "vision": "vision",
}
_THOUGHTS = ("think", "reasoning")
"""Words in the chat templates of models that think."""
_MAX_NAME_LENGTH = 200
_HOST = re.compile(
    r"(?!(?:hf|https|hf\.co|huggingface\.co)[:/])(?:localhost|[^/:]*[.:][^/]*)/", re.IGNORECASE
)
"""The beginning of a name with a registry's host before the first slash."""
_POLL_S = 0.5
_REPEAT_S = 10.0
"""Interval after which a line is repeated: a proxy may close a silent stream."""
_CLAIMED_WITHIN_S = 5.0
"""Time in which a free worker claims a pull."""
_REFRESHED_WITHIN_S = 10.0
"""Time in which this process and the workers read a new model's entry."""
_LOADED_WITHIN_S = 60.0
"""How long to wait for the load of the model."""
_MANIFEST = wire.OllamaProgress(status="pulling manifest")


class TagsView(OllamaView):
    """``GET /api/tags``."""

    @documented(answer=wire.OllamaModels, error=wire.OllamaError)
    def get(self, request: Request) -> Response:
        """List the models."""
        caller = caller_of(request)
        routes = catalogue().listed_routes(caller.project_name)
        names = [_as_model(one, caller) for one in routes if may_use(caller, one)]
        return Response({"models": [_summary(spec) for spec in (*_listed(caller), *names)]})


class PsView(OllamaView):
    """``GET /api/ps``."""

    @documented(answer=wire.OllamaLoadedModels, error=wire.OllamaError)
    def get(self, request: Request) -> Response:
        """List the models that are loaded."""
        specs = _listed(caller_of(request))
        loaded = {model.id for model in wire_models(specs) if model.status == "loaded"}
        running = []
        for spec in specs:
            if spec.id in loaded:
                entry = _summary(spec)
                del entry["modified_at"]
                entry |= {"expires_at": _FOR_EVER, "size_vram": 0}
                running.append({**entry, "context_length": fleet.context_of(spec)})
        return Response({"models": running})


class ShowView(OllamaView):
    """``POST /api/show``."""

    @documented(
        body=wire.ShowRequest,
        answer=wire.OllamaModelInfo,
        errors=(NotFoundError,),
        error=wire.OllamaError,
    )
    def post(self, request: Request) -> Response:
        """Describe a model."""
        body = self.parse(wire.ShowRequest, request.data)
        name = body.model or body.name
        if not name:
            raise InvalidRequestError("Missing required parameter: 'model'.", param="model")
        caller = caller_of(request)
        model = catalogue().named(name, caller.project_name)
        if model is None or not may_use(caller, model):
            raise NotFoundError(f"model '{name[:100]}' not found", param="model")
        capabilities: Collection[str]
        if isinstance(model, Route):
            spec, capabilities = _as_model(model, caller), wire_route(model, caller).capabilities
        else:
            spec, capabilities = model, fleet.capabilities_of(model)
        template = (chat_template(spec.file) if spec.file else None) or ""
        thinks = "chat" in capabilities and any(word in template for word in _THOUGHTS)
        summary, family = _summary(spec), architecture_of(spec) or ""
        length = {f"{family or 'model'}.context_length": fleet.context_of(spec)}
        return Response(
            {
                "modelfile": "",
                "parameters": "",
                "template": template,
                "details": summary["details"],
                "model_info": {"general.architecture": family, **length},
                "capabilities": [
                    *(named for name, named in _CAPABILITIES.items() if name in capabilities),
                    *(["thinking"] if thinks else []),
                ],
                "modified_at": summary["modified_at"],
            }
        )


class VersionView(OllamaView):
    """``GET /api/version``."""

    @documented(answer=wire.OllamaVersion, error=wire.OllamaError)
    def get(self, request: Request) -> Response:
        """Get the version of Ollama's API."""
        return Response({"version": _VERSION})


def _listed(caller: Caller) -> list[ModelSpec]:
    listed = catalogue().listed(caller.project_name)
    return [spec for spec in listed if may_use(caller, spec)]


def _as_model(route: Route, caller: Caller) -> ModelSpec:
    """Return the first model of a route under the route's name: Ollama's API has no routes."""
    first = next(spec for spec in route.specs if spec.is_for(caller.project_name))
    return replace(first, id=route.id)


def _summary(spec: ModelSpec) -> dict[str, Any]:
    stat = spec.file.stat() if spec.file and spec.file.exists() else None
    family = architecture_of(spec) or ""
    modified = datetime.fromtimestamp(stat.st_mtime if stat else 0, UTC)
    header: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # It is on another host, or a GGML file.
        header = metadata_before_vocabulary(spec.file) if spec.file else {}
    size, kind = header.get("general.size_label"), header.get("general.file_type")
    quantization = quantisation_of(kind) or "unknown" if isinstance(kind, int) else ""
    return {
        "name": spec.id,
        "model": spec.id,
        "modified_at": modified.isoformat().replace("+00:00", "Z"),
        "size": stat.st_size if stat else 0,
        # Ollama's digest is that of the file; here it only identifies the model.
        "digest": hashlib.sha256(spec.id.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": family,
            "families": [family] if family else None,
            "parameter_size": size if isinstance(size, str) else "",
            "quantization_level": quantization,
        },
    }


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
        """Let a worker fetch a model from the hub; it is served afterwards."""
        body = self.parse(wire.PullRequest, request.data)
        name = (body.model or body.name or "").strip()
        if not name:
            raise InvalidRequestError("Missing required parameter: 'model'.", param="model")
        if body.insecure:
            raise InvalidRequestError(
                "Invalid 'insecure': the address of the hub decides between HTTP and HTTPS.",
                param="insecure",
            )
        caller = caller_of(request)
        known = catalogue().named(name, caller.project_name)
        if known is not None and may_use(caller, known):
            done = wire.OllamaPulled(status="success", model=known.id)
            return Response(done.model_dump())
        if caller.allowed_models or caller.project_models:
            raise ForbiddenError(
                "This API key or its project allows some models only, so it pulls no others.",
                param="model",
                code="model_not_allowed",
            )
        reference = str(_reference(name))
        try:
            pull = Pull.objects.join(reference)
        except TooManyPulls as exc:
            raise RateLimitError(f"{MOST_UNFINISHED} pulls wait or run already.") from exc
        logger.info("the pull %s of %s was requested", pull.pk, reference)
        lines = _lines(_FollowedPull(pull.pk, caller.project_name))
        return hand_feed(request, Feed(lines, stream=body.stream is not False, lines=True))


def _reference(name: str) -> Reference:
    """Return the reference on the hub.

    Raise InvalidRequestError for an invalid name, and NotFoundError for a name from Ollama's
    library, which this site cannot pull from.
    """
    if len(name) > _MAX_NAME_LENGTH:
        raise InvalidRequestError(
            f"Invalid 'model': it is longer than {_MAX_NAME_LENGTH} characters.", param="model"
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
        return Reference.read(name.removesuffix(":latest"))  # Ollama's tag names no quantization.
    except HubError as exc:
        raise InvalidRequestError(str(exc), param="model") from exc


async def _lines(followed: _FollowedPull) -> AsyncIterator[bytes | Ending]:
    """Yield the progress of a pull as lines of JSON, and at last its end."""
    sent, sent_at = _line(_MANIFEST), time.monotonic()
    yield sent
    while not isinstance(now := await asyncio.to_thread(followed.current), Ending):
        if now != sent or time.monotonic() - sent_at >= _REPEAT_S:
            sent, sent_at = now, time.monotonic()
            yield sent
        await asyncio.sleep(_POLL_S)
    yield now


class _FollowedPull:
    """The state of a pull for one client.

    For a split model the row has the sizes of the part that the worker fetches now.
    """

    def __init__(self, pk: int, project: str) -> None:
        self._pk, self._project = pk, project
        self._began_at, self._completed_at = time.monotonic(), 0.0
        self._part, self._have_bytes = 1, 0
        self._line = _line(_MANIFEST)

    def current(self) -> bytes | Ending:
        """Return the line with the current state of the pull, or its end."""
        try:
            with release_connection_after():
                pull = Pull.objects.get(pk=self._pk)
        except django.db.Error:  # The pull continues while PostgreSQL is down.
            return self._line
        line: bytes | Ending
        match PullState(pull.state):
            case PullState.QUEUED:
                is_late = time.monotonic() - self._began_at > _CLAIMED_WITHIN_S
                waits = wire.OllamaProgress(status="waiting for a worker")
                line = _line(waits if is_late else _MANIFEST)
            case PullState.RUNNING:
                line = self._progress(pull)
            case PullState.COMPLETED:
                line = self._served(pull)
            case PullState.CANCELLED:
                line = failure(ConflictError("An operator has stopped the pull."))
            case PullState.FAILED:
                line = failure(InternalError(pull.error))
        if isinstance(line, bytes):
            self._line = line
        return line

    def _progress(self, pull: Pull) -> bytes:
        if not pull.size_bytes:
            return _line(_MANIFEST)
        if pull.have_bytes < self._have_bytes:
            self._part += 1
        self._have_bytes = pull.have_bytes
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
        """Return the end of a completed pull once its model is loaded, or the wait is over."""
        self._completed_at = self._completed_at or time.monotonic()
        since_s = time.monotonic() - self._completed_at
        spec = catalogue().find(pull.model_id, self._project)
        status = None if spec is None else _status_of(spec)
        if since_s <= _REFRESHED_WITHIN_S and status is None:
            return _line(wire.OllamaProgress(status="writing manifest"))
        if since_s <= _LOADED_WITHIN_S and status == fleet.ModelStatus.LOADING:
            return _line(wire.OllamaProgress(status="loading model"))
        if spec is None:
            return failure(
                ConflictError(
                    f"{pull.reference} was pulled, but your project has no model '{pull.model_id}'."
                )
            )
        done = _line(wire.OllamaPulled(status="success", model=spec.id))
        return Ending([done], 200, done)


def _status_of(spec: ModelSpec) -> fleet.ModelStatus | None:
    """Return the status of a model; None if no worker has it, and none loads it on demand."""
    try:
        status = fleet.status_of(spec.id)
    except redis.exceptions.RedisError:
        return None
    is_served = status != fleet.ModelStatus.UNLOADED or fleet.is_on_demand(spec)
    return status if is_served else None


def _line(entry: WireObject) -> bytes:
    return orjson.dumps(entry.model_dump(exclude_none=True)) + b"\n"
