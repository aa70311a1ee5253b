"""The NVIDIA GPUs of this host and their use by processes; without a driver there are none.

Source: the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import cache
from typing import TypeVar

import pynvml

from inference_site.core.host import Device

logger = logging.getLogger(__name__)

T = TypeVar("T")


@cache
def _has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        if not isinstance(exc, pynvml.NVMLError_LibraryNotFound):
            logger.info("NVML does not start (%s); no GPU is used", exc)
        return False
    return True


def gpus() -> tuple[Device, ...]:
    """Return the GPUs of this host; values that the driver does not report are None."""
    found = (_gpu(index) for index in range(_count()))
    return tuple(device for device in found if device is not None)


def gpu_bytes(pids: Collection[int]) -> dict[int, int]:
    """Return how much memory of each GPU these processes use, by the GPU's number.

    In a container the driver reports process ids of the host, so nothing is found.
    """

    def used(index: int) -> int:
        handle = _query(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
        running = handle and _query(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return sum(one.usedGpuMemory or 0 for one in running or () if one.pid in pids)

    return {index: total for index in range(_count()) if (total := used(index))}


def _count() -> int:
    return (_query(pynvml.nvmlDeviceGetCount) or 0) if _has_driver() else 0


def _gpu(index: int) -> Device | None:
    handle = _query(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    memory = handle and _query(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    if not memory:
        return None
    name = _query(lambda: pynvml.nvmlDeviceGetName(handle)) or "GPU"
    used = _query(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    return Device(
        f"{name} {index}",
        memory.total,
        memory.free,
        temperature_c=_query(
            lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        ),
        busy_percent=used.gpu if used else None,
    )


def _query(read: Callable[[], T]) -> T | None:
    """Return the driver's answer; None if the driver has no value for this GPU."""
    try:
        return read()
    except pynvml.NVMLError:
        return None
