"""The OpenID Connect provider: its metadata, its keys, and the check of its ID tokens.

Sources: OpenID Connect Discovery 1.0; OpenID Connect Core 1.0, section 3.1.3.7; RFC 7517.
"""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.parse import urlsplit

import jwt
import requests
from django.conf import settings

TIMEOUT_S = 5
_METADATA_TTL_S, _RETRY_AFTER_S = 600, 5
_REQUIRED_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")
_ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
"""Asymmetric signatures only: ``none`` and keys that the client shares prove no origin."""
_CLOCK_SKEW_S = 60


class BadProvider(Exception):
    """The provider's metadata or keys are invalid, or it did not answer."""


class BadToken(Exception):
    """The provider has not issued this ID token for this client and login."""


class _Cache:
    """The metadata that was read last, for all threads of this process."""

    lock = threading.Lock()
    metadata: dict[str, Any] | None = None
    read_at = 0.0
    retry_at = 0.0


def metadata() -> dict[str, Any]:
    """Return the provider's metadata, at most ten minutes old.

    Raise BadProvider if it names another issuer or is incomplete, and requests.RequestException
    if it cannot be read.
    """
    with _Cache.lock:
        if _Cache.metadata is None or time.monotonic() - _Cache.read_at > _METADATA_TTL_S:
            # Without this, each thread that waits for the lock would wait for its own timeout.
            if time.monotonic() < _Cache.retry_at:
                raise BadProvider("it did not answer a moment ago")
            try:
                _Cache.metadata = _read_metadata(settings.OIDC_ISSUER)
            except requests.RequestException:
                _Cache.retry_at = time.monotonic() + _RETRY_AFTER_S
                raise
            _Cache.read_at = time.monotonic()
        return _Cache.metadata


def clear_cache() -> None:
    """Read the metadata again when it is next needed."""
    _Cache.metadata, _Cache.retry_at = None, 0.0


def _read_metadata(issuer: str) -> dict[str, Any]:
    base = issuer.rstrip("/")
    document = _get_json(f"{base}/.well-known/openid-configuration")
    if not isinstance(document, dict) or str(document.get("issuer")).rstrip("/") != base:
        raise BadProvider("its description is of another issuer")
    for name in _REQUIRED_ENDPOINTS:
        if urlsplit(str(document.get(name))).scheme not in ("https", urlsplit(issuer).scheme):
            raise BadProvider(f"its {name} is missing, or not encrypted")
    return document


def fetch_keys() -> dict[str, Any]:
    """Return the provider's current key set. Raise as ``metadata`` does."""
    keys = _get_json(metadata()["jwks_uri"])
    if not isinstance(keys, dict):
        raise BadProvider("its keys are no set of keys")
    return keys


def _get_json(url: str) -> Any:
    response = requests.get(url, timeout=TIMEOUT_S, allow_redirects=False)
    response.raise_for_status()
    return response.json()


def signing_key(token: str, keys: dict[str, Any]) -> jwt.PyJWK:
    """Return the key of the set that the token names; if it names none, the only signing key.

    Raise BadToken unless exactly one key matches.
    """
    try:
        key_id = jwt.get_unverified_header(token).get("kid")
        candidates = jwt.PyJWKSet.from_dict(keys).keys
    except (jwt.PyJWTError, AttributeError, KeyError, TypeError, ValueError) as exc:
        raise BadToken(type(exc).__name__) from exc
    matching = [
        key
        for key in candidates
        if key.public_key_use in (None, "sig") and key_id in (None, key.key_id)
    ]
    if len(matching) != 1:
        raise BadToken(f"{len(matching)} keys of the provider fit it")
    return matching[0]


def verify_id_token(
    token: str, key: Any, *, issuer: str, client_id: str, nonce: str | None
) -> dict[str, Any]:
    """Return the claims of a token that the provider issued for this client and this login.

    Raise BadToken for any other.
    """
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=list(_ALGORITHMS),
            audience=client_id,
            issuer=issuer,
            leeway=_CLOCK_SKEW_S,
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


def merge_claims(token: dict[str, Any], user_info: dict[str, Any]) -> dict[str, Any]:
    """Return the claims of the ID token, overridden by those of the user info.

    ``email_verified`` is taken from the source of the e-mail address: the other one may verify a
    different address.
    """
    email_source = user_info if "email" in user_info else token
    return {**token, **user_info, "email_verified": email_source.get("email_verified")}
