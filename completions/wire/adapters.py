"""LoRA adapters on the wire. Sources: the documentation of vLLM and llama-server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from inference_site.api.payload import WireObject, WireRequest

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
    """Which workers load the model anew; the events of the model say what came of it."""

    object: Literal["lora_adapter.command"] = "lora_adapter.command"
    model: str
    lora_name: str
    workers: list[str]


class ScaledAdapter(WireRequest):
    """One entry of ``POST /lora-adapters``; the others do not apply."""

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
