"""Messages of the admin, which show the secret of a new key once, kept so that only we read them.

Django's own cookie is signed, not encrypted: whoever sees it, in a browser's store or in the log of
a proxy, would have the secret. What does not fit into the cookie is in the session, which is a row
of the database.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from cryptography.fernet import InvalidToken
from django.contrib.messages.storage.cookie import CookieStorage, MessageDecoder, MessageEncoder
from django.contrib.messages.storage.fallback import FallbackStorage
from django.contrib.messages.storage.session import SessionStorage
from django.core.signing import BadSignature

from inference_site.storage.cipher import cipher_for

_PURPOSE = "messages"


class _Sealer:
    """Stands in for the signer of the cookie."""

    def sign_object(self, messages: Any, serializer: Any, **_: Any) -> str:
        """Return the messages, compressed and encrypted."""
        return _sealed(serializer().dumps(messages))

    def unsign_object(self, sealed: str, serializer: Any, **_: Any) -> Any:
        """Return the messages. Raise BadSignature for what this site did not make."""
        return serializer().loads(_opened(sealed))


class SealedCookieStorage(CookieStorage):
    """Keeps messages in an encrypted cookie."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.signer = _Sealer()  # All of a signer that is used.


class SealedSessionStorage(SessionStorage):
    """Keeps messages encrypted in the session."""

    def serialize_messages(self, messages: Any) -> str:
        """Return the messages, compressed and encrypted."""
        return _sealed(json.dumps(messages, cls=MessageEncoder).encode())

    def deserialize_messages(self, data: Any) -> Any:
        """Return the messages; none if they cannot be read, as after a change of the key."""
        try:
            return json.loads(_opened(data), cls=MessageDecoder) if data else None
        except BadSignature:
            return None


class SealedStorage(FallbackStorage):
    """Keeps messages in an encrypted cookie; what does not fit there, in the session, likewise."""

    storage_classes = (SealedCookieStorage, SealedSessionStorage)


def _sealed(text: bytes) -> str:
    """Return a text compressed and encrypted."""
    return cipher_for(_PURPOSE).encrypt(zlib.compress(text)).decode()


def _opened(sealed: str) -> bytes:
    """Return the text. Raise BadSignature for what this site did not make."""
    try:
        return zlib.decompress(cipher_for(_PURPOSE).decrypt(sealed.encode()))
    except (InvalidToken, UnicodeError) as exc:
        raise BadSignature from exc
