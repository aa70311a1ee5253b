"""Endpoint and Message: the receivers of events, and the messages that they are sent.

A message is written in the transaction that makes its event true, so no event is lost or invented.
It is delivered at least once: a receiver recognises a repeated one by its id. Messages about one
object arrive in order.
"""

from __future__ import annotations

import datetime as dt
import secrets
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from typing import Any

import orjson
from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.core.exceptions import ValidationError
from django.core.validators import URLValidator, validate_email
from django.db import connection, models
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now
from django.db.models.signals import pre_delete
from django.dispatch import receiver
from django.utils import timezone

from inference_site.core.storage.old_rows import delete_older
from inference_site.core.storage.waits import is_over

RESPONSE_EVENTS = tuple(
    f"response.{end}" for end in ("completed", "failed", "incomplete", "cancelled")
)
"""Ends of responses in the background (API reference, "Webhook events")."""
BATCH_EVENTS = tuple(f"batch.{end}" for end in ("completed", "failed", "expired", "cancelled"))
APPROVAL_EVENT = "mcp_approval.requested"
"""A response asks to approve calls of MCP tools."""
ALARM_EVENTS = ("alarm.firing", "alarm.resolved")
TEST_EVENT = "endpoint.test"
EVENTS = (*RESPONSE_EVENTS, *BATCH_EVENTS, APPROVAL_EVENT, *ALARM_EVENTS)

GIVEN_UP_AFTER = dt.timedelta(hours=72)
MAX_REST = dt.timedelta(hours=1)
"""The longest time between two attempts."""
OLD_SECRET_KEPT = dt.timedelta(hours=24)
"""For how long webhooks are signed with the secret before a rotation too."""
_KEPT = dt.timedelta(days=30)
_DELETED_AT_ONCE = 1_000
_HOLD = "SELECT id FROM outbox_endpoint WHERE id = ANY(%s) ORDER BY id FOR KEY SHARE"
"""Holds endpoints until the transaction ends, and waits while one is being deleted."""


def is_due() -> Q:
    """Return the condition that a message may be sent now: the first attempt never waits."""
    return Q(next_at__isnull=False) & (Q(attempts=0) | is_over("next_at", MAX_REST))


def new_secret() -> str:
    """Return a random secret in the format of Standard Webhooks."""
    return f"whsec_{b64encode(secrets.token_bytes(32)).decode()}"


def is_secret(text: str) -> bool:
    """Whether receivers take this as a secret of Standard Webhooks."""
    encoded = text.removeprefix("whsec_")
    try:
        return encoded != text and bool(b64decode(encoded, validate=True))
    except ValueError:
        return False


