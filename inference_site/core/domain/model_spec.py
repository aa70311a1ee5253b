"""An entry of the catalogue: one model, how it runs, and its price."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.core.domain.request import Sampling

HIGHEST_PRICE = 100_000_000
"""The highest price of a million tokens, in any currency: sums of costs must fit their columns."""
_HIGHEST_COST = Decimal("999999999.999999999")
"""The highest value of the column of a generation's cost."""


MAX_ID = 200
"""Characters of the id of a model, as the columns that hold one have."""


def is_model_id(text: str) -> bool:
    """Return whether a model may have this id: 1 to 200 printable characters."""
    return 1 <= len(text) <= MAX_ID and text.isprintable()


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a million tokens in the site's currency; ``input`` is for those not cached."""

    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> Decimal:
        """Return the cost of these tokens, rounded to a billionth; cached ⊂ input.

        A higher cost than ``_HIGHEST_COST`` is reduced to it, so that no request fails.
        """
        millionths = (
            Decimal(str(self.input)) * (input_tokens - cached_tokens)
            + Decimal(str(self.cached)) * cached_tokens
            + Decimal(str(self.output)) * output_tokens
        )
        return min(millionths / 1_000_000, _HIGHEST_COST).quantize(Decimal("1e-9"))


_NOT_USED_BY_ENGINES = (
    *("aliases", "is_listed", "projects", "price", "sampling", "forced_sampling"),
    *("is_preloaded", "keep_alive_s", "min_resident_s", "is_pinned", "exclusive_with"),
    *("replicas", "hosts"),
)
"""Fields that admission, accounting and loading use, and engines do not."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model: an entry of the catalogue.

    Names and access: ``aliases`` are other names. Clients see the model only if it ``is_listed``.
    ``projects`` are the names of the projects that may use it; empty means all.

    Size: ``slots`` sequences run at once, each with ``context_length`` tokens. ``gpu_layers`` is
    the number of layers on the GPU, -1 for all that fit.

    Requests: ``sampling`` holds defaults, ``forced_sampling`` values that replace those of the
    request. ``lora_adapters`` maps names to files; ``lora`` has the names and scales that apply to
    requests without adapters of their own.

    Loading: the first request loads a model that is not ``is_preloaded``. At most ``replicas``
    workers load it (None: all), and only workers with one of the labels ``hosts``, if there are
    any. A model that was loaded at run time is unloaded after ``keep_alive_s`` without requests
    (None: never). A model keeps its memory for at least ``min_resident_s`` when others need it, and
    always if it ``is_pinned``. It is never loaded together with those in ``exclusive_with``.

    ``allowed_addresses`` are those at which its servers may be, None for any. ``options`` are
    defined by each engine.
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
        """Whether a worker that has loaded ``other`` must load this entry again."""
        names = {name: getattr(other, name) for name in _NOT_USED_BY_ENGINES}
        return replace(self, **names) != other

    def is_for(self, project: str) -> bool:
        """Whether the project with this name may use the model."""
        return not self.projects or project in self.projects
