"""Reading settings from the environment, strictly: a typo is an error, not a False.

Every variable ``X`` may instead be set as ``X_FILE``, the path of a file with the value, as
containers receive secrets. Variables that are not set are taken from the ``manage.py serve`` that
runs in the data directory, if one does.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import math
import os
import re
import warnings
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import environ
from django.core.exceptions import ImproperlyConfigured

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_DATABASE_SCHEMES = ("postgres", "postgresql", "psql", "pgsql")
_REDIS_SCHEMES = ("redis", "rediss", "unix")
_ORIGIN = re.compile(r"https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_WEB_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
"""Browsers send no path; extensions and desktop programs have schemes of their own."""
MAX_PORT = 65_535
_NUMBER = re.compile("[0-9]{1,18}")
_LONGEST_S = 10**9
"""31 years: sockets, locks and Redis take it, and it leads to no time that PostgreSQL lacks."""
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_given: dict[str, str] = {}
_served: dict[str, str] = {}
_asked: dict[str, tuple[str, str]] = {}


def text(name: str, default: str = "") -> str:
    """Return the variable; an empty one counts as not set.

    Raise ImproperlyConfigured when its file cannot be read.
    """
    # Not read with django-environ, to which a value that begins with "$" names another variable.
    try:
        path = os.environ.get(f"{name}_FILE")
        given = Path(path).read_text(encoding="utf-8") if path else os.environ.get(name, "")
    except OSError as exc:
        raise ImproperlyConfigured(f"{name}_FILE: {exc.strerror}: {exc.filename}.") from exc
    except UnicodeDecodeError as exc:
        raise ImproperlyConfigured(f"{name}_FILE: not a text in UTF-8: {path}.") from exc
    if value := given.strip():
        _given[name] = value
        _asked[name] = value, f"{name}_FILE" if path else "environment"
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


def number(name: str, default: int, minimum: int = 0, maximum: float = math.inf) -> int:
    """Return a whole number. Raise ImproperlyConfigured for anything else."""
    value = text(name, str(default))
    if not _NUMBER.fullmatch(value) or not minimum <= int(value) <= maximum:
        most = "" if maximum == math.inf else f" to {maximum}"
        raise ImproperlyConfigured(
            f"{name}: expected a whole number from {minimum}{most}, got {value!r}."
        )
    return int(value)


def seconds(name: str, default: int, minimum: int = 0) -> int:
    """Return a time in whole seconds. Raise ImproperlyConfigured for anything else."""
    return number(name, default, minimum, _LONGEST_S)


def port(name: str, default: int, minimum: int = 1) -> int:
    """Return the number of a TCP port. Raise ImproperlyConfigured for anything else."""
    found = number(name, default, minimum)
    if found > MAX_PORT:
        raise ImproperlyConfigured(f"{name}: expected a port up to {MAX_PORT}, got {found}.")
    return found


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
    """Return one of these values; the first if the variable is not set. Raise
    ImproperlyConfigured for another value."""
    value = text(name, choices[0]).lower()
    if value not in choices:
        raise ImproperlyConfigured(f"{name}: expected {' or '.join(choices)}, got {value!r}.")
    return value


def origin(name: str) -> str:
    """Return a scheme with a host and perhaps a port, such as ``https://ai.example.org``.

    An unset variable is an empty text. Raise ImproperlyConfigured for anything else.
    """
    value = text(name).rstrip("/")
    if value and not _ORIGIN.fullmatch(value):
        raise ImproperlyConfigured(
            f"{name}: expected an address such as https://ai.example.org, got {value!r}."
        )
    return value


def web_origins(name: str) -> list[str]:
    """Return origins of web pages separated by commas, or ``*``. Raise ImproperlyConfigured."""
    found = items(name)
    for value in found:
        if value not in ("*", "null") and not _WEB_ORIGIN.fullmatch(value):
            raise ImproperlyConfigured(
                f"{name}: expected origins such as https://app.example.org, without a path, "
                f"got {value!r}."
            )
    return found


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


def amounts(name: str, keys: re.Pattern[str]) -> dict[str, Decimal]:
    """Return a JSON object of amounts of money. Raise ImproperlyConfigured for anything else.

    Its names match ``keys``: a misspelt one would cost nothing.
    """
    found: dict[str, Decimal] = {}
    for key, value in mapping(name).items():
        if not keys.fullmatch(key):
            raise ImproperlyConfigured(f"{name}: {key!r} is none of {keys.pattern}.")
        try:
            found[key] = Decimal(str(value))
        except InvalidOperation:
            found[key] = Decimal("NaN")
        if not (found[key].is_finite() and 0 <= found[key] < 1_000_000):
            raise ImproperlyConfigured(f"{name}: {key}: expected a number from 0, got {value!r}.")
    return found


def database(url: str) -> dict[str, Any]:
    """Return Django's settings for an address of PostgreSQL. Raise ImproperlyConfigured."""
    _check_address("DATABASE_URL", url, _DATABASE_SCHEMES)
    config: dict[str, Any] = dict(environ.Env.db_url_config(url))
    if not config["NAME"] and "service" not in config.get("OPTIONS", {}):
        raise ImproperlyConfigured("DATABASE_URL: expected an address that ends with /DATABASE.")
    return config


