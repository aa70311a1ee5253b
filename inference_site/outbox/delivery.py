"""Delivers the messages of the outbox, with repeated attempts for 72 hours.

Webhooks are signed as Standard Webhooks says (https://www.standardwebhooks.com/). The receiver
must have a public address (``checked_connections``). Redirects are not followed. A mail has nothing
that does something when it is opened: its link leads to a page of the console, which asks for a
login first.

A thread works for one endpoint at a time, so one whose server is slow or away delays no other. The
endpoints that have failed, or were slow, have threads of their own: however many they are, they
leave those of the others free. No thread has a connection to the database while it sends, and few
have one at a time: the other jobs of beat need them.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import orjson
from django.conf import settings
from django.core.mail import EmailMessage
from django.db import transaction
from django.db.models import Case, Exists, F, OuterRef, QuerySet, When
from django.db.models.functions import Now
from django.utils import timezone

from inference_site.core.storage.postgresql import cached_sql, release_connection_after
from inference_site.core.storage.waits import is_over
from inference_site.outbox.models import (
    APPROVAL_EVENT,
    MAX_REST,
    Endpoint,
    Message,
    is_due,
    sends_mail,
)

logger = logging.getLogger(__name__)

_THREADS, _SLOW_THREADS = 32, 8
"""The second ones are for endpoints that have failed, or whose last turn had a slow answer."""
_SLOW_S = 1.0
_database_turns = threading.BoundedSemaphore(4)
"""How many of the threads use the database at a time."""
_TIME_LIMIT_S = 5.0
"""How long a thread sends to one endpoint before another has its turn."""
_MOST_AT_ONCE = 64
_MIN_REST_S = 5
"""How long an endpoint rests after a failed attempt; doubled with each in a row."""
_RETRY_AFTER_DEATH = dt.timedelta(minutes=1)
"""When a message is tried again whose process died while it was sent."""
_WEBHOOK_TIMEOUT_S = 10.0
_STATES = {"alarm.firing": "Firing", "alarm.resolved": "Resolved"}
_MAX_SUBJECT = 200


class NoMailServer(Exception):
    """EMAIL_HOST is not set."""


class NotDelivered(Exception):
    """The receiver has a private address, or did not answer with a 2xx."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Deliverer:
    """The threads that deliver messages, and the endpoints that they work for."""

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(_THREADS, thread_name_prefix="outbox")
        self._slow = ThreadPoolExecutor(_SLOW_THREADS, thread_name_prefix="slow outbox")
        self._busy: set[int] = set()
        self._were_slow: set[int] = set()

    def start(self) -> None:
        """Have the due messages delivered; return at once. Beat calls this every second."""
        if not _is_any_open():
            return
        for endpoint_id, failures in due_endpoints(self._busy):
            is_slow = bool(failures) or endpoint_id in self._were_slow
            self._busy.add(endpoint_id)
            (self._slow if is_slow else self._quick).submit(self._work, endpoint_id)

    def _work(self, endpoint_id: int) -> None:
        try:
            if deliver_to(endpoint_id) > _SLOW_S:
                self._were_slow.add(endpoint_id)
            else:
                self._were_slow.discard(endpoint_id)
        except Exception:
            logger.exception("messages to endpoint %d are delivered later", endpoint_id)
        finally:
            self._busy.discard(endpoint_id)


@cached_sql
def _is_any_open() -> QuerySet[Any, Any]:
    return Message.objects.filter(is_due()).values_list("pk").order_by()[:1]


def due_endpoints(busy: Collection[int] = ()) -> list[tuple[int, int]]:
    """Return (id, failures) of endpoints for which a message is due and that do not rest.

    Those with the fewest failures are first, and the ``busy`` ones are left out.
    """
    due = Message.objects.filter(is_due(), endpoint=OuterRef("pk"))
    is_awake = is_over("rests_until", MAX_REST)
    found = Endpoint.objects.filter(is_awake, Exists(due), is_enabled=True)
    rows = found.exclude(pk__in=list(busy)).order_by("failures", "rests_until")
    return list(rows.values_list("pk", "failures")[:_MOST_AT_ONCE])


