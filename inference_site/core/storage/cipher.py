"""Encryption with keys that are derived from ``SECRET_KEY``, one for each purpose.

Sealed content is text that a client stores for this server, and can neither read nor change. It is
compressed, and encrypted for the purpose of its project.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings

from inference_site.core.errors.api_errors import InvalidRequestError


def cipher_for(purpose: str) -> Fernet:
    """Return the cipher of a purpose; it cannot decrypt what that of another encrypted."""
    secret = f"{settings.SECRET_KEY}:{purpose}".encode()
    return Fernet(base64.urlsafe_b64encode(hashlib.sha256(secret).digest()))


def seal(text: str, project_id: int) -> str:
    """Return the text as sealed content for a project."""
    return _content_cipher(project_id).encrypt(zlib.compress(text.encode())).decode()


def unseal(sealed: str, project_id: int, param: str) -> str:
    """Return the text. Raise InvalidRequestError unless this server sealed it for the project."""
    try:
        return zlib.decompress(_content_cipher(project_id).decrypt(sealed.encode())).decode()
    except (InvalidToken, zlib.error, UnicodeError) as exc:
        raise unreadable(param) from exc


def unreadable(param: str) -> InvalidRequestError:
    """Return the error of sealed content that is not of this server or project."""
    return InvalidRequestError(
        f"Invalid '{param}': the encrypted content could not be read.",
        param=param,
        code="invalid_encrypted_content",
    )


def _content_cipher(project_id: int) -> Fernet:
    return cipher_for(f"sealed:{project_id}")
