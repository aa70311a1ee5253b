"""Encryption with keys that are derived from ``SECRET_KEY``, one for each purpose."""

from __future__ import annotations

import base64
import hashlib

from cryptography.fernet import Fernet
from django.conf import settings


def cipher_for(purpose: str) -> Fernet:
    """Return the cipher of a purpose; it cannot decrypt what that of another encrypted."""
    secret = f"{settings.SECRET_KEY}:{purpose}".encode()
    return Fernet(base64.urlsafe_b64encode(hashlib.sha256(secret).digest()))
