"""This host: versions, settings, disk space."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from django.conf import settings

from inference_site.catalogue.engines.registry import LIBRARIES
from inference_site.doctor.finding import Finding, Level, judged

_GIB = 2**30
_PACKAGES = ("django", "celery", "channels", "daphne", "redis", "psycopg", *LIBRARIES.values())


def check_versions() -> Iterator[Finding]:
    """Report the versions that are installed."""
    yield judged(
        "Python",
        f"{platform.python_version()}, site {settings.VERSION}",
        "Install Python 3.11 or newer and make .venv again.",
        fail=sys.version_info < (3, 11),
    )
    yield Finding(Level.OK, "packages", ", ".join(f"{p} {_version(p)}" for p in _PACKAGES))


def check_settings() -> Iterator[Finding]:
    """Check settings that are easily forgotten."""
    yield judged(
        "SECRET_KEY",
        f"{len(settings.SECRET_KEY)} characters",
        "Set SECRET_KEY (or SECRET_KEY_FILE) to 50 random characters, the same for each process.",
        fail=not settings.SECRET_KEY,
        warn=len(settings.SECRET_KEY) < 32,
    )
    yield judged(
        "DEBUG",
        "on" if settings.DEBUG else "off",
        "Set DEBUG=false: error pages show settings and data to everybody.",
        warn=settings.DEBUG,
    )


def check_disk() -> Iterator[Finding]:
    """Check the free space of the folders for data and models."""
    for name in ("DATA_DIR", "MODELS_DIR"):
        path = Path(getattr(settings, name))
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        usage = shutil.disk_usage(there)
        yield judged(
            name,
            f"{path}: {usage.free / _GIB:,.1f} of {usage.total / _GIB:,.1f} GiB free",
            f"Make room there, or move {name} to a larger disk.",
            warn=usage.free < max(5 * _GIB, usage.total // 20),
            fail=usage.free < _GIB,
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"
