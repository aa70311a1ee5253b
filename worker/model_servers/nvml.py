"""NVIDIA's GPUs as their driver sees them, and what processes take of them; none without a driver.

Source: the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import cache
from typing import TypeVar

import pynvml

from inference_site.domain.device import Device

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
    """Return the GPUs of this host; what the driver does not tell of one is None."""
    found = (_gpu(index) for index in range(_count()))
    return tuple(device for device in found if device is not None)


def gpu_bytes(pids: Collection[int]) -> dict[int, int]:
    """Return what these processes take of each GPU that they use, by its number.

    In a container the driver tells the numbers of the host's processes: then nothing is found.
    """
    taken = {index: _taken(index, pids) for index in range(_count())}
    return {index: total for index, total in taken.items() if total}


def _taken(index: int, pids: Collection[int]) -> int:
    handle = _told(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    running = handle and _told(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return sum(one.usedGpuMemory or 0 for one in running or () if one.pid in pids)


def _count() -> int:
    return (_told(pynvml.nvmlDeviceGetCount) or 0) if _has_driver() else 0


def _gpu(index: int) -> Device | None:
    handle = _told(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    memory = handle and _told(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    if not memory:
        return None
    name = _told(lambda: pynvml.nvmlDeviceGetName(handle)) or "GPU"
    used = _told(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    return Device(
        f"{name} {index}",
        memory.total,
        memory.free,
        temperature_c=_told(
            lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        ),
        busy_percent=used.gpu if used else None,
    )


def _told(ask: Callable[[], T]) -> T | None:
    """Return what the driver says; None for what it does not know of this GPU."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None
