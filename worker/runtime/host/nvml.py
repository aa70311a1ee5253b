"""NVIDIA's GPUs as their driver sees them, through its library NVML; none where there is no driver.

Source: the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache

from inference_site.fleet.leases import Device

logger = logging.getLogger(__name__)

_NAME_BYTES = 96
_TEMPERATURE_GPU = 0


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``: bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    """``nvmlUtilization_t``: percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        logger.info("NVML is there and does not start; GPUs are shown without temperature")
        return None
    return library


def gpus() -> tuple[Device, ...]:
    """Return the GPUs of this host; what the driver does not tell of one is None."""
    library = _library()
    if library is None:
        return ()
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ()
    found = (_gpu(library, index) for index in range(count.value))
    return tuple(device for device in found if device is not None)


def _gpu(library: ctypes.CDLL, index: int) -> Device | None:
    handle = ctypes.c_void_p()
    memory, name = _Memory(), ctypes.create_string_buffer(_NAME_BYTES)
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    library.nvmlDeviceGetName(handle, name, _NAME_BYTES)
    degrees, used = ctypes.c_uint(), _Utilization()
    has_degrees = not library.nvmlDeviceGetTemperature(
        handle, _TEMPERATURE_GPU, ctypes.byref(degrees)
    )
    has_used = not library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used))
    return Device(
        f"{name.value.decode(errors='replace')} {index}",
        memory.total,
        memory.free,
        temperature_c=degrees.value if has_degrees else None,
        busy_percent=used.gpu if has_used else None,
    )
