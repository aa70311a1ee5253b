"""Notices reach a real mail server and a real HTTP receiver, once these are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpcore
import orjson
import pytest
from django.utils import timezone

from inference_site.console.alarms import outbox
from inference_site.console.alarms.models import Alarm, Notice, Recipient, Rule, RuleKind
from inference_site.console.alarms.outbox import deliver, webhook_signature
from inference_site.core import checked_connections
from tests.certificates import write_certificate
from tests.notice_receivers import Hook, Mailbox, mail_server, receiver, signature
from tests.ports import free_port

pytestmark = pytest.mark.django_db


@pytest.fixture
def alarm(db: None) -> Alarm:
    rule = Rule.objects.get(kind=RuleKind.DISK)
    return Alarm.objects.create(rule=rule, subject="DATA_DIR", text="The disk\nis 95 % full.")


def notice(alarm: Alarm, recipient: Recipient) -> Notice:
    public_id = f"msg_{Notice.objects.count()}"
    return Notice.objects.create(
        alarm=alarm, recipient=recipient, text=alarm.text, public_id=public_id
    )


@pytest.fixture
def mailbox(settings: Any) -> Iterator[Mailbox]:
    port = free_port()
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", port
    settings.EMAIL_FROM = "site@example.org"
    with mail_server(port) as box:
        yield box


@pytest.fixture
def hook(settings: Any) -> Iterator[Hook]:
    settings.WEBHOOKS_ALLOW_PRIVATE = True
    with receiver() as running:
        yield running


def test_a_mail_says_what_fires(alarm: Alarm, mailbox: Mailbox) -> None:
    sent = notice(alarm, Recipient.objects.create(address="ops@example.org"))
    deliver()
    (mail,) = mailbox.mails
    assert (mail.mail_from, mail.rcpt_tos) == ("site@example.org", ["ops@example.org"])
    assert b"Subject: Firing: The disk is 95 % full." in mail.content
    assert b"<msg_0@example.org>" in mail.content
    sent.refresh_from_db()
    assert sent.delivered_at is not None
    deliver()
    assert len(mailbox.mails) == 1


def test_a_webhook_is_signed_as_standard_webhooks_says(alarm: Alarm, hook: Hook) -> None:
    recipient = Recipient.objects.create(way="webhook", address=hook.url)
    notice(alarm, recipient)
    deliver()
    ((headers, body),) = hook.posted
    assert headers["webhook-signature"] == signature(recipient.secret, headers, body)
    said = orjson.loads(body)
    assert (said["type"], said["data"]["subject"]) == ("alarm.firing", "DATA_DIR")


def test_the_signature_is_that_of_the_specification() -> None:
    # https://github.com/standard-webhooks/standard-webhooks: the example of its libraries' tests.
    secret = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    headers = webhook_signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_what_fails_is_tried_again_with_the_same_id_and_given_up_at_last(
    alarm: Alarm, hook: Hook, monkeypatch: Any
) -> None:
    monkeypatch.setattr(outbox, "_MAX_ATTEMPTS", 3)
    sent = notice(alarm, Recipient.objects.create(way="webhook", address=hook.url))
    hook.answers = [500, 302, 500, 200]
    waits = []
    for _ in range(5):
        Notice.objects.filter(next_at__isnull=False).update(next_at=timezone.now())
        deliver()
        sent.refresh_from_db()
        if sent.next_at:
            waits.append((sent.next_at - timezone.now()).total_seconds())
    assert len(hook.posted) == 3  # It was not redirected, and not tried for ever.
    assert {headers["webhook-id"] for headers, _ in hook.posted} == {"msg_0"}
    assert waits[1] > 1.5 * waits[0]
    assert (sent.delivered_at, sent.error) == (None, "NotDelivered: HTTP status 500")


def test_one_that_fails_keeps_no_other_back(
    alarm: Alarm, hook: Hook, settings: Any, mailbox: Mailbox
) -> None:
    settings.EMAIL_PORT = free_port()
    notice(alarm, Recipient.objects.create(address="ops@example.org"))
    notice(alarm, Recipient.objects.create(way="webhook", address=hook.url))
    deliver()
    assert len(hook.posted) == 1
    assert "Connection refused" in Notice.objects.order_by("pk")[0].error


def test_no_address_is_posted_to_that_is_not_public(
    alarm: Alarm, hook: Hook, settings: Any
) -> None:
    settings.WEBHOOKS_ALLOW_PRIVATE = False
    private = ("http://169.254.169.254/latest", "http://[::1]/", "http://localhost/", hook.url)
    for address in private:
        notice(alarm, Recipient.objects.create(way="webhook", address=address))
    deliver()
    assert hook.posted == []
    errors = set(Notice.objects.values_list("error", flat=True))
    assert errors == {"NotDelivered: The host has no public address; see WEBHOOKS_ALLOW_PRIVATE."}


@pytest.mark.parametrize(
    ("name", "is_trusted", "told"),
    [
        ("IP:127.0.0.1", True, ""),
        ("IP:127.0.0.1", False, "self-signed certificate"),
        ("DNS:example.org", True, "IP address mismatch"),
    ],
)
def test_a_receiver_with_tls_gets_a_notice_only_if_its_certificate_is_good(
    alarm: Alarm,
    settings: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_trusted: bool,
    told: str,
) -> None:
    settings.WEBHOOKS_ALLOW_PRIVATE = True
    certificate = write_certificate(tmp_path, name)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setattr(checked_connections, "ssl_context", httpcore.default_ssl_context)
    with receiver(certificate) as hook:
        sent = notice(alarm, Recipient.objects.create(way="webhook", address=hook.url))
        deliver()
    sent.refresh_from_db()
    assert len(hook.posted) == (not told)
    assert (sent.delivered_at is None) == bool(told)
    assert told in sent.error
