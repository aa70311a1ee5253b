"""Secrets of entries in the database: encrypted, so that a copy of it does not have them.

The key is derived from ``SECRET_KEY``, which web processes and workers share. A text in an entry
that is not sealed is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cryptography.fernet import InvalidToken

from inference_site.catalogue.operator_settings import BadKey
from inference_site.storage.cipher import cipher_for

_MARK, _PURPOSE = "sealed:", "model entries"


def sealed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with the upstream's key and headers encrypted; what is sealed stays."""
    return _with_secrets(entry, _seal)


def opened(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry as the models file would have it.

    Raise BadKey for a secret that was sealed with another ``SECRET_KEY``.
    """
    return _with_secrets(entry, _open)


def _with_secrets(entry: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    found = dict(entry)
    if isinstance(found.get("api_key"), str):
        found["api_key"] = change("api_key", found["api_key"])
    if isinstance(headers := found.get("headers"), dict):
        found["headers"] = {
            name: change("headers", value) if isinstance(value, str) else value
            for name, value in headers.items()
        }
    return found


def _seal(_key: str, text: str) -> str:
    if text.startswith(_MARK):
        return text
    return _MARK + cipher_for(_PURPOSE).encrypt(text.encode()).decode()


def _open(key: str, text: str) -> str:
    if not text.startswith(_MARK):
        return text
    try:
        return cipher_for(_PURPOSE).decrypt(text.removeprefix(_MARK).encode()).decode()
    except (InvalidToken, UnicodeError) as exc:
        told = "it was encrypted with another SECRET_KEY: write it again"
        raise BadKey((key,), told) from exc
