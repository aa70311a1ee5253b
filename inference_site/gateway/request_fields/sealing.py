"""Sealed content: text that a client stores for this server, and can neither read nor change.

It is compressed, and encrypted with a key derived from ``SECRET_KEY`` and the project's id.
"""

from __future__ import annotations

import zlib

from cryptography.fernet import Fernet, InvalidToken

from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.cipher import cipher_for


def seal(text: str, project_id: int) -> str:
    """Return the text as sealed content for a project."""
    return _cipher(project_id).encrypt(zlib.compress(text.encode())).decode()


def unseal(sealed: str, project_id: int, param: str) -> str:
    """Return the text. Raise InvalidRequestError unless this server sealed it for the project."""
    try:
        return zlib.decompress(_cipher(project_id).decrypt(sealed.encode())).decode()
    except (InvalidToken, zlib.error, UnicodeError) as exc:
        raise unreadable(param) from exc


def unreadable(param: str) -> InvalidRequestError:
    """Return the error of sealed content that is not of this server or project."""
    return InvalidRequestError(
        f"Invalid '{param}': the encrypted content could not be read.",
        param=param,
        code="invalid_encrypted_content",
    )


def _cipher(project_id: int) -> Fernet:
    return cipher_for(f"sealed:{project_id}")
