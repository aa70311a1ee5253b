"""``manage.py doctor --gpu``: the wheel that this host needs, and the layers that fit on its GPUs.

A host with ``LLAMA_SERVER`` needs no wheel: that program is asked for the GPUs that it sees.

The programs of the drivers are run, and llama.cpp is loaded in another process: a library that does
not match the driver may crash the process that loads it.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.memory import layers_that_fit
from inference_site.ops.doctor.checks import Finding, Level, graded

Version = tuple[int, ...]
_GIB, _MIB = 2**30, 2**20
_TIMEOUT_S = 60.0
_GLIBC = (2, 35)
"""The wheels for CUDA and ROCm are built against it."""
_INDEX_URL = "https://xorbitsai.github.io/xllamacpp/whl/"
_CUDA: tuple[tuple[str, Version, Version], ...] = (
    ("cu132", (13, 2), (7, 5)),  # From Turing on.
    ("cu128", (12, 8), (5, 0)),  # From Maxwell on.
)
"""The wheels for CUDA, best first, with the CUDA version and compute capability that each needs."""
_ROCM: tuple[tuple[str, Version], ...] = (("rocm-7.2.4", (7, 2, 4)), ("rocm-6.4.1", (6, 4, 1)))
_ROCM_VERSION = Path("/opt/rocm/.info/version")
_QUERY = (
    "--query-gpu=name,memory.total,memory.free,compute_cap",
    "--format=csv,noheader,nounits",
)
_DEVICE = re.compile(r"^ +\w+: (.+) \((\d+) MiB, (\d+) MiB free\)$", re.MULTILINE)
"""A line of ``llama-server --list-devices``."""
_PRINT_DEVICES = """
import json, xllamacpp
print(json.dumps([
    [d["name"], d["type"].name, d["memory_total"], d["memory_free"]]
    for d in xllamacpp.get_device_info()
]))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver describes it; sizes are in bytes."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: Version = ()


def check_gpus() -> Iterator[Finding]:
    """Check the driver, the wheel and the models, in this order: each needs the one before."""
    gpus = nvidia_gpus()
    wheel = cuda_wheel(gpus) if gpus else rocm_wheel()
    if gpus:
        yield from _driver_findings(gpus, wheel)
    elif wheel:
        yield Finding(Level.OK, "driver", f"ROCm {_rocm_text()}")
    else:
        yield Finding(
            Level.WARN,
            "driver",
            "neither nvidia-smi nor ROCm is installed: models run on the CPU",
            "Install the GPU's driver. Intel's GPUs, and others with Vulkan alone: "
            + install_command("vulkan"),
        )
    if settings.LLAMA_SERVER:
        devices = program_gpus()
        yield _devices_finding(
            devices,
            bool(gpus or wheel),
            "LLAMA_SERVER",
            "LLAMA_SERVER does not run",
            "Build llama.cpp's server for this GPU, or leave LLAMA_SERVER out and install a wheel.",
        )
    else:
        devices = library_gpus()
        if wheel:
            name, _, libc = " ".join(platform.libc_ver()).partition(" ")
            yield graded(
                "C library",
                f"{name} {libc}",
                f"The wheel {wheel} needs glibc 2.35: Ubuntu 22.04, Debian 12 or newer.",
                fail=name != "glibc" or _version(libc) < _GLIBC,
            )
        fix = f"Install the wheel for it: {install_command(wheel)}" if wheel else ""
        yield _devices_finding(
            devices,
            bool(wheel),
            "the installed wheel",
            "it cannot be loaded",
            fix or "Install the extra llama-cpp, or a wheel for the GPU (docs/engines.md).",
        )
    yield from _model_findings(gpus or devices or [])


def nvidia_gpus() -> list[Gpu]:
    """Return the GPUs that ``nvidia-smi`` lists; none without the program."""
    text = _output("nvidia-smi", *_QUERY)
    rows = (line.split(", ") for line in text.splitlines() if line.count(", ") == 3)
    return [
        Gpu(name, int(total) * _MIB, int(free) * _MIB, _version(capability))
        for name, total, free, capability in rows
        if total.isdecimal() and free.isdecimal()
    ]


def cuda_version() -> Version:
    """Return the newest CUDA version that the driver supports; empty if it is unknown."""
    found = re.search(r"CUDA Version\s*:\s*(\d+)\.(\d+)", _output("nvidia-smi"))
    return () if found is None else (int(found[1]), int(found[2]))


