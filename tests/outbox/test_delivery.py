"""Messages reach a real mail server and a real HTTP receiver, once these are there."""

from __future__ import annotations

import datetime as dt
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpcore
import orjson
import pytest
from django.db import connection, transaction
from django.utils import timezone

from inference_site.accounts.models import Project
from inference_site.core import checked_connections
from inference_site.outbox import delivery
from inference_site.outbox.delivery import (
    Deliverer,
    deliver_to,
    due_endpoints,
    webhook_signature,
)
from inference_site.outbox.models import Endpoint, Message, publish, send
from tests.certificates import write_certificate
from tests.notice_receivers import Hook, Mailbox, mail_server, receiver, signature
from tests.ports import free_port
from tests.waiting import wait_for_a_wait, wait_until

pytestmark = pytest.mark.django_db


FIRING = {
    "subject": "DATA_DIR",
    "text": "The disk\nis 95 % full.",
    "started_at": "2026-11-26T08:00:00Z",
    "resolved_at": None,
}


def endpoint(address: str, way: str = "webhook", **fields: Any) -> Endpoint:
    return Endpoint.objects.create(way=way, address=address, **fields)


def message(to: Endpoint, about: str = "alarm 1") -> Message:
    send([to], "alarm.firing", about, FIRING)
    return Message.objects.latest("pk")


def deliver() -> None:
    """Deliver what is due, one endpoint after the other."""
    for endpoint_id, _ in due_endpoints():
        deliver_to(endpoint_id)


def wake(**fields: Any) -> None:
    """Let the time pass for which endpoints rest and messages wait."""
    Endpoint.objects.update(rests_until=None)
    Message.objects.filter(next_at__isnull=False).update(next_at=timezone.now(), **fields)


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


def test_a_mail_says_what_fires(mailbox: Mailbox) -> None:
    sent = message(endpoint("ops@example.org", "email"))
    deliver()
    (mail,) = mailbox.mails
    assert (mail.mail_from, mail.rcpt_tos) == ("site@example.org", ["ops@example.org"])
    assert b"Subject: Firing: The disk is 95 % full." in mail.content
    assert b"began at 2026-11-26 08:00:00 UTC" in mail.content
    assert f"<{sent.public_id}@example.org>".encode() in mail.content
    sent.refresh_from_db()
    assert sent.delivered_at is not None
    deliver()
    assert len(mailbox.mails) == 1


def test_a_webhook_is_signed_as_standard_webhooks_says(hook: Hook) -> None:
    to = endpoint(hook.url)
    sent = message(to)
    deliver()
    ((headers, body),) = hook.posted
    assert headers["webhook-signature"] == signature(to.secret, headers, body)
    said = orjson.loads(body)
    assert (said["type"], said["data"]["subject"]) == ("alarm.firing", "DATA_DIR")
    sent.refresh_from_db()
    assert sent.answer_status == 204


def test_both_secrets_sign_after_a_rotation(hook: Hook) -> None:
    to = endpoint(hook.url)
    old, new = to.secret, to.rotate()
    message(to)
    deliver()
    ((headers, body),) = hook.posted
    both = [signature(secret, headers, body) for secret in (new, old)]
    assert headers["webhook-signature"].split(" ") == both
    Endpoint.objects.update(old_secret_until=timezone.now())
    message(to)
    deliver()
    headers, body = hook.posted[1]
    assert headers["webhook-signature"] == signature(new, headers, body)


