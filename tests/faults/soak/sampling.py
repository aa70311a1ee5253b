"""Samples of what the processes of a stack hold, and how fast that grows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import linear_regression

import psutil

from tests.served_stack import ServedStack

PROCESSES = ("web", "worker", "beat")
_MIB = 2**20


@dataclass
class Series:
    """One measure of one process; ``values`` are in ``unit``, one for each sample."""

    process: str
    measure: str
    unit: str
    values: list[float] = field(default_factory=list)


@dataclass
class Samples:
    """All series of a soak; ``minutes`` are the times of the samples since its beginning."""

    minutes: list[float] = field(default_factory=list)
    series: dict[tuple[str, str], Series] = field(default_factory=dict)
    _began_at: float = field(default_factory=time.monotonic)

    def take(self, stack: ServedStack) -> None:
        """Add a sample of every series."""
        self.minutes.append((time.monotonic() - self._began_at) / 60)
        for name in PROCESSES:
            process = psutil.Process(stack.pid_of(name))
            with process.oneshot():
                self._add(name, "memory", "MiB", process.memory_info().rss / _MIB)
                self._add(name, "threads", "", process.num_threads())
                self._add(name, "descriptors", "", process.num_fds())
        connections = stack.sql("SELECT count(*) FROM pg_stat_activity WHERE datname IS NOT NULL")
        self._add("PostgreSQL", "connections", "", connections[0][0] - 1)  # This one is ours.
        with stack.redis() as redis:
            self._add("Redis", "memory", "MiB", redis.info("memory")["used_memory"] / _MIB)

    def of(self, measure: str) -> list[Series]:
        """Return the series of a measure."""
        return [found for found in self.series.values() if found.measure == measure]

    def slope_per_hour(self, series: Series, after_minutes: float) -> float:
        """Return by how much a series grows in an hour, by least squares after the warm-up."""
        warm = [i for i, minute in enumerate(self.minutes) if minute >= after_minutes]
        return slope([self.minutes[i] for i in warm], [series.values[i] for i in warm]) * 60

    def _add(self, process: str, measure: str, unit: str, value: float) -> None:
        series = self.series.setdefault((process, measure), Series(process, measure, unit))
        series.values.append(value)


def slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the line through these points; 0 for less than two."""
    return linear_regression(places, values).slope if len(places) > 1 else 0.0
