"""Notices reach a real mail server and a real HTTP receiver, once these are there."""

from __future__ import annotations

import base64
import hashlib
import hmac
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import orjson
import pytest
from aiosmtpd.controller import Controller
from django.utils import timezone

from inference_site.alarms import outbox
from inference_site.alarms.models import Alarm, Kind, Notice, Recipient, Rule
from inference_site.alarms.outbox import deliver
from inference_site.alarms.webhooks import signed
from tests.ports import free_port

pytestmark = pytest.mark.django_db


@pytest.fixture
def alarm(db: None) -> Alarm:
    rule = Rule.objects.get(kind=Kind.DISK)
    return Alarm.objects.create(rule=rule, subject="DATA_DIR", text="The disk\nis 95 % full.")


def notice(alarm: Alarm, recipient: Recipient) -> Notice:
    public_id = f"msg_{Notice.objects.count()}"
    return Notice.objects.create(
        alarm=alarm, recipient=recipient, text=alarm.text, public_id=public_id
    )


class Mailbox:
    """What a mail server was sent."""

    def __init__(self) -> None:
        self.mails: list[Any] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.mails.append(envelope)
        return "250 OK"


@pytest.fixture
def mailbox(settings: Any) -> Iterator[Mailbox]:
    box = Mailbox()
    server = Controller(box, hostname="127.0.0.1", port=free_port())
    server.start()
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", server.port
    settings.EMAIL_FROM = "site@example.org"
    yield box
    server.stop()


class Receiver(BaseHTTPRequestHandler):
    """Notes what it is posted, and answers as it is told."""

    posted: list[tuple[dict[str, str], bytes]] = []
    answers: list[int] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.posted.append((dict(self.headers.items()), body))
        self.send_response(self.answers.pop(0) if self.answers else 204)
        self.send_header("location", "http://127.0.0.1:1/")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def receiver(settings: Any) -> Iterator[str]:
    settings.WEBHOOKS_ALLOW_PRIVATE = True
    Receiver.posted, Receiver.answers = [], []
    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook?a=b"
        server.shutdown()
        thread.join()


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


def test_a_webhook_is_signed_as_standard_webhooks_says(alarm: Alarm, receiver: str) -> None:
    recipient = Recipient.objects.create(way="webhook", address=receiver)
    notice(alarm, recipient)
    deliver()
    ((headers, body),) = Receiver.posted
    key = base64.b64decode(recipient.secret.removeprefix("whsec_"))
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    said = orjson.loads(body)
    assert (said["type"], said["data"]["subject"]) == ("alarm.firing", "DATA_DIR")


def test_the_signature_is_that_of_the_specification() -> None:
    # https://github.com/standard-webhooks/standard-webhooks: the example of its libraries' tests.
    secret = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    headers = signed(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_what_fails_is_tried_again_with_the_same_id_and_given_up_at_last(
    alarm: Alarm, receiver: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(outbox, "_MOST_ATTEMPTS", 3)
    sent = notice(alarm, Recipient.objects.create(way="webhook", address=receiver))
    Receiver.answers = [500, 302, 500, 200]
    waits = []
    for _ in range(5):
        Notice.objects.filter(next_at__isnull=False).update(next_at=timezone.now())
        deliver()
        sent.refresh_from_db()
        if sent.next_at:
            waits.append((sent.next_at - timezone.now()).total_seconds())
    assert len(Receiver.posted) == 3  # It was not redirected, and not tried for ever.
    assert {headers["webhook-id"] for headers, _ in Receiver.posted} == {"msg_0"}
    assert waits[1] > 1.5 * waits[0]
    assert (sent.delivered_at, sent.error) == (None, "NotDelivered: HTTP status 500")


def test_one_that_fails_keeps_no_other_back(
    alarm: Alarm, receiver: str, settings: Any, mailbox: Mailbox
) -> None:
    settings.EMAIL_PORT = free_port()
    notice(alarm, Recipient.objects.create(address="ops@example.org"))
    notice(alarm, Recipient.objects.create(way="webhook", address=receiver))
    deliver()
    assert len(Receiver.posted) == 1
    assert "ConnectionRefusedError" in Notice.objects.order_by("pk")[0].error


def test_no_address_is_posted_to_that_is_not_public(
    alarm: Alarm, receiver: str, settings: Any
) -> None:
    settings.WEBHOOKS_ALLOW_PRIVATE = False
    private = ("http://169.254.169.254/latest", "http://[::1]/", "http://localhost/", receiver)
    for address in private:
        notice(alarm, Recipient.objects.create(way="webhook", address=address))
    deliver()
    assert Receiver.posted == []
    errors = set(Notice.objects.values_list("error", flat=True))
    assert errors == {"NotDelivered: The host has no public address; see WEBHOOKS_ALLOW_PRIVATE."}