class Endpoint(models.Model):
    """A receiver of the events of a project; without a project, of the alarms of the site.

    Without ``event_types`` it receives all of them. One without a project that names
    ``mcp_approval.requested`` receives that of all projects. After a failed attempt nothing is sent
    to it until ``rests_until``; ``failures`` counts the failed attempts in a row.
    """

    class Way(models.TextChoices):
        WEBHOOK = "webhook", "webhook"
        EMAIL = "email", "e-mail"

    project = models.ForeignKey(
        "accounts.Project",
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        help_text="It receives the events of this project. Empty: the alarms of the site.",
    )
    way = models.CharField(max_length=8, choices=Way.choices, default=Way.WEBHOOK)
    address = models.CharField(max_length=500, help_text="An https:// URL, or an e-mail address.")
    event_types = ArrayField(
        models.CharField(max_length=32, choices=[(name, name) for name in EVENTS]),
        verbose_name="events",
        default=list,
        blank=True,
        help_text="None chosen: all.",
    )
    with_arguments = models.BooleanField(
        "with arguments",
        default=False,
        db_default=False,
        help_text=(
            "Questions for an approval have the arguments of the calls, which may be what users "
            "wrote. Without it they have the names of servers and tools only."
        ),
    )
    secret = models.CharField(
        max_length=100,
        default=new_secret,
        help_text="Signs webhooks, as standardwebhooks.com says; give it to the receiver.",
    )
    old_secret = models.CharField(max_length=100, blank=True, default="", editable=False)
    old_secret_until = models.DateTimeField(null=True, editable=False)
    only_if_named = models.BooleanField(
        "only for rules that name it",
        default=False,
        db_default=False,
        help_text="It receives only alarms of rules that have it as a recipient.",
    )
    is_enabled = models.BooleanField("enabled", default=True)
    failures = models.PositiveIntegerField(default=0, editable=False)
    rests_until = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ["address"]
        constraints = [
            models.UniqueConstraint(
                fields=["project", "way", "address"],
                nulls_distinct=False,
                name="outbox_endpoint_once",
            ),
        ]

    def __str__(self) -> str:
        return self.address

    def clean(self) -> None:
        """Raise ValidationError for an address of another way, for mail of a project, and for a
        secret that no webhook can be signed with.
        """
        check = validate_email if self.way == self.Way.EMAIL else URLValidator(["https", "http"])
        try:
            check(self.address)
        except ValidationError as exc:
            raise ValidationError({"address": exc.messages}) from exc
        if self.way == self.Way.WEBHOOK and not is_secret(self.secret):
            raise ValidationError({"secret": "It must be whsec_ and then base64."})
        is_mail_of_project = self.way == self.Way.EMAIL and self.project_id is not None
        if is_mail_of_project and self.event_types != [APPROVAL_EVENT]:
            raise ValidationError(
                {"way": f"Of a project, only {APPROVAL_EVENT} is mailed: choose it, or webhook."}
            )

    @property
    def secrets(self) -> list[str]:
        """The secrets with which a webhook is signed now."""
        is_kept = self.old_secret_until is not None and self.old_secret_until > timezone.now()
        return [self.secret, self.old_secret] if is_kept else [self.secret]

    def rotate(self) -> str:
        """Give it a new secret and return that; the old one signs too, for a day."""
        self.old_secret, self.secret = self.secret, new_secret()
        self.old_secret_until = timezone.now() + OLD_SECRET_KEPT
        self.save(update_fields=["secret", "old_secret", "old_secret_until"])
        return self.secret


@receiver(pre_delete, sender=Endpoint)
def _lock(instance: Endpoint, **_: Any) -> None:
    """Have transactions with a message to an endpoint end before its messages are deleted."""
    Endpoint.objects.select_for_update().filter(pk=instance.pk).first()


class MessageQuerySet(models.QuerySet["Message"]):
    """Queries for messages."""

    def due(self) -> MessageQuerySet:
        """Return the messages that may be sent now, without those behind one about their object."""
        earlier = Message.objects.filter(
            endpoint=OuterRef("endpoint"),
            object_id=OuterRef("object_id"),
            pk__lt=OuterRef("pk"),
            next_at__isnull=False,
        )
        return self.filter(is_due(), ~Exists(earlier))


class Message(models.Model):
    """An event for one endpoint. ``public_id`` is the same at each attempt to deliver it.

    Arguments of calls are in the body until it is delivered, for an endpoint that receives them.
    """

    endpoint = models.ForeignKey(Endpoint, on_delete=models.CASCADE, db_index=False)
    public_id = models.CharField("ID", max_length=64, unique=True)
    event_type = models.CharField("event", max_length=32)
    object_id = models.CharField("about", max_length=200)
    body = models.TextField()
    created_at = models.DateTimeField(default=timezone.now)
    attempts = models.PositiveIntegerField(default=0)
    # Time of the next attempt; null after delivery, and after the last attempt.
    next_at = models.DateTimeField(null=True, default=timezone.now)
    give_up_at = models.DateTimeField()
    delivered_at = models.DateTimeField(null=True, blank=True)
    answer_status = models.PositiveSmallIntegerField("answer", null=True, blank=True)
    error = models.CharField(max_length=300, blank=True, default="")

    objects = MessageQuerySet.as_manager()

    class Meta:
        indexes = [
            models.Index(
                fields=["endpoint", "object_id", "id"],
                condition=Q(next_at__isnull=False),
                name="outbox_message_open",
            ),
            models.Index(
                fields=["endpoint", "id"],
                condition=Q(next_at__isnull=False),
                name="outbox_message_next",
            ),
        ]

    def __str__(self) -> str:
        return self.public_id

    def drop_arguments(self) -> None:
        """Take the arguments of calls out of the body; the caller saves it."""
        if self.event_type == APPROVAL_EVENT:
            body = orjson.loads(self.body)
            for question in body["data"].get("approval_requests", ()):
                question.pop("arguments", None)
            self.body = orjson.dumps(body).decode()