def cuda_wheel(gpus: list[Gpu]) -> str:
    """Return the index name of the best wheel for the driver and all GPUs; empty if none fits."""
    cuda, oldest = cuda_version(), min((gpu.capability for gpu in gpus), default=())
    fitting = (name for name, needs, capable in _CUDA if cuda >= needs and oldest >= capable)
    return next(fitting, "")


def rocm_wheel() -> str:
    """Return the index name of the best wheel for this host's ROCm; empty if none fits."""
    installed = _version(_rocm_text())
    return next((name for name, needs in _ROCM if installed >= needs), "")


def install_command(index: str) -> str:
    """Return the command that replaces the wheel by the same version from another index."""
    try:
        pinned = f"=={version('xllamacpp')}"
    except PackageNotFoundError:
        pinned = ""
    return (
        f"{sys.executable} -m pip install xllamacpp{pinned} --force-reinstall --no-deps "
        f"--index-url {_INDEX_URL}{index}"
    )


def _driver_findings(gpus: list[Gpu], wheel: str) -> Iterator[Finding]:
    cuda = ".".join(map(str, cuda_version())) or "unknown"
    for number, gpu in enumerate(gpus):
        yield Finding(
            Level.OK,
            f"GPU {number}",
            f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}: "
            f"{gpu.free_bytes / _GIB:,.1f} of {gpu.total_bytes / _GIB:,.1f} GiB free",
        )
    yield graded(
        "driver",
        f"CUDA {cuda}",
        "The wheels need a driver for CUDA 12.8 and GPUs from Maxwell on: update the driver, or "
        + install_command("vulkan"),
        fail=not wheel and not settings.LLAMA_SERVER,
    )


def _devices_finding(
    devices: list[Gpu] | None, has_gpu: bool, build: str, broken: str, fix: str
) -> Finding:
    """Say which GPUs a build of llama.cpp sees; it fails if it sees none though there is one."""
    named = ", ".join(gpu.name for gpu in devices or ()) or "no GPU"
    return graded(
        "llama.cpp",
        broken if devices is None else f"{build} sees {named}",
        fix,
        warn=not devices,
        fail=devices is None or (has_gpu and not devices),
    )


def program_gpus() -> list[Gpu] | None:
    """Return the GPUs that ``LLAMA_SERVER`` sees; None if it does not list them."""
    text = _output(*shlex.split(settings.LLAMA_SERVER), "--list-devices")
    if "Available devices" not in text:
        return None
    return [Gpu(name, int(t) * _MIB, int(f) * _MIB) for name, t, f in _DEVICE.findall(text)]


def library_gpus() -> list[Gpu] | None:
    """Return the GPUs that the installed llama.cpp sees; None if it cannot be loaded."""
    text = _output(sys.executable, "-c", _PRINT_DEVICES)
    try:
        found = json.loads(text.splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return [Gpu(name, total, free) for name, kind, total, free in found if "CPU" not in kind]


def _model_findings(gpus: list[Gpu]) -> Iterator[Finding]:
    """Report how many layers of each model fit on the GPUs, without other models."""
    free = sum(gpu.free_bytes for gpu in gpus)
    for spec in catalogue().models.values():
        if spec.engine != "llama_cpp" or spec.file is None or not free:
            continue
        try:
            fit = layers_that_fit(spec, spec.file, free, len(gpus))
        except (OSError, ValueError, KeyError, IndexError) as exc:
            yield Finding(Level.FAIL, spec.id, f"its file cannot be read: {exc}", "Pull it again.")
            continue
        wanted = fit.layers if spec.gpu_layers < 0 else min(spec.gpu_layers, fit.all_layers)
        yield graded(
            spec.id,
            f"{fit.layers} of {fit.all_layers} layers fit: all take about "
            f"{fit.all_bytes / _GIB:,.2f} of {free / _GIB:,.2f} GiB that are free",
            f"Set gpu_layers: {fit.layers}, fewer slots, a shorter context, or cache_type_k and "
            "cache_type_v: q8_0.",
            warn=fit.layers < fit.all_layers and spec.gpu_layers < 0,
            fail=wanted > fit.layers,
        )


def _rocm_text() -> str:
    try:
        return _ROCM_VERSION.read_text().strip()
    except OSError:
        return ""


def _version(text: str) -> Version:
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("-")[0]))


def _output(program: str, *arguments: str) -> str:
    """Return what a program prints; empty if it is missing, fails, or takes too long."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
