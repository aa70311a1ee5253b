"""Routes: names in the models file that stand for several of its models.

A route divides requests among its targets by weight, and has fallbacks for a request whose target
cannot serve it. A route is not a model: it is not loaded, has no price and appears in no counter.
Its targets are models of the same file, never routes, so a route cannot lead into a cycle.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any

from pydantic import Field, field_validator

from inference_site.catalogue.operator_settings import InvalidSetting, Names, OperatorSettings, Text
from inference_site.core.domain.model_spec import ModelSpec

_UNKNOWN_CONTEXT = 2**20
"""Assumed for a model on another server whose entry gives no context length."""


class TargetEntry(OperatorSettings):
    """A target; its share of the requests is its weight divided by the sum of all weights."""

    model: Text
    weight: float = Field(1.0, ge=0, le=1e6)


class RouteEntry(OperatorSettings):
    """An entry with the key ``route``."""

    route: Annotated[tuple[TargetEntry, ...], Field(strict=False)]
    fallback: Names = ()
    max_queue_s: float | None = Field(None, ge=0)
    listed: bool = True

    @field_validator("route")
    @classmethod
    def _check_targets(cls, targets: tuple[TargetEntry, ...]) -> tuple[TargetEntry, ...]:
        if not targets:
            raise ValueError("it has no targets")
        if not any(target.weight for target in targets):
            raise ValueError("all weights are zero")
        return targets


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a route. ``context_length`` is the entry's; a worker may announce another."""

    spec: ModelSpec
    context_length: int
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Route:
    """A name for several models.

    A request also goes to a fallback if its estimated time in the queue exceeds ``max_queue_s``.
    """

    id: str
    targets: tuple[Target, ...]
    fallback: tuple[Target, ...] = ()
    max_queue_s: float | None = None
    is_listed: bool = True
    aliases: tuple[str, ...] = ()

    def is_for(self, project: str) -> bool:
        """Whether the project with this name may use one of the models."""
        return bool(self.candidates(project))

    def candidates(self, project: str, key: str = "", earlier: str = "") -> list[Target]:
        """Return the targets to try, in order: one target chosen by weight, then the fallbacks.

        The same ``key`` always chooses the same target. Without a key, the ``earlier`` target is
        chosen if it still has a weight, else a random one. The choice is weighted rendezvous
        hashing: a change of weights or targets moves as few keys as possible.
        """
        targets = [one for one in self.targets if one.weight and one.spec.is_for(project)]
        chosen = [] if key else [one for one in targets if one.spec.id == earlier]
        if targets and not chosen:
            hashed = f"{project}/{key or secrets.token_hex(16)}"
            chosen = [min(targets, key=lambda one: _rendezvous_score(one, hashed))]
        fallback = [one for one in self.fallback if one.spec.is_for(project)]
        return list({one.spec.id: one for one in (*chosen, *fallback)}.values())

    @property
    def specs(self) -> list[ModelSpec]:
        """All models of the route, targets first."""
        return list({one.spec.id: one.spec for one in (*self.targets, *self.fallback)}.values())


def _rendezvous_score(target: Target, key: str) -> float:
    """Return the score of a target; the lowest wins, for a part of all keys that is its weight."""
    digest = blake2b(f"{target.spec.id}/{key}".encode(), digest_size=8).digest()
    uniform = ((int.from_bytes(digest) >> 12) + 0.5) / 2**52
    return -math.log(uniform) / target.weight


def read_route(
    id_: str, entry: Mapping[str, Any], specs: Mapping[str, ModelSpec], entries: Mapping[str, Any]
) -> Route:
    """Return the route of an entry; ``specs`` are the models of the file. Raise InvalidSetting."""
    known = RouteEntry.read(dict(entry))

    def target(name: str, path: tuple[str, ...], weight: float = 0.0) -> Target:
        if (spec := specs.get(name)) is None:
            is_route = name in entries
            message = f"{name!r} is a route" if is_route else f"unknown model {name!r}"
            raise InvalidSetting(path, message)
        is_known = "context_length" in entries[name] or spec.file is not None
        return Target(spec, spec.context_length if is_known else _UNKNOWN_CONTEXT, weight)

    targets: dict[str, Target] = {}
    for number, one in enumerate(known.route):
        path = ("route", str(number), "model")
        if one.model in targets:
            raise InvalidSetting(path, f"{one.model!r} is there twice")
        targets[one.model] = target(one.model, path, one.weight)
    fallback = [target(name, ("fallback", str(i))) for i, name in enumerate(known.fallback)]
    return Route(id_, tuple(targets.values()), tuple(fallback), known.max_queue_s, known.listed)
