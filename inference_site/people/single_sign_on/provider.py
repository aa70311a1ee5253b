"""What the provider of the single sign-on says of itself (OpenID Connect Discovery 1.0)."""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.parse import urlsplit

import requests
from django.conf import settings

TIMEOUT_S = 5
_KEPT_S, _AWAY_S = 600, 5
_NEEDED = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class BadProvider(Exception):
    """The provider's own description is not that of the issuer in the settings."""


class _Known:
    """What was read last, for all threads of this process."""

    lock = threading.Lock()
    found: dict[str, Any] | None = None
    read_at = 0.0
    away_until = 0.0


def metadata() -> dict[str, Any]:
    """Return the provider's metadata, at most ten minutes old.

    Raise BadProvider if it is of another issuer or incomplete, and requests.RequestException if it
    cannot be read.
    """
    with _Known.lock:
        if _Known.found is None or time.monotonic() - _Known.read_at > _KEPT_S:
            if time.monotonic() < _Known.away_until:  # Else each who waits would wait in turn.
                raise BadProvider("it did not answer a moment ago")
            try:
                _Known.found, _Known.read_at = _read(settings.OIDC_ISSUER), time.monotonic()
            except requests.RequestException:
                _Known.away_until = time.monotonic() + _AWAY_S
                raise
        return _Known.found


def fetched_keys() -> dict[str, Any]:
    """Return the keys with which the provider signs now. Raise as ``metadata`` does."""
    keys = _fetched(metadata()["jwks_uri"])
    if not isinstance(keys, dict):
        raise BadProvider("its keys are no set of keys")
    return keys


def forget() -> None:
    """Read it anew when it is needed."""
    _Known.found, _Known.away_until = None, 0.0


def _read(issuer: str) -> dict[str, Any]:
    address = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
    found = _fetched(address)
    if not isinstance(found, dict) or str(found.get("issuer")).rstrip("/") != issuer.rstrip("/"):
        raise BadProvider("its description is of another issuer")
    for name in _NEEDED:
        if urlsplit(str(found.get(name))).scheme not in ("https", urlsplit(issuer).scheme):
            raise BadProvider(f"its {name} is missing, or not encrypted")
    return found


def _fetched(address: str) -> Any:
    answer = requests.get(address, timeout=TIMEOUT_S, allow_redirects=False)
    answer.raise_for_status()
    return answer.json()
