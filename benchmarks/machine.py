"""Describe the machine and the versions behind a set of figures."""

import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("xllamacpp", "django", "daphne", "channels", "celery", "redis", "psycopg", "orjson")


def describe_machine() -> dict[str, str]:
    """Return label and value pairs: processor, memory, versions, date (UTC)."""
    gibibytes = psutil.virtual_memory().total / 2**30
    return {
        "Date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "Processor": f"{processor()}, {os.cpu_count()} cores",
        "Memory": f"{gibibytes:.1f} GiB",
        "System": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
        "Packages": ", ".join(versions()),
        "Load average before": f"{os.getloadavg()[0]:.2f}",
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
