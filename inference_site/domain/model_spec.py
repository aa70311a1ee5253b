"""One served model, and its price."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from inference_site.domain.addresses import AllowedAddresses
from inference_site.domain.request import Sampling

HIGHEST_PRICE = 100_000_000
"""Of a million tokens, in any currency: sums of costs have to fit their columns."""
_HIGHEST_COST = Decimal("999999999.999999999")
"""What the column of a generation's cost can hold."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost, in the site's currency. ``input`` is for those not cached."""

    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> Decimal:
        """Return what these cost, to the billionth and below a billion; cached ⊂ input.

        A cost that is higher is written as the highest: no request fails for its price.
        """
        millionths = (
            Decimal(str(self.input)) * (input_tokens - cached_tokens)
            + Decimal(str(self.cached)) * cached_tokens
            + Decimal(str(self.output)) * output_tokens
        )
        return min(millionths / 1_000_000, _HIGHEST_COST).quantize(Decimal("1e-9"))


_NOT_OF_THE_ENGINE = (
    *("aliases", "is_listed", "projects", "price", "sampling", "forced_sampling"),
    *("is_preloaded", "keep_alive_s", "min_resident_s", "is_pinned", "exclusive_with"),
    *("replicas", "hosts"),
)
"""What is heeded where a request is taken or accounted, or a model loaded, not by its engine."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One served model: an entry of the catalogue.

    ``slots`` is how many sequences run at once; ``context_length`` is tokens for each of them.
    ``gpu_layers`` is how many layers lie on the GPU, −1 for all that fit. ``aliases`` are other
    names; only what ``is_listed`` is shown to clients. ``projects`` are the names of those that may
    use it, none for all.
    ``lora_adapters`` are files by the names that requests use; ``lora`` are those with their scales
    that apply to requests which name none. ``sampling`` holds what requests
    leave out, ``forced_sampling`` what holds whatever they say. One that is not ``is_preloaded`` is
    loaded by the first request for it. At most ``replicas`` workers load it, all of them if that is
    None, and only workers with one of the labels ``hosts``, if there are any. ``keep_alive_s`` is
    how long a model that was loaded at run time may be idle, None for ever. ``min_resident_s`` is
    how long a model may stay when others wait for its memory, one that ``is_pinned`` always; it is
    never loaded together with those that it is ``exclusive_with``. ``allowed_addresses`` are those
    at which other servers may be, None for any. ``options`` belong to the engine alone; each engine
    documents its own.
    """

    id: str
    engine: str
    file: Path | None = None
    slots: int = 8
    context_length: int = 2048
    threads: int = 1
    gpu_layers: int = -1
    aliases: tuple[str, ...] = ()
    is_listed: bool = True
    projects: tuple[str, ...] = ()
    price: Price = field(default_factory=Price)
    lora_adapters: dict[str, Path] = field(default_factory=dict)
    lora: tuple[tuple[str, float], ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    is_preloaded: bool = True
    replicas: int | None = None
    hosts: tuple[str, ...] = ()
    keep_alive_s: float | None = None
    min_resident_s: float = 10.0
    is_pinned: bool = False
    exclusive_with: tuple[str, ...] = ()
    forced_sampling: Sampling = field(default_factory=Sampling)
    allowed_addresses: AllowedAddresses | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def runs_otherwise_than(self, other: ModelSpec) -> bool:
        """Whether a worker has to load it again if it was as ``other`` until now."""
        names = {name: getattr(other, name) for name in _NOT_OF_THE_ENGINE}
        return replace(self, **names) != other

    def is_for(self, project: str) -> bool:
        """Whether the project of this name may use the model."""
        return not self.projects or project in self.projects