@contextmanager
def _database() -> Iterator[None]:
    with _database_turns, release_connection_after():
        yield


def deliver_to(endpoint_id: int) -> float:
    """Send what is due to an endpoint, until an attempt fails or ``_TIME_LIMIT_S`` is over.

    Return the seconds of the slowest attempt.
    """
    # Nothing is given up that no beat has tried: none may have run, or a clock may have been wrong.
    old = Message.objects.filter(is_due(), endpoint=endpoint_id, give_up_at__lte=Now())
    old = old.filter(endpoint__failures__gt=0)
    with _database():
        untried = old.filter(error="")
        untried.update(error="Not delivered within 72 hours: the endpoint did not answer.")
        old.update(next_at=None)
    began, slowest_s = time.monotonic(), 0.0
    while time.monotonic() - began < _TIME_LIMIT_S:
        with _database():
            message = _claim(endpoint_id)
        if message is None:
            break
        send = send_mail if message.endpoint.way == Endpoint.Way.EMAIL else post_webhook
        if not message.endpoint.with_arguments:  # It may have changed since the event.
            message.drop_arguments()
        sent_at, failure = time.monotonic(), None
        try:
            message.answer_status = send(message)
        except Exception as exc:  # noqa: BLE001  # Whatever it is, the message is sent again.
            failure = exc
        slowest_s = max(slowest_s, time.monotonic() - sent_at)
        with _database():
            if failure is not None:
                _note_failure(message, failure)
                break
            _note_success(message)
    return slowest_s


def _claim(endpoint_id: int) -> Message | None:
    """Return the next message for an endpoint, after scheduling its next attempt.

    One that was never tried comes before those that are tried again: a message that its receiver
    refuses again and again does not keep those about other objects back. If the process dies before
    it is sent, the next attempt sends it. A receiver that gets a message twice recognises its id.
    """
    with transaction.atomic():
        due = Message.objects.due().filter(endpoint=endpoint_id).select_related("endpoint")
        due = due.order_by("pk").select_for_update(skip_locked=True, of=("self",))
        message = due.filter(attempts=0).first() or due.first()
        if message is None:
            return None
        message.attempts += 1
        message.next_at = Now() + _RETRY_AFTER_DEATH
        message.save(update_fields=["attempts", "next_at"])
    return message


def _note_success(message: Message) -> None:
    message.drop_arguments()
    Message.objects.filter(pk=message.pk).update(
        delivered_at=timezone.now(),
        next_at=None,
        error="",
        answer_status=message.answer_status,
        body=message.body,
    )
    if message.endpoint.failures:
        Endpoint.objects.filter(pk=message.endpoint_id).update(failures=0, rests_until=None)


def _note_failure(message: Message, exc: Exception) -> None:
    """Let the endpoint rest; the message is tried again after that.

    Its own attempts count too: other messages may end the failures of the endpoint meanwhile.
    Nothing changes if the message was deleted, or if another beat has sent it since this one tried.
    """
    endpoint, rest = message.endpoint, _rest(message.endpoint.failures)
    at = Now() + max(rest, _rest(message.attempts - 1))
    error = f"{type(exc).__name__}: {exc}".replace("\0", "")[:300]
    tried = Message.objects.filter(pk=message.pk, attempts=message.attempts, next_at__isnull=False)
    if tried.update(
        next_at=Case(When(give_up_at__gt=at, then=at)),
        error=error,
        answer_status=getattr(exc, "status", None),
    ):
        failed = Endpoint.objects.filter(pk=endpoint.pk)
        failed.update(failures=F("failures") + 1, rests_until=Now() + rest)
        logger.warning("a message to %s was not delivered: %s", endpoint, error)


def _rest(failures: int) -> dt.timedelta:
    """Return how long to rest after a failure that comes after this number of others."""
    return min(dt.timedelta(seconds=_MIN_REST_S * 2 ** min(failures, 20)), MAX_REST)


