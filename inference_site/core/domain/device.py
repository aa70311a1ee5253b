"""Devices that hold the weights of models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """A device that holds weights: a GPU, or the host's memory. Sizes are in bytes.

    ``temperature_c`` is in degrees Celsius; None where it is not known.
    """

    name: str
    memory_total: int
    memory_free: int
    temperature_c: int | None = None
    busy_percent: int | None = None
