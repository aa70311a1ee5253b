"""Reading settings from the environment, strictly: a typo is an error, not a False.

Every variable ``X`` may instead be given as ``X_FILE``, the path of a file that holds the value,
which is how secrets reach a container (django-environ's ``FileAwareEnv``). What is in neither is
read from the site that ``manage.py serve`` runs in the data directory, while it runs.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import environ
from django.core.exceptions import ImproperlyConfigured

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_env = environ.FileAwareEnv()
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_given: dict[str, str] = {}
_served: dict[str, str] = {}
_asked: dict[str, tuple[str, str]] = {}


def text(name: str, default: str = "") -> str:
    """Return the variable; an empty one counts as absent.

    Raise ImproperlyConfigured when its file cannot be read.
    """
    try:
        value = str(_env.str(name, default="")).strip()
    except OSError as exc:
        raise ImproperlyConfigured(f"{name}_FILE: {exc.strerror}: {exc.filename}.") from exc
    if value:
        _given[name] = value
        _asked[name] = value, f"{name}_FILE" if f"{name}_FILE" in os.environ else "environment"
        return value
    served = None if name in os.environ else _served.get(name)
    _asked[name] = (default, "default") if served is None else (served, "serve")
    return default if served is None else served


def boolean(name: str, default: bool) -> bool:
    """Return true or false. Raise ImproperlyConfigured for anything else."""
    value = text(name, str(default)).lower()
    if value not in _TRUE | _FALSE:
        raise ImproperlyConfigured(f"{name}: expected true or false, got {value!r}.")
    return value in _TRUE


def number(name: str, default: int, minimum: int = 0) -> int:
    """Return a whole number. Raise ImproperlyConfigured for anything else."""
    value = text(name, str(default))
    if not value.isdecimal() or int(value) < minimum:
        raise ImproperlyConfigured(
            f"{name}: expected a whole number from {minimum}, got {value!r}."
        )
    return int(value)


def number_or_warn(name: str, default: int, minimum: int = 1) -> int:
    """Return a whole number; a bad value warns and falls back to the default."""
    try:
        return number(name, default, minimum)
    except ImproperlyConfigured as exc:
        warnings.warn(f"{exc} Using {default}.", RuntimeWarning, stacklevel=2)
        return default


def items(name: str, default: str = "") -> list[str]:
    """Return a list of values separated by commas."""
    return [item.strip() for item in text(name, default).split(",") if item.strip()]


def choice(name: str, choices: Sequence[str]) -> str:
    """Return one of these values; without the variable, the first."""
    value = text(name, choices[0]).lower()
    if value not in choices:
        raise ImproperlyConfigured(f"{name}: expected {' or '.join(choices)}, got {value!r}.")
    return value


def networks(name: str, default: str = "") -> list[Network]:
    """Return IP networks separated by commas. Raise ImproperlyConfigured for anything else."""
    try:
        return [ipaddress.ip_network(item) for item in items(name, default)]
    except ValueError as exc:
        raise ImproperlyConfigured(f"{name}: {exc}.") from exc


def mapping(name: str) -> dict[str, Any]:
    """Return a JSON object. Raise ImproperlyConfigured for anything else."""
    value = text(name, "{}")
    try:
        decoded = json.loads(value)
    except ValueError as exc:
        raise ImproperlyConfigured(f"{name}: not JSON: {exc}.") from exc
    if not isinstance(decoded, dict):
        raise ImproperlyConfigured(f"{name}: expected a JSON object, got {value!r}.")
    return decoded


def text_mapping(name: str) -> dict[str, str]:
    """Return a JSON object of texts. Raise ImproperlyConfigured for anything else."""
    found = mapping(name)
    if not all(isinstance(value, str) for value in found.values()):
        raise ImproperlyConfigured(f"{name}: expected a JSON object of texts.")
    return found


def database(url: str) -> dict[str, Any]:
    """Return Django's settings for a database address."""
    config: dict[str, Any] = dict(_env.db_url_config(url))
    return config


def given() -> dict[str, str]:
    """Return the variables that were asked for and are set, with their values."""
    return dict(_given)


def asked() -> dict[str, tuple[str, str]]:
    """Return the variables that were asked for, each with its value and where that comes from."""
    return dict(_asked)


def read_served(data_dir: Path) -> None:
    """Take what is not set from the ``serve`` that runs in this directory, if one does.

    So a command that an operator types beside it has its addresses, models file and secrets. A
    variable that is set and empty is not taken.
    """
    if _is_locked(data_dir / "lock"):
        _served.update(_read(data_dir / "services.json"))


def _is_locked(lock: Path) -> bool:
    """Return whether a ``serve`` holds the lock; one that starts at this moment tries again."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _read(path: Path) -> dict[str, str]:
    try:
        served: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return served
