"""What all engines share of an entry in the models file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveInt, ValidationInfo, field_validator

from inference_site.catalogue.engines.ctransformers import library_name
from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.ggml_context import ggml_context
from inference_site.catalogue.memory import fitting_sizes
from inference_site.catalogue.operator_settings import GgufFile, OperatorSettings, WeightsFile
from inference_site.catalogue.sampler_fields import SamplerDefaults
from inference_site.domain.model_spec import HIGHEST_PRICE, ModelSpec, Price
from inference_site.host import physical_cores, usable_cores

_DEFAULT = ModelSpec(id="", engine="llama_cpp")
Names = Annotated[tuple[Annotated[str, Field(pattern=r"\S")], ...], Field(strict=False)]


def default_threads(engine: str) -> int:
    """Return the threads of a model on this host: all physical cores for llama.cpp.

    Its threads sleep soon after they have begun to wait for each other (``GOMP_SPINCOUNT``). Those
    of ctransformers never do, and one that lacks a core stalls the others: it gets half the cores.
    """
    return physical_cores() if engine == _DEFAULT.engine else max(1, int(usable_cores()) // 2)


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
    threads: PositiveInt | None = None
    gpu_layers: int = Field(_DEFAULT.gpu_layers, ge=-1)
    aliases: Names = ()
    listed: bool = True
    projects: Names = ()
    price: PriceEntry = PriceEntry()
    lora_adapters: dict[str, GgufFile] = {}
    sampling: SamplerDefaults = SamplerDefaults()
    preload: bool = True
    replicas: PositiveInt | None = None
    hosts: Names = ()
    keep_alive: float | None = Field(None, gt=0)
    min_resident: float = Field(_DEFAULT.min_resident_s, ge=0, lt=1e6)
    pinned: bool = False
    exclusive_with: Names = ()
    forced_sampling: SamplerDefaults = SamplerDefaults()

    @field_validator("projects", "hosts", mode="before")
    @classmethod
    def _names_some(cls, value: Any, info: ValidationInfo) -> Any:
        if value == []:
            whom = {"projects": "projects", "hosts": "workers"}[str(info.field_name)]
            raise ValueError(f"it is empty; leave it out for all {whom}")
        return value

    def sizes(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the slots and the context of each: what is left out is as without an entry.

        ``options`` are those of the engine.
        """
        if self.engine == _DEFAULT.engine and self.file is not None:
            return fitting_sizes(Path(self.file), self.slots, self.context_length, options)
        context = self.context_length or _DEFAULT.context_length
        if self.file is not None and (told := options.get("model_type")):
            context = min(context, ggml_context(Path(self.file), library_name(told)) or context)
        return self.slots or _DEFAULT.slots, context
