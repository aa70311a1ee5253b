"""Moderations on the wire. Source: API reference, "Moderations"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.request_fields.wire import EndUser, ImagePart, TextPart

ModerationPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Texts = Annotated[list[str], Field(min_length=1, max_length=2048)]
Parts = Annotated[list[ModerationPart], Field(min_length=1, max_length=64)]


def _input_kind(value: object) -> str:
    if not isinstance(value, list):
        return "text"
    return "parts" if value and isinstance(value[0], dict) else "texts"


Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[Texts, Tag("texts")] | Annotated[Parts, Tag("parts")],
    Discriminator(_input_kind),
]


class ModerationRequest(WireRequest):
    """The body of ``POST /v1/moderations``. The parts of a list are judged together.

    ``model`` has the default of OpenAI's API: a site has it if the operator gives that name, or
    that alias, to a model.
    """

    input: Input
    model: str = "omni-moderation-latest"
    user: EndUser | None = None


class ModerationResult(WireObject):
    """``results[]``: one text, or all parts. Categories are those of the model."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text", "image"]]]


class ModerationList(WireObject):
    """The answer, in the order of the inputs."""

    id: str
    model: str
    results: list[ModerationResult]