def send_mail(message: Message) -> None:
    """Send one message by e-mail.

    Raise OSError, smtplib's errors, and NoMailServer.
    """
    if not sends_mail():
        raise NoMailServer("EMAIL_HOST is not set.")
    subject, text = mail_of(message.event_type, orjson.loads(message.body)["data"])
    headers = {"Message-ID": f"<{message.public_id}@{settings.EMAIL_FROM.rpartition('@')[2]}>"}
    to = [message.endpoint.address]
    EmailMessage(subject, text, settings.EMAIL_FROM, to, headers=headers).send()


def mail_of(event_type: str, data: Mapping[str, Any]) -> tuple[str, str]:
    """Return the subject and the text of the mail about an event."""
    if event_type == APPROVAL_EVENT:
        subject, lines = _approval(data)
    else:  # Of an alarm, or a test.
        state, lines = _STATES.get(event_type, "Test"), [data["text"]]
        subject = f"{state}: {data['text']}"
        if data.get("started_at"):
            lines += ["", f"{state}; began at {_shown(data['started_at'])} UTC."]
        if data.get("resolved_at"):
            lines.append(f"Ended at {_shown(data['resolved_at'])} UTC.")
    return _one_line(subject)[:_MAX_SUBJECT], "\n".join(lines)


def _approval(data: Mapping[str, Any]) -> tuple[str, list[str]]:
    count = data["count"]
    calls = "1 call" if count == 1 else f"{count} calls"
    project = _one_line(data["project"])
    lines = [f"A response of the project {project} waits until these calls are approved:", ""]
    for question in data["approval_requests"]:
        lines.append(f"- {_one_line(question['server_label'])}: {_one_line(question['name'])}")
        if question.get("arguments"):
            lines.append(f"  {_one_line(question['arguments'])}")
    if (more := count - len(data["approval_requests"])) > 0:
        lines.append(f"- and {more} more")
    page = f"{settings.SITE_URL}{data['page']}"
    if not data["is_answered_in_console"]:
        how = (
            "The answer must come through the API, because a server was named by its URL and its "
            "credentials are not stored. The calls:"
        )
    elif not settings.SITE_URL:
        how = "Approve or refuse them in the console of the site, on this page:"
    else:
        how = "Approve or refuse them here, after a login. Opening the page does nothing."
    lines += ["", how, page, "", f"Response: {data['id']}"]
    return f"Approval needed: {calls} of MCP tools in {project}", lines


def _one_line(text: str) -> str:
    """Return a text without what could end its line, or that a mail server does not take.

    A model's or a tool's name may have line breaks.
    """
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def _shown(moment: str) -> str:
    return f"{dt.datetime.fromisoformat(moment):%Y-%m-%d %H:%M:%S}"


def post_webhook(message: Message) -> int:
    """Send one message as a webhook; return the status of the answer.

    Raise httpcore's errors, NoAnswer, and NotDelivered.
    """
    # Here, because beat would keep 5 MiB for it, also on sites without webhooks.
    import httpx

    from inference_site.core.checked_connections import NoPublicAddress, checked_pool, target_of

    endpoint, body = message.endpoint, message.body.encode()
    url, deadline = httpx.URL(endpoint.address), time.monotonic() + _WEBHOOK_TIMEOUT_S
    headers = {
        "host": url.netloc.decode(),
        "content-type": "application/json",
        "user-agent": "inference-site",
        **webhook_signature(endpoint.secrets, message.public_id, int(time.time()), body),
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
            status: int = answer.status
    except NoPublicAddress:
        raise NotDelivered("The host has no public address; see WEBHOOKS_ALLOW_PRIVATE.") from None
    if not 200 <= status < 300:
        raise NotDelivered(f"HTTP status {status}", status)
    return status


def webhook_signature(
    secrets: Sequence[str], message_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Return the headers of Standard Webhooks; ``timestamp`` is in Unix seconds.

    With two secrets there are two signatures, of which a receiver accepts either.
    """
    content = f"{message_id}.{timestamp}.".encode() + body
    signatures = []
    for secret in secrets:
        key = base64.b64decode(secret.removeprefix("whsec_"))
        digest = base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
        signatures.append(f"v1,{digest}")
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }
