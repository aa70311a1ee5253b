"""Notices as webhooks, signed as Standard Webhooks says (https://www.standardwebhooks.com/).

The name of a receiver is resolved once; each of its addresses is looked at, and one of these is
connected to. Redirects are not followed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import ssl
import time
from http.client import HTTPConnection, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import orjson
from django.conf import settings

from inference_site.alarms.models import Notice
from inference_site.domain.addresses import is_public

_TIMEOUT_S = 10.0


class NotDelivered(Exception):
    """The receiver is not to be connected to, or did not answer with a 2xx."""


def post(notice: Notice) -> None:
    """Send one notice. Raise OSError, http.client's errors, and NotDelivered."""
    body = orjson.dumps(_payload(notice))
    headers = {
        "content-type": "application/json",
        "user-agent": "inference-site",
        **signed(notice.recipient.secret, notice.public_id, int(time.time()), body),
    }
    parts = urlsplit(notice.recipient.address)
    connection = _connection(parts.scheme, parts.hostname or "", parts.port)
    try:
        target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        connection.request("POST", target, body, headers)
        status = connection.getresponse().status
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise NotDelivered(f"HTTP status {status}")


def signed(secret: str, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a message: its id, its time in Unix seconds, and the signature."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    content = f"{message_id}.{timestamp}.".encode() + body
    signature = base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{signature}",
    }


def _payload(notice: Notice) -> dict[str, Any]:
    alarm = notice.alarm
    return {
        "type": "alarm.resolved" if notice.is_resolved else "alarm.firing",
        "timestamp": alarm.resolved_at if notice.is_resolved else alarm.started_at,
        "data": {
            "id": alarm.pk,
            "rule": alarm.rule.kind,
            "subject": alarm.subject,
            "text": notice.text,
            "started_at": alarm.started_at,
            "resolved_at": alarm.resolved_at,
        },
    }


def _connection(scheme: str, host: str, port: int | None) -> HTTPConnection:
    """Return an open connection to an address that may be connected to."""
    is_tls = scheme == "https"
    found = socket.getaddrinfo(host, port or (443 if is_tls else 80), type=socket.SOCK_STREAM)
    addresses = [str(place[4][0]) for place in found]
    if not (settings.WEBHOOKS_ALLOW_PRIVATE or all(map(is_public, addresses))):
        raise NotDelivered("The host has no public address; see WEBHOOKS_ALLOW_PRIVATE.")
    kind = HTTPSConnection if is_tls else HTTPConnection
    connection = kind(host, port, timeout=_TIMEOUT_S)
    plain = socket.create_connection((addresses[0], found[0][4][1]), _TIMEOUT_S)
    try:
        context = ssl.create_default_context() if is_tls else None
        connection.sock = context.wrap_socket(plain, server_hostname=host) if context else plain
    except BaseException:
        plain.close()
        raise
    return connection
