"""Routes: names in the models file that stand for several of its models.

A route shares requests among its targets by their weights, and has fallbacks for when the target of
a request cannot serve it. It is no model: nothing is loaded, priced or counted by its name. Its
targets are models of the same file, never routes, so there is no cycle and nothing to follow.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any

from pydantic import Field, field_validator

from inference_site.catalogue.operator_settings import BadKey, Names, OperatorSettings, Text
from inference_site.domain.model_spec import ModelSpec

_CONTEXT_ELSEWHERE = 2**20
"""What the context of a model on another server counts as, if its entry does not say."""


class TargetEntry(OperatorSettings):
    """A target, and its share of the requests beside the weights of the others."""

    model: Text
    weight: float = Field(1.0, ge=0, le=1e6)


class RouteEntry(OperatorSettings):
    """What an entry with ``route`` may say."""

    route: Annotated[tuple[TargetEntry, ...], Field(strict=False)]
    fallback: Names = ()
    max_queue_s: float | None = Field(None, ge=0)
    listed: bool = True

    @field_validator("route")
    @classmethod
    def _has_a_target(cls, targets: tuple[TargetEntry, ...]) -> tuple[TargetEntry, ...]:
        if not targets:
            raise ValueError("it has no targets")
        if not any(target.weight for target in targets):
            raise ValueError("all weights are zero")
        return targets


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a route. The context, in tokens, is what is known of it before it is asked."""

    spec: ModelSpec
    context_length: int
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Route:
    """A name for several models.

    A queue that is estimated to be longer than ``max_queue_s`` makes a request fall back, too.
    """

    id: str
    targets: tuple[Target, ...]
    fallback: tuple[Target, ...] = ()
    max_queue_s: float | None = None
    is_listed: bool = True
    aliases: tuple[str, ...] = ()

    def is_for(self, project: str) -> bool:
        """Whether the project of this name may use any of its models."""
        return bool(self.candidates(project))

    def candidates(self, project: str, key: str = "", earlier: str = "") -> list[Target]:
        """Return the models that may answer, in the order in which they are tried.

        The first is drawn by weight: always the same one for a ``key``, while it can serve. Without
        a key it is the ``earlier`` target, if that has a share, else any. Weighted rendezvous
        hashing: when weights or targets change, no more keys move than have to.
        """
        shares = [one for one in self.targets if one.weight and one.spec.is_for(project)]
        again = [] if key else [one for one in shares if one.spec.id == earlier]
        drawn = key or secrets.token_hex(16)
        first = again or sorted(shares, key=lambda one: _turn(one, f"{project}/{drawn}"))
        rest = [one for one in self.fallback if one.spec.is_for(project)]
        return list({one.spec.id: one for one in (*first[:1], *rest)}.values())

    @property
    def specs(self) -> list[ModelSpec]:
        """All its models, targets first."""
        return list({one.spec.id: one.spec for one in (*self.targets, *self.fallback)}.values())


def _turn(target: Target, key: str) -> float:
    """Return a number that is the least of all in as large a part of the keys as the weight is."""
    digest = blake2b(f"{target.spec.id}/{key}".encode(), digest_size=8).digest()
    uniform = ((int.from_bytes(digest) >> 12) + 0.5) / 2**52
    return -math.log(uniform) / target.weight


def read_route(
    id_: str, entry: Mapping[str, Any], specs: Mapping[str, ModelSpec], entries: Mapping[str, Any]
) -> Route:
    """Return the route of an entry; ``specs`` are the models of the file. Raise BadKey."""
    known = RouteEntry.read(dict(entry))

    def target(name: str, path: tuple[str, ...], weight: float = 0.0) -> Target:
        if (spec := specs.get(name)) is None:
            is_route = name in entries
            raise BadKey(path, f"{name!r} is a route" if is_route else f"unknown model {name!r}")
        says = "context_length" in entries[name] or spec.file is not None
        return Target(spec, spec.context_length if says else _CONTEXT_ELSEWHERE, weight)

    targets: dict[str, Target] = {}
    for number, one in enumerate(known.route):
        path = ("route", str(number), "model")
        if one.model in targets:
            raise BadKey(path, f"{one.model!r} is there twice")
        targets[one.model] = target(one.model, path, one.weight)
    fallback = [target(name, ("fallback", str(i))) for i, name in enumerate(known.fallback)]
    return Route(id_, tuple(targets.values()), tuple(fallback), known.max_queue_s, known.listed)