def redis(name: str, default: str) -> str:
    """Return an address of Redis. Raise ImproperlyConfigured for anything else."""
    url = text(name, default)
    _check_redis(name, url)
    return url


def redis_servers(name: str, default: str) -> list[str]:
    """Return addresses of Redis separated by commas, one at least. Raise ImproperlyConfigured."""
    urls = items(name, default)
    for url in urls or [""]:
        _check_redis(name, url)
    return urls


def _check_redis(name: str, url: str) -> None:
    _check_address(name, url, _REDIS_SCHEMES)
    parts = urlsplit(url)
    path = parts.path.strip("/")
    if not (path if parts.scheme == "unix" else not path or path.isdecimal()):
        raise ImproperlyConfigured(
            f"{name}: expected unix:///PATH, or the number of a database after redis://HOST/."
        )


def _check_address(name: str, url: str, schemes: Sequence[str]) -> None:
    """Raise ImproperlyConfigured, without the address: it may have a password."""
    expected = " or ".join(f"{scheme}://" for scheme in schemes)
    message = (
        f"{name}: expected an address that begins with {expected}, a number as its port, and "
        "special characters of the password in percent-encoding (%2F for /)."
    )
    try:
        parts = urlsplit(url)
        _ = parts.port  # It is read here.
    except ValueError as exc:
        raise ImproperlyConfigured(message) from exc
    # After a "/", "?" or "#" in the password, the rest of it and the host are no part of the host.
    elsewhere = f"{parts.path} {parts.fragment} {'' if '@' in parts.netloc else parts.query}"
    if parts.scheme not in schemes or ("@" in elsewhere and parts.scheme != "unix"):
        raise ImproperlyConfigured(message)


def given() -> dict[str, str]:
    """Return the variables that were read and are set, with their values."""
    return dict(_given)


def asked() -> dict[str, tuple[str, str]]:
    """Return the variables that were read, each with its value and the source of the value."""
    return dict(_asked)


def read_served(data_dir: Path) -> None:
    """Take variables that are not set from the ``serve`` that runs in this directory, if one does.

    So a command that an operator runs beside it uses its addresses, models file and secrets. A
    variable that is set to an empty value is not taken.
    """
    try:
        with (data_dir / "lock").open() as lock:
            # A ``serve`` that starts at this moment tries to take the lock again.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # A ``serve`` holds the lock.
        with contextlib.suppress(OSError, ValueError):
            _served.update(json.loads((data_dir / "services.json").read_text()))
    except OSError:
        return
