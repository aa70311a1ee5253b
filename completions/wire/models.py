"""Models on the wire. Source: API reference, "Models"."""

from __future__ import annotations

from typing import Literal

from inference_site.http.payload import WireObject


class Model(WireObject):
    """One served model. ``status``, ``context_length`` and ``workers`` are extensions.

    ``context_length`` is tokens for one sequence; ``workers`` is how many live workers serve it.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    status: Literal["loaded", "unloaded"]
    context_length: int
    workers: int


class ModelList(WireObject):
    """The answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[Model]
