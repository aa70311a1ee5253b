"""Models on the wire. Source: API reference, "Models"."""

from __future__ import annotations

from typing import Literal

from inference_site.http.payload import WireObject


class Model(WireObject):
    """One served model. What follows ``owned_by`` is an extension.

    ``context_length`` is tokens for one sequence; ``workers`` is how many live workers serve it;
    ``capabilities`` is what requests may ask of it; ``lora_adapters`` names what ``lora`` may name.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    status: Literal["loaded", "unloaded"]
    context_length: int
    workers: int
    capabilities: list[str]
    lora_adapters: list[str]


class ModelList(WireObject):
    """The answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[Model]
