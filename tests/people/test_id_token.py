"""An ID token is taken only from the provider, for this client, and for this login."""

from __future__ import annotations

import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from inference_site.console.people.single_sign_on import (
    BadToken,
    merge_claims,
    signing_key,
    verify_id_token,
)

KEY, OTHER_KEY = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
GOOD: dict[str, Any] = {
    "iss": "https://id.example.org",
    "aud": "site",
    "sub": "ada",
    "exp": 3_600,
    "iat": 0,
    "nonce": "n",
}
"""Claims; the times are seconds from now."""


def check(token: str, nonce: str | None = "n") -> dict[str, Any]:
    return verify_id_token(
        token, KEY.public_key(), issuer="https://id.example.org", client_id="site", nonce=nonce
    )


def signed(key: Any = KEY, algorithm: str = "ES256", kid: str = "", **changed: Any) -> str:
    claims = {name: value for name, value in (GOOD | changed).items() if value is not None}
    now = int(time.time())
    claims |= {name: now + claims[name] for name in ("exp", "iat") if name in claims}
    return jwt.encode(claims, key, algorithm, headers={"kid": kid} if kid else None)


def test_a_token_for_this_login_is_taken() -> None:
    assert check(signed())["sub"] == "ada"
    assert check(signed(aud=["site", "other"], azp="site"))["sub"] == "ada"
    assert check(signed(exp=-1, iat=30))["sub"] == "ada"  # Clocks differ a little.


@pytest.mark.parametrize(
    "changed",
    [
        {"iss": "https://other.example.org"},
        {"iss": None},
        {"aud": "other"},
        {"aud": []},
        {"aud": None},
        {"aud": ["site", "other"]},
        {"azp": "other"},
        {"exp": -120},
        {"exp": None},
        {"iat": 3_600},
        {"iat": None},
        {"nonce": "another"},
        {"nonce": None},
        {"sub": None},
    ],
)
def test_a_token_for_anything_else_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(BadToken):
        check(signed(**changed))


def test_a_token_that_the_provider_has_not_signed_is_refused() -> None:
    head, claims, _ = signed().split(".")
    tokens = [
        signed(OTHER_KEY),
        signed("", "none"),
        signed("s" * 64, "HS256"),
        f"{head}.{claims}.",
        "",
        "no token",
    ]
    for token in tokens:
        with pytest.raises(BadToken):
            check(token)


def test_a_login_without_a_nonce_is_refused() -> None:
    for nonce in (None, ""):
        with pytest.raises(BadToken):
            check(signed(nonce=nonce), nonce)


def test_the_key_is_the_one_that_the_token_names_or_the_only_one() -> None:
    first, second = ({**jwk(key), "kid": kid} for key, kid in ((KEY, "1"), (OTHER_KEY, "2")))
    named = signed(kid="1")
    for token, keys in ((named, [first, second]), (signed(), [jwk(KEY)])):
        key = signing_key(token, {"keys": keys})
        claims = verify_id_token(token, key, issuer=GOOD["iss"], client_id="site", nonce="n")
        assert claims["sub"] == "ada"
    hostile: list[Any] = [[second], [], [{"kty": "oct", "k": "c2VjcmV0", "kid": "2"}], None, "x"]
    for keys in hostile:
        with pytest.raises(BadToken):
            signing_key(named, {"keys": keys})
    for token in (signed(), "", "no token"):
        with pytest.raises(BadToken):
            signing_key(token, {"keys": [first, second]})


def jwk(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
    found: dict[str, Any] = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return found


def test_an_address_is_verified_only_by_whom_it_is_from() -> None:
    verified = {"email": "mine@example.org", "email_verified": True, "groups": ["a"]}
    merged = merge_claims(verified, {"email": "yours@example.org"})
    assert (merged["email"], merged["email_verified"]) == ("yours@example.org", None)
    merged = merge_claims({"email": "yours@example.org"}, {"email_verified": True})
    assert (merged["email"], merged["email_verified"]) == ("yours@example.org", None)
    merged = merge_claims(verified, {"sub": "s"})
    assert (merged["email"], merged["email_verified"]) == ("mine@example.org", True)