def sends_mail() -> bool:
    """Return whether a mail server is configured."""
    return bool(settings.EMAIL_HOST)


def site_endpoints() -> models.QuerySet[Endpoint]:
    """Return the endpoints that are told of every alarm."""
    is_told = Q(event_types=[]) | Q(event_types__overlap=ALARM_EVENTS)
    return Endpoint.objects.filter(is_told, project=None, is_enabled=True, only_if_named=False)


def approval_endpoints(project_id: int) -> models.QuerySet[Endpoint]:
    """Return the endpoints that are told when a response of a project asks for an approval."""
    is_named = Q(event_types__contains=[APPROVAL_EVENT])
    of_project = Q(project=project_id) & (is_named | Q(event_types=[]))
    of_site = Q(project=None) & is_named
    return Endpoint.objects.filter(of_project | of_site, is_enabled=True, only_if_named=False)


def publish(
    project_id: int | None, event_type: str, object_id: str, data: Mapping[str, Any]
) -> None:
    """Write a message about an event for each endpoint that is told of it.

    To be called in the transaction that makes the event true. ``object_id`` is what the event is
    about; ``project_id`` is None for an event of the site.
    """
    is_told = Q(event_types=[]) | Q(event_types__contains=[event_type])
    endpoints = Endpoint.objects.filter(
        is_told, project=project_id, is_enabled=True, only_if_named=False
    )
    send(list(endpoints), event_type, object_id, data)


def send(
    endpoints: list[Endpoint], event_type: str, object_id: str, data: Mapping[str, Any]
) -> None:
    """Write a message about an event for each of these endpoints, but for those just deleted.

    Without ``_HOLD`` a deletion meanwhile would fail the transaction that makes the event true.
    """
    if not endpoints:
        return
    with connection.cursor() as cursor:
        cursor.execute(_HOLD, [[endpoint.pk for endpoint in endpoints]])
        held = {pk for (pk,) in cursor.fetchall()}
    now = timezone.now()
    body = orjson.dumps(
        {
            "id": f"evt_{secrets.token_hex(16)}",
            "object": "event",
            "created_at": int(now.timestamp()),
            "type": event_type,
            "data": data,
        }
    ).decode()
    Message.objects.bulk_create(
        Message(
            endpoint=endpoint,
            public_id=f"msg_{secrets.token_hex(16)}",
            event_type=event_type,
            object_id=object_id[:200],
            body=body,
            created_at=now,
            next_at=Now(),  # Not by the clock of this host: beat compares it with the database's.
            give_up_at=Now() + GIVEN_UP_AFTER,
        )
        for endpoint in endpoints
        if endpoint.pk in held
    )


def forget_arguments(response_ids: Collection[str]) -> None:
    """Take the arguments of the calls of these responses out of all messages."""
    for message in Message.objects.filter(event_type=APPROVAL_EVENT, object_id__in=response_ids):
        message.drop_arguments()
        # Its endpoint may be deleted now.
        Message.objects.filter(pk=message.pk).update(body=message.body)


def prune(until: float) -> int:
    """Delete messages that are a month old; return how many."""
    return delete_older(
        Message.objects.filter(next_at=None), timezone.now() - _KEPT, until, _DELETED_AT_ONCE
    )
