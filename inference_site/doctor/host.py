"""This host: versions, settings, disk space."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from django.conf import settings

from inference_site import environment
from inference_site.catalogue.engines.registry import LIBRARIES
from inference_site.doctor.finding import Finding, Level, judged
from inference_site.supervisor.services import missing_fixes, newest_redis

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


def check_bundled_redis() -> Iterator[Finding]:
    """Say which Redis ``serve`` starts, and what a bundled one lacks; nothing if it starts none."""
    if environment.asked().get("REDIS_URL", ("", ""))[1] not in ("serve", "default"):
        return
    newest = newest_redis()
    if newest is None:
        return
    missing = missing_fixes(newest.version) if newest.is_bundled else []
    yield judged(
        "Redis of serve",
        f"{newest.path}, version {newest.shown_version}"
        + (", bundled: it gets no security fixes" if newest.is_bundled else "")
        + (f", and lacks those for {', '.join(missing)}" if missing else ""),
        "Install redis-server 7.2 or valkey-server 8, or newer; serve takes the newest at its "
        "next start. Only the user who runs serve reaches it, through a socket.",
        warn=newest.is_bundled,
    )


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
