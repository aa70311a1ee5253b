"""The NVIDIA GPUs of this host and their use by processes; without a driver there are none.

Source: the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, TypeVar

from inference_site.core.host import Device

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LIBRARY = "libnvidia-ml.so.1"


@cache
def _nvml() -> Any:
    """Return the module ``pynvml`` after its start; None without a driver that works."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    import pynvml  # Most hosts have no NVIDIA driver, and it takes 2 MiB.

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        logger.info("NVML does not start (%s); no GPU is used", exc)
        return None
    return pynvml


def gpus() -> tuple[Device, ...]:
    """Return the GPUs of this host; values that the driver does not report are None."""
    found = (_gpu(index) for index in range(_count()))
    return tuple(device for device in found if device is not None)


def gpu_bytes(pids: Collection[int]) -> dict[int, int]:
    """Return how much memory of each GPU these processes use, by the GPU's number.

    In a container the driver reports process ids of the host, so nothing is found.
    """
    nvml = _nvml()

    def used(index: int) -> int:
        handle = _query(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        running = handle and _query(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return sum(one.usedGpuMemory or 0 for one in running or () if one.pid in pids)

    return {index: total for index in range(_count()) if (total := used(index))}


def _count() -> int:
    nvml = _nvml()
    return (_query(nvml.nvmlDeviceGetCount) or 0) if nvml else 0


def _gpu(index: int) -> Device | None:
    nvml = _nvml()
    handle = _query(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    memory = handle and _query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    if not memory:
        return None
    name = _query(lambda: nvml.nvmlDeviceGetName(handle)) or "GPU"
    used = _query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    return Device(
        f"{name} {index}",
        memory.total,
        memory.free,
        temperature_c=_query(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
        busy_percent=used.gpu if used else None,
    )


def _query(read: Callable[[], T]) -> T | None:
    """Return the driver's answer; None if it has none for this GPU, or is too old to know it."""
    nvml = _nvml()
    try:
        return read()
    except (nvml.NVMLError, nvml.NVMLLibraryMismatchError):
        return None
