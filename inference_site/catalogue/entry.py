"""What all engines share of an entry in the models file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveInt, field_validator

from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.gguf_header import model_context
from inference_site.catalogue.operator_settings import GgufFile, OperatorSettings, WeightsFile
from inference_site.catalogue.sampler_fields import SamplerDefaults
from inference_site.domain.model_spec import HIGHEST_PRICE, ModelSpec, Price

_DEFAULT = ModelSpec(id="", engine="llama_cpp")
LLAMA_CPP_SLOTS = 4
"""The slots of a model in a GGUF file, with an entry and without."""
_LONGEST_CONTEXT = 8192
"""Tokens that a slot gets unless an entry says more: a model's own limit may need more memory than
there is."""

_CGROUP = Path("/sys/fs/cgroup")
_HAS_AFFINITY = hasattr(os, "sched_getaffinity")

Names = Annotated[tuple[Annotated[str, Field(pattern=r"\S")], ...], Field(strict=False)]


def default_threads() -> int:
    """Half the cores: the engine's threads spin at barriers, and one that must wait stalls all.

    In a container they are those of its quota.
    """
    return max(1, int(usable_cores()) // 2)


def usable_cores() -> float:
    """Return how many cores this process may use, by its affinity and its control group."""
    cores = float(len(os.sched_getaffinity(0)) if _HAS_AFFINITY else os.cpu_count() or 2)
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # Version 2, 1.
        try:
            quota, period = " ".join((_CGROUP / name).read_text() for name in names).split()
            return min(cores, int(quota) / int(period)) if int(quota) > 0 else cores
        except (OSError, ValueError):  # There is no such group, or its quota is "max".
            continue
    return cores


def context_of(context_length: int) -> int:
    """Return the context of a slot for a model of this context; 0 when it is not known."""
    return min(context_length or _LONGEST_CONTEXT, _LONGEST_CONTEXT)


_Amount = Annotated[float, Field(ge=0, le=HIGHEST_PRICE)]


class PriceEntry(OperatorSettings):
    """What a million tokens cost; cached ones cost as much as others unless it says otherwise."""

    input: _Amount = 0.0
    cached: _Amount | None = None
    output: _Amount = 0.0

    def to_price(self) -> Price:
        """Return the domain's value."""
        cached = self.input if self.cached is None else self.cached
        return Price(input=self.input, cached=cached, output=self.output)


def _known_engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; there are {', '.join(ENGINES)}")
    return name


class Entry(OperatorSettings):
    """The settings of a model; its meaning and its units are those of ``ModelSpec``."""

    engine: Annotated[str, AfterValidator(_known_engine)] = _DEFAULT.engine
    file: WeightsFile | None = None
    slots: PositiveInt | None = None
    context_length: PositiveInt | None = None
    threads: PositiveInt = Field(default_factory=default_threads)
    gpu_layers: int = Field(_DEFAULT.gpu_layers, ge=-1)
    aliases: Names = ()
    listed: bool = True
    projects: Names = ()
    price: PriceEntry = PriceEntry()
    lora_adapters: dict[str, GgufFile] = {}
    sampling: SamplerDefaults = SamplerDefaults()
    keep_alive: float | None = Field(None, gt=0)
    forced_sampling: SamplerDefaults = SamplerDefaults()

    @field_validator("projects", mode="before")
    @classmethod
    def _some_projects(cls, value: Any) -> Any:
        if value == []:
            raise ValueError("it is empty; leave it out for all projects")
        return value

    def sizes(self) -> tuple[int, int]:
        """Return the slots and the context of each: what is left out is as without an entry.

        A host that has not the model's file takes the longest context that it may have.
        """
        slots, context_length = _DEFAULT.slots, _DEFAULT.context_length
        if self.engine == _DEFAULT.engine and self.file is not None:
            slots = LLAMA_CPP_SLOTS
            context_length = self.context_length or context_of(_trained_context(self.file))
        return self.slots or slots, self.context_length or context_length


def _trained_context(file: str) -> int:
    try:
        return model_context(Path(file)) or 0
    except (OSError, ValueError):
        return 0
