"""The checks of an ID token (OpenID Connect Core 1.0, section 3.1.3.7)."""

from __future__ import annotations

from typing import Any

import jwt

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
