"""What the provider of the single sign-on says of itself (OpenID Connect Discovery 1.0)."""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.parse import urlsplit

import jwt
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


_ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
"""Signatures with a key pair. ``none``, and keys that the client shares, are no proof of origin."""
_CLOCKS_DIFFER_S = 60


class BadToken(Exception):
    """The ID token is not one that this provider has made for this login."""


def signing_key(token: str, keys: dict[str, Any]) -> jwt.PyJWK:
    """Return the key of a set (RFC 7517) that a token names, or the only one that signs.

    Raise BadToken if there is none, or several to choose from.
    """
    try:
        named = jwt.get_unverified_header(token).get("kid")
        usable = jwt.PyJWKSet.from_dict(keys).keys
    except (jwt.PyJWTError, AttributeError, KeyError, TypeError, ValueError) as exc:
        raise BadToken(type(exc).__name__) from exc
    fitting = [
        key for key in usable if key.public_key_use in (None, "sig") and named in (None, key.key_id)
    ]
    if len(fitting) != 1:
        raise BadToken(f"{len(fitting)} keys of the provider fit it")
    return fitting[0]


def checked_claims(
    token: str, key: Any, *, issuer: str, client_id: str, nonce: str | None
) -> dict[str, Any]:
    """Return the claims of a token that the provider has made for this client and this login.

    Raise BadToken for any other.
    """
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=list(_ALGORITHMS),
            audience=client_id,
            issuer=issuer,
            leeway=_CLOCKS_DIFFER_S,
            options={"require": ["iss", "sub", "aud", "exp", "iat"]},
        )
    except (jwt.PyJWTError, TypeError, ValueError) as exc:
        raise BadToken(type(exc).__name__) from exc
    if not nonce or claims.get("nonce") != nonce:
        raise BadToken("another nonce")
    if isinstance(claims["aud"], list) and len(claims["aud"]) > 1 and claims.get("azp") is None:
        raise BadToken("several audiences, and no authorized party")
    if claims.get("azp", client_id) != client_id:
        raise BadToken("another authorized party")
    return claims


def merged_claims(token: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """Return the claims of an ID token and of the user info, which goes first.

    Whether an address is verified is said by where the address is from.
    """
    of_email = info if "email" in info else token
    return {**token, **info, "email_verified": of_email.get("email_verified")}
