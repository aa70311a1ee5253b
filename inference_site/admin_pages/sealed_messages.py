"""Messages of the admin, which show the secret of a new key once, in a cookie that only we read.

Django's own cookie is signed, not encrypted: whoever sees it, in a browser's store or in the log of
a proxy, would have the secret.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import Any

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings
from django.contrib.messages.storage.cookie import CookieStorage
from django.contrib.messages.storage.fallback import FallbackStorage
from django.contrib.messages.storage.session import SessionStorage
from django.core.signing import BadSignature


class _Sealer:
    """Stands in for the signer of the cookie."""

    def sign_object(self, messages: Any, serializer: Any, **_: Any) -> str:
        """Return the messages, compressed and encrypted."""
        return _cipher().encrypt(zlib.compress(serializer().dumps(messages))).decode()

    def unsign_object(self, sealed: str, serializer: Any, **_: Any) -> Any:
        """Return the messages. Raise BadSignature for what this site did not make."""
        try:
            return serializer().loads(zlib.decompress(_cipher().decrypt(sealed.encode())))
        except (InvalidToken, UnicodeError) as exc:
            raise BadSignature from exc


class SealedCookieStorage(CookieStorage):
    """Keeps messages in an encrypted cookie."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.signer = _Sealer()  # All of a signer that is used.


class SealedStorage(FallbackStorage):
    """Keeps messages in an encrypted cookie; what does not fit there, in the session."""

    storage_classes = (SealedCookieStorage, SessionStorage)


def _cipher() -> Fernet:
    secret = f"{settings.SECRET_KEY}:messages".encode()
    return Fernet(base64.urlsafe_b64encode(hashlib.sha256(secret).digest()))
