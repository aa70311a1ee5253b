"""Sends what is in the outbox: each notice until it is delivered, or has been tried for a day."""

from __future__ import annotations

import datetime as dt
import logging
import time
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from inference_site.alarms.mail import send_mail
from inference_site.alarms.models import Notice, Recipient
from inference_site.alarms.webhooks import post
from inference_site.storage.postgresql import cached_sql

logger = logging.getLogger(__name__)

_LONGEST_S = 5.0
_MOST_ATTEMPTS = 12
_FIRST_BACK_OFF_S, _LARGEST_BACK_OFF_S = 10, 4 * 3600


def deliver() -> None:
    """Send what is due, for some seconds at most."""
    until = time.monotonic() + _LONGEST_S
    while (notice := _claimed()) is not None:
        _send(notice)
        if time.monotonic() > until:
            break


def _claimed() -> Notice | None:
    """Take the notice that has been due for longest; whoever else looks, sees it later.

    A process that dies now leaves it to be sent again: the receiver knows it by its id.
    """
    if not _is_any_due():
        return None
    with transaction.atomic():
        due = Notice.objects.filter(next_at__lte=timezone.now()).order_by("next_at")
        notice = due.select_for_update(skip_locked=True).first()
        if notice is None:
            return None
        back_off_s = min(_FIRST_BACK_OFF_S * 2**notice.attempts, _LARGEST_BACK_OFF_S)
        notice.attempts += 1
        notice.next_at = timezone.now() + dt.timedelta(seconds=back_off_s)
        notice.save(update_fields=["attempts", "next_at"])
    return notice


@cached_sql
def _is_any_due() -> QuerySet[Any, Any]:
    return Notice.objects.filter(next_at__lte=Now()).values_list("pk").order_by()[:1]


def _send(notice: Notice) -> None:
    recipient = notice.recipient
    send = send_mail if recipient.way == Recipient.Way.EMAIL else post
    try:
        send(notice)
    except Exception as exc:  # noqa: BLE001  # Whatever it is, the next notice must be sent.
        notice.error = f"{type(exc).__name__}: {exc}".replace("\0", "")[:300]
        if notice.attempts >= _MOST_ATTEMPTS:
            notice.next_at = None
        logger.warning("a notice to %s was not delivered: %s", recipient, notice.error)
    else:
        notice.delivered_at, notice.next_at, notice.error = timezone.now(), None, ""
    notice.save(update_fields=["delivered_at", "next_at", "error"])
