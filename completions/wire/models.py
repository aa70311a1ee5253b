"""Models on the wire. Source: API reference, "Models"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from inference_site.gateway.api.payload import WireObject, WireRequest

Status = Literal["loaded", "loading", "unloaded", "failed"]


class ModelLoading(WireObject):
    """The progress of a model's load.

    ``expected_s`` is the expected time until it is ready, from its earlier loads and the loads
    before it; null before the first load. ``progress`` is from 0 to 1, null if unknown. ``waiting``
    is the number of requests that wait for it.
    """

    expected_s: int | None
    progress: float | None
    waiting: int


class ModelTarget(WireObject):
    """A model of a route, and its share of the route's requests, from 0 to 1."""

    model: str
    share: float


class ModelRoute(WireObject):
    """The targets of a route, and its fallbacks in the order in which they are tried."""

    targets: list[ModelTarget]
    fallback: list[str]


class Model(WireObject):
    """One served model. What follows ``owned_by`` is an extension.

    ``status`` is "loaded" when a worker takes work for it; ``workers`` is how many do.
    ``context_length`` is tokens for one sequence; ``capabilities`` is what requests may ask of it;
    ``tools`` says how a loaded model is shown the tools of a request: by its chat template
    ("native") or in the system text ("prompt"); null where it takes none, or is not loaded.
    ``lora_adapters`` names what ``lora`` may name. ``loading`` is there while the status is
    "loading"; ``reason`` says that no worker may load it, and why. ``route`` is there for a name
    that stands for several models: its status is the best of theirs, its context the longest, and
    its capabilities are those of all its targets.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    status: Status
    context_length: int
    workers: int
    capabilities: list[str]
    tools: Literal["native", "prompt"] | None = None
    lora_adapters: list[str]
    loading: ModelLoading | None = None
    reason: str | None = None
    route: ModelRoute | None = None


class ModelList(WireObject):
    """The answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[Model]


class AnthropicModel(WireObject):
    """An entry of the same list for clients of Anthropic's API."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(WireObject):
    """The answer of ``GET /v1/models`` to requests with the header ``anthropic-version``."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AnthropicModelsQuery(BaseModel):
    """Query parameters of the list in Anthropic's form; OpenAI's list is whole."""

    limit: Annotated[int, Field(ge=1, le=1_000)] = 1_000
    after_id: str | None = None
    before_id: str | None = None


class ModelCommand(WireRequest):
    """The body of ``POST /v1/models/load`` and ``/unload``.

    ``worker`` is the id of the worker that is meant. Without it, a load goes to the one with the
    most free memory, and an unload to all.
    """

    model: str = Field(max_length=200)
    worker: str | None = Field(None, max_length=128)


class ModelCommanded(WireObject):
    """Workers that got the command; the model's events have the result."""

    object: Literal["model.command"] = "model.command"
    model: str
    workers: list[str]


class ModelWorker(WireObject):
    """A model in one worker.

    ``progress`` of a load is from 0 to 1, null when it is not known; ``reason`` says why it failed.
    """

    id: str
    host: str
    state: Literal["loading", "ready", "draining", "sleeping", "failed"]
    progress: float | None
    reason: str | None
    slots: int
    busy: int


class ModelEvent(WireObject):
    """One event of ``GET /v1/models/{id}/events``: how the model is now."""

    object: Literal["model.event"] = "model.event"
    model: str
    status: Status
    workers: list[ModelWorker]


_ModelName = Annotated[str, Field(max_length=200)]
_AdapterName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\s\x00]+$")]


class AdapterAdded(WireRequest):
    """The body of ``POST /v1/load_lora_adapter``.

    ``lora_path`` is a GGUF file below ``MODELS_DIR``. ``model`` may be left out where the site has
    a default model, or only one that takes adapters.
    """

    lora_name: _AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=1000)]
    model: _ModelName | None = None


class AdapterRemoved(WireRequest):
    """The body of ``POST /v1/unload_lora_adapter``."""

    lora_name: _AdapterName
    model: _ModelName | None = None


class AdapterCommanded(WireObject):
    """Workers that reload the model; the model's events have the result."""

    object: Literal["lora_adapter.command"] = "lora_adapter.command"
    model: str
    lora_name: str
    workers: list[str]


class ScaledAdapter(WireRequest):
    """One entry of ``POST /lora-adapters``. Adapters that no entry names get the scale 0."""

    id: Annotated[int, Field(ge=0)]
    scale: Annotated[float, Field(strict=False, allow_inf_nan=False)]


class ModelQuery(BaseModel):
    """``?model=`` of ``/lora-adapters``."""

    model: str | SkipJsonSchema[None] = Field(
        None, description="Without it, the default model or the only one that takes adapters."
    )


class ListedAdapter(WireObject):
    """One entry of ``GET /lora-adapters``."""

    id: int
    name: str
    path: str
    scale: float


class AdaptersScaled(WireObject):
    """The answer of ``POST /lora-adapters``."""

    success: Literal[True] = True


class ScaledAdapters(WireRequest):
    """The list of ``POST /lora-adapters``, as a field of an object."""

    adapters: list[ScaledAdapter]
