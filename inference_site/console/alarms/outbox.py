"""Delivers the notices of the outbox, by e-mail or webhook, with repeated attempts for a day.

Webhooks are signed as Standard Webhooks says (https://www.standardwebhooks.com/). The receiver
must have a public address (``checked_connections``). Redirects are not followed.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import hmac
import logging
import time
from typing import Any

import orjson
from django.conf import settings
from django.core.mail import EmailMessage
from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from inference_site.console.alarms.models import Notice, Recipient
from inference_site.core.storage.postgresql import cached_sql

logger = logging.getLogger(__name__)

_TIME_LIMIT_S = 5.0
_MAX_ATTEMPTS = 12
_MIN_BACK_OFF_S, _MAX_BACK_OFF_S = 10, 4 * 3600
_WEBHOOK_TIMEOUT_S = 10.0


class NoMailServer(Exception):
    """EMAIL_HOST is not set."""


class NotDelivered(Exception):
    """The receiver has a private address, or did not answer with a 2xx."""


def deliver() -> None:
    """Send the notices that are due; start no other after ``_TIME_LIMIT_S``."""
    deadline = time.monotonic() + _TIME_LIMIT_S
    while (notice := _claim()) is not None:
        recipient = notice.recipient
        send = send_mail if recipient.way == Recipient.Way.EMAIL else post_webhook
        try:
            send(notice)
        except Exception as exc:  # noqa: BLE001  # No failure may keep the next notice back.
            notice.error = f"{type(exc).__name__}: {exc}".replace("\0", "")[:300]
            if notice.attempts >= _MAX_ATTEMPTS:
                notice.next_at = None
            logger.warning("a notice to %s was not delivered: %s", recipient, notice.error)
        else:
            notice.delivered_at, notice.next_at, notice.error = timezone.now(), None, ""
        notice.save(update_fields=["delivered_at", "next_at", "error"])
        if time.monotonic() > deadline:
            break


def _claim() -> Notice | None:
    """Return the notice that has been due for longest, after scheduling its next attempt.

    If the process dies before it is sent, the next attempt sends it. A receiver that gets a notice
    twice recognises its id.
    """
    if not _is_any_due():
        return None
    with transaction.atomic():
        due = Notice.objects.filter(next_at__lte=timezone.now()).order_by("next_at")
        notice = due.select_for_update(skip_locked=True).first()
        if notice is None:
            return None
        back_off_s = min(_MIN_BACK_OFF_S * 2**notice.attempts, _MAX_BACK_OFF_S)
        notice.attempts += 1
        notice.next_at = timezone.now() + dt.timedelta(seconds=back_off_s)
        notice.save(update_fields=["attempts", "next_at"])
    return notice


@cached_sql
def _is_any_due() -> QuerySet[Any, Any]:
    return Notice.objects.filter(next_at__lte=Now()).values_list("pk").order_by()[:1]


def send_mail(notice: Notice) -> None:
    """Send one notice by e-mail. Raise OSError, smtplib's errors, and NoMailServer."""
    if not settings.EMAIL_HOST:
        raise NoMailServer("EMAIL_HOST is not set.")
    state = "Resolved" if notice.is_resolved else "Firing"
    # The text may have line breaks from a model's name; a header must not.
    subject = " ".join(f"{state}: {notice.text}".split())[:200]
    alarm = notice.alarm
    lines = [notice.text, "", f"{state}; began at {alarm.started_at:%Y-%m-%d %H:%M:%S} UTC."]
    if alarm.resolved_at is not None:
        lines.append(f"Ended at {alarm.resolved_at:%Y-%m-%d %H:%M:%S} UTC.")
    headers = {"Message-ID": f"<{notice.public_id}@{settings.EMAIL_FROM.rpartition('@')[2]}>"}
    to = [notice.recipient.address]
    EmailMessage(subject, "\n".join(lines), settings.EMAIL_FROM, to, headers=headers).send()


def post_webhook(notice: Notice) -> None:
    """Send one notice as a webhook. Raise httpcore's errors, NoAnswer, and NotDelivered."""
    # Here, because beat would keep 5 MiB for it, also on sites without webhooks.
    import httpx

    from inference_site.core.checked_connections import NoPublicAddress, checked_pool, target_of

    alarm, recipient = notice.alarm, notice.recipient
    body = orjson.dumps(
        {
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
    )
    url, deadline = httpx.URL(recipient.address), time.monotonic() + _WEBHOOK_TIMEOUT_S
    headers = {
        "host": url.netloc.decode(),
        "content-type": "application/json",
        "user-agent": "inference-site",
        **webhook_signature(recipient.secret, notice.public_id, int(time.time()), body),
    }

    def seconds_left() -> float:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise NotDelivered(f"It did not answer within {_WEBHOOK_TIMEOUT_S:g} s.")
        return seconds

    allow_private = settings.WEBHOOKS_ALLOW_PRIVATE
    try:
        with (
            checked_pool(seconds_left, allow_private=allow_private) as pool,
            pool.stream("POST", target_of(url), headers=[*headers.items()], content=body) as answer,
        ):
            status = answer.status
    except NoPublicAddress:
        raise NotDelivered("The host has no public address; see WEBHOOKS_ALLOW_PRIVATE.") from None
    if not 200 <= status < 300:
        raise NotDelivered(f"HTTP status {status}")


def webhook_signature(secret: str, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of Standard Webhooks; ``timestamp`` is in Unix seconds."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    content = f"{message_id}.{timestamp}.".encode() + body
    signature = base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{signature}",
    }
