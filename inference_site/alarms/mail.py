"""Notices by e-mail, with Django's settings of mail."""

from __future__ import annotations

from django.conf import settings
from django.core.mail import EmailMessage

from inference_site.alarms.models import Notice


class NoMailServer(Exception):
    """EMAIL_HOST is not set."""


def send_mail(notice: Notice) -> None:
    """Send one notice. Raise OSError, smtplib's errors, and NoMailServer."""
    if not settings.EMAIL_HOST:
        raise NoMailServer("EMAIL_HOST is not set.")
    state = "Resolved" if notice.is_resolved else "Firing"
    # A model's name may have any character; a header has one line.
    subject = " ".join(f"{state}: {notice.text}".split())[:200]
    alarm = notice.alarm
    lines = [notice.text, "", f"{state}; began at {alarm.started_at:%Y-%m-%d %H:%M:%S} UTC."]
    if alarm.resolved_at is not None:
        lines.append(f"Ended at {alarm.resolved_at:%Y-%m-%d %H:%M:%S} UTC.")
    headers = {"Message-ID": f"<{notice.public_id}@{settings.EMAIL_FROM.rpartition('@')[2]}>"}
    to = [notice.recipient.address]
    EmailMessage(subject, "\n".join(lines), settings.EMAIL_FROM, to, headers=headers).send()