def test_the_signature_is_that_of_the_specification() -> None:
    # https://github.com/standard-webhooks/standard-webhooks: the example of its libraries' tests.
    secret = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    headers = webhook_signature([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_what_fails_is_tried_again_with_the_same_id_and_given_up_at_last(hook: Hook) -> None:
    sent = message(endpoint(hook.url))
    hook.answers = [500, 302, 500, 500]
    waits = []
    for _ in range(3):
        wake()
        deliver()
        sent.refresh_from_db()
        assert sent.next_at is not None
        waits.append((sent.next_at - timezone.now()).total_seconds())
    assert len(hook.posted) == 3  # It was not redirected.
    assert {headers["webhook-id"] for headers, _ in hook.posted} == {sent.public_id}
    assert waits[1] > 1.5 * waits[0]
    deliver()
    assert len(hook.posted) == 3, "the endpoint rests"
    assert (sent.answer_status, sent.error) == (500, "NotDelivered: HTTP status 500")
    wake(give_up_at=timezone.now())
    deliver()
    sent.refresh_from_db()
    assert len(hook.posted) == 3
    assert (sent.next_at, sent.delivered_at) == (None, None)


def test_a_clock_that_was_set_back_keeps_no_message(hook: Hook) -> None:
    tried, new = (message(endpoint(f"{hook.url}{path}")) for path in "ab")
    before = timezone.now() + dt.timedelta(hours=5)
    Message.objects.update(next_at=before)
    Message.objects.filter(pk=tried.pk).update(attempts=1)
    Endpoint.objects.update(rests_until=before)
    deliver()
    ids = {headers["webhook-id"] for headers, _ in hook.posted}
    assert ids == {tried.public_id, new.public_id}


def test_an_event_of_a_host_whose_clock_is_ahead_does_not_wait(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, now = endpoint(hook.url), timezone.now
    monkeypatch.setattr(timezone, "now", lambda: now() + dt.timedelta(minutes=30))
    sent = message(to)
    hook.answers = [500]
    deliver()
    monkeypatch.undo()
    sent.refresh_from_db()
    assert sent.next_at is not None
    assert sent.next_at - timezone.now() < dt.timedelta(minutes=1), "nor does its next attempt"
    assert sent.give_up_at - timezone.now() < dt.timedelta(hours=72)


def test_what_no_beat_has_tried_within_72_hours_is_tried_before_it_is_given_up(hook: Hook) -> None:
    to = endpoint(hook.url)
    first, second = message(to), message(to, "alarm 2")
    hook.answers = [500]
    wake(give_up_at=timezone.now())
    deliver()
    assert len(hook.posted) == 1
    wake()  # What is given up stays so.
    deliver()
    for sent in (first, second):
        sent.refresh_from_db()
        assert (sent.next_at, sent.delivered_at) == (None, None)
    assert (len(hook.posted), second.attempts) == (1, 0), "the endpoint does not answer"


def test_messages_about_one_object_arrive_in_order(hook: Hook) -> None:
    to = endpoint(hook.url)
    first, second, other = (message(to, about) for about in ("a", "a", "b"))
    hook.answers = [500]
    deliver()
    assert len(hook.posted) == 1
    Endpoint.objects.update(rests_until=None)
    deliver()  # The first one waits for its next attempt.
    assert [headers["webhook-id"] for headers, _ in hook.posted[1:]] == [other.public_id]
    wake()
    deliver()
    ids = [headers["webhook-id"] for headers, _ in hook.posted[2:]]
    assert ids == [first.public_id, second.public_id]


def test_an_attempt_whose_message_another_beat_has_sent_meanwhile_changes_nothing(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beat stood still for a minute, and failed then: the message was sent once more after it."""
    sent = message(endpoint(hook.url))

    def stand_still(_: Message) -> int:
        monkeypatch.undo()
        wake()
        deliver()
        raise TimeoutError

    monkeypatch.setattr(delivery, "post_webhook", stand_still)
    deliver()
    sent.refresh_from_db()
    assert (sent.next_at, sent.error, sent.endpoint.failures) == (None, "", 0)
    assert sent.delivered_at is not None


@pytest.mark.parametrize("is_answered", [True, False])
def test_an_endpoint_may_be_deleted_while_a_message_is_sent_to_it(
    monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """The log had a traceback, and said that its messages are delivered later."""
    to = endpoint("https://example.org")
    message(to)

    def delete(_: Message) -> int:
        to.delete()
        if is_answered:
            return 204
        raise TimeoutError

    monkeypatch.setattr(delivery, "post_webhook", delete)
    deliver()
    assert not Message.objects.exists()


def test_an_endpoint_that_does_not_answer_keeps_no_other_back(hook: Hook) -> None:
    away, works = endpoint(f"http://127.0.0.1:{free_port()}/"), endpoint(hook.url)
    for number in range(200):
        message(away, f"{number}")
    message(works)
    deliver()
    assert len(hook.posted) == 1
    tried = Message.objects.filter(endpoint=away, attempts__gt=0)
    assert tried.count() == 1, "the others wait until it answers"
    away.refresh_from_db()
    assert away.failures == 1


def test_a_message_that_is_refused_keeps_those_about_other_objects_not_back(hook: Hook) -> None:
    to = endpoint(hook.url)
    refused, behind, other = (message(to, about) for about in ("a", "a", "b"))
    waits = []
    for answers in ([500], [204, 500], [204, 500]):
        hook.answers = answers
        wake()
        deliver()
        refused.refresh_from_db()
        assert refused.next_at is not None
        waits.append((refused.next_at - timezone.now()).total_seconds())
        if len(waits) > 1:
            message(to, "c")
    ids = [headers["webhook-id"] for headers, _ in hook.posted]
    assert ids[:3] == [refused.public_id, other.public_id, refused.public_id]
    assert behind.public_id not in ids
    assert waits[2] > 1.5 * waits[1] > 2.25 * waits[0], "though others arrive meanwhile"
    to.refresh_from_db()
    assert to.failures == 1
    wake()
    deliver()
    ids = [headers["webhook-id"] for headers, _ in hook.posted]
    assert ids[-2:] == [refused.public_id, behind.public_id], "after the one that was new"


@pytest.mark.django_db(transaction=True)
def test_many_that_never_answer_keep_no_other_back_and_hold_no_connection(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_WEBHOOK_TIMEOUT_S", 2.0)
    with socket.create_server(("127.0.0.1", 0), backlog=1_000) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for number in range(60):
            hangs = endpoint(f"{address}/{number}", failures=number // 40)
            for about in range(3):
                message(hangs, f"{about}")
        deliverer = Deliverer()
        deliverer.start()  # It takes all threads.
        connection.close()
        wait_until(lambda: connections_in_use() == 0, timeout_s=1.5)
        works = endpoint(hook.url)

        def is_through_in(seconds: float) -> bool:
            hook.posted.clear()
            message(works, "resp_1")
            until = time.monotonic() + seconds
            while not hook.posted and time.monotonic() < until:
                deliverer.start()
                time.sleep(0.1)
            return bool(hook.posted)

        assert is_through_in(10)  # The others are known then.
        for _ in range(3):
            assert is_through_in(1), "while threads wait for others"
        wait_until(lambda: not deliverer._busy, timeout_s=20)


def connections_in_use() -> int:
    """How many connections of the pool somebody has."""
    stats = connection.pool.get_stats()  # type: ignore[attr-defined]  # Missing in the stubs.
    return int(stats["pool_size"]) - int(stats["pool_available"])


def test_one_that_fails_keeps_no_other_back(hook: Hook, settings: Any, mailbox: Mailbox) -> None:
    settings.EMAIL_PORT = free_port()
    mailed = message(endpoint("ops@example.org", "email"))
    message(endpoint(hook.url))
    deliver()
    assert len(hook.posted) == 1
    mailed.refresh_from_db()
    assert "Connection refused" in mailed.error


def test_an_endpoint_is_told_of_its_project_and_its_events_only(db: None) -> None:
    project = Project.objects.create(name="a")
    of_site, of_project, of_batches = (
        endpoint("https://a.example/"),
        endpoint("https://b.example/", project=project),
        endpoint("https://c.example/", project=project, event_types=["batch.completed"]),
    )
    endpoint("https://d.example/", project=project, is_enabled=False)
    publish(project.pk, "response.completed", "resp_1", {"id": "resp_1"})
    publish(project.pk, "batch.completed", "batch_1", {"id": "batch_1"})
    publish(None, "alarm.firing", "alarm 1", FIRING)
    told: dict[Endpoint, list[str]] = {}
    for sent in Message.objects.order_by("pk"):
        told.setdefault(sent.endpoint, []).append(sent.event_type)
    assert told == {
        of_site: ["alarm.firing"],
        of_project: ["response.completed", "batch.completed"],
        of_batches: ["batch.completed"],
    }


def test_no_address_is_posted_to_that_is_not_public(hook: Hook, settings: Any) -> None:
    settings.WEBHOOKS_ALLOW_PRIVATE = False
    private = ("http://169.254.169.254/latest", "http://[::1]/", "http://localhost/", hook.url)
    for address in private:
        message(endpoint(address))
    deliver()
    assert hook.posted == []
    errors = set(Message.objects.values_list("error", flat=True))
    assert errors == {"NotDelivered: The host has no public address; see WEBHOOKS_ALLOW_PRIVATE."}


@pytest.mark.parametrize(
    ("name", "is_trusted", "told"),
    [
        ("IP:127.0.0.1", True, ""),
        ("IP:127.0.0.1", False, "self-signed certificate"),
        ("DNS:example.org", True, "IP address mismatch"),
    ],
)
def test_a_receiver_with_tls_gets_a_message_only_if_its_certificate_is_good(
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
        sent = message(endpoint(hook.url))
        deliver()
    sent.refresh_from_db()
    assert len(hook.posted) == (not told)
    assert (sent.delivered_at is None) == bool(told)
    assert told in sent.error


@pytest.mark.django_db(transaction=True)
def test_what_ends_while_an_endpoint_is_deleted_is_told_to_the_others(project: Project) -> None:
    """The transaction of the end failed: a completed response became a failed one."""
    gone, kept = (endpoint(f"https://example.org/{n}", project=project) for n in range(2))

    def work() -> None:
        with transaction.atomic():
            publish(project.pk, "response.completed", "resp_1", {"id": "resp_1"})
        connection.close()

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            gone.delete()
            end = threads.submit(work)
            wait_for_a_wait()
        end.result(30)
    assert list(Message.objects.values_list("endpoint", flat=True)) == [kept.pk]


@pytest.mark.django_db(transaction=True)
def test_an_endpoint_is_deleted_with_a_message_that_is_being_written(project: Project) -> None:
    gone = endpoint("https://example.org", project=project)

    def work() -> None:
        gone.delete()
        connection.close()

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            publish(project.pk, "response.completed", "resp_1", {"id": "resp_1"})
            deletion = threads.submit(work)
            wait_for_a_wait()
        deletion.result(30)
    assert not Message.objects.exists()
