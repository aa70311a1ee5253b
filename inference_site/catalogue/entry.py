"""What all engines share of an entry in the models file."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt, field_validator

from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.operator_settings import FileName, OperatorSettings
from inference_site.catalogue.sampler_fields import SamplerDefaults
from inference_site.domain.model_spec import ModelSpec, Price

_DEFAULT = ModelSpec(id="", engine="llama_cpp")

Names = Annotated[tuple[Annotated[str, Field(pattern=r"\S")], ...], Field(strict=False)]


def default_threads() -> int:
    """Half the cores: the engine's threads spin at barriers, and one that must wait stalls all."""
    return max(1, (os.cpu_count() or 2) // 2)


class PriceEntry(OperatorSettings):
    """What a million tokens cost; cached ones cost as much as others unless it says otherwise."""

    input: NonNegativeFloat = 0.0
    cached: NonNegativeFloat | None = None
    output: NonNegativeFloat = 0.0

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
    file: FileName | None = None
    slots: PositiveInt = _DEFAULT.slots
    context_length: PositiveInt = _DEFAULT.context_length
    threads: PositiveInt = Field(default_factory=default_threads)
    gpu_layers: int = Field(_DEFAULT.gpu_layers, ge=-1)
    aliases: Names = ()
    listed: bool = True
    projects: Names = ()
    price: PriceEntry = PriceEntry()
    lora_adapters: dict[str, FileName] = {}
    sampling: SamplerDefaults = SamplerDefaults()
    forced_sampling: SamplerDefaults = SamplerDefaults()

    @field_validator("projects", mode="before")
    @classmethod
    def _some_projects(cls, value: Any) -> Any:
        if value == []:
            raise ValueError("it is empty; leave it out for all projects")
        return value
