"""Encrypted storage of Django's flash messages, one of which shows the secret of a new key.

Django signs its message cookie but does not encrypt it: the secret could be read from the browser's
store or a proxy's log. Messages that do not fit into the cookie are in the session, which is a row
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

from inference_site.core.storage.cipher import cipher_for

_PURPOSE = "messages"


def _encrypt(text: bytes) -> str:
    return cipher_for(_PURPOSE).encrypt(zlib.compress(text)).decode()


def _decrypt(encrypted: str) -> bytes:
    """Raise BadSignature if this site did not encrypt it."""
    try:
        return zlib.decompress(cipher_for(_PURPOSE).decrypt(encrypted.encode()))
    except (InvalidToken, UnicodeError) as exc:
        raise BadSignature from exc


class _EncryptingSigner:
    """Has the two methods of Django's ``Signer`` that the cookie storage calls."""

    def sign_object(self, messages: Any, serializer: Any, **_: Any) -> str:
        """Return the messages, compressed and encrypted."""
        return _encrypt(serializer().dumps(messages))

    def unsign_object(self, encrypted: str, serializer: Any, **_: Any) -> Any:
        """Return the messages. Raise BadSignature if this site did not encrypt them."""
        return serializer().loads(_decrypt(encrypted))


class SealedCookieStorage(CookieStorage):
    """Keeps messages in an encrypted cookie."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.signer = _EncryptingSigner()


class SealedSessionStorage(SessionStorage):
    """Keeps messages encrypted in the session."""

    def serialize_messages(self, messages: Any) -> str:
        """Return the messages, compressed and encrypted."""
        return _encrypt(json.dumps(messages, cls=MessageEncoder).encode())

    def deserialize_messages(self, data: Any) -> Any:
        """Return the messages; None if the key has changed since they were encrypted."""
        try:
            return json.loads(_decrypt(data), cls=MessageDecoder) if data else None
        except BadSignature:
            return None


class SealedStorage(FallbackStorage):
    """Keeps messages in an encrypted cookie, and in the session if they do not fit there."""

    storage_classes = (SealedCookieStorage, SealedSessionStorage)
