"""Rules, alarms, recipients, and the outbox of notices."""

from __future__ import annotations

import secrets
from base64 import b64encode

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator, URLValidator, validate_email
from django.db import models
from django.utils import timezone


class RuleKind(models.TextChoices):
    """The condition of a rule; the unit of its bound is in parentheses."""

    NO_WORKER = "no_worker", "requests wait and no worker has the model (seconds)"
    QUEUE_WAIT = "queue_wait", "the oldest waiting request of a model (seconds)"
    ERRORS = "errors", "errors of a model in 5 minutes (percent)"
    TTFT = "ttft", "time to first token of a model in 5 minutes, p95 (milliseconds)"
    BUDGET = "budget", "a budget is spent (percent)"
    DISK = "disk", "the disk of the data or the models is full (percent)"
    REDIS_MEMORY = "redis_memory", "the memory of Redis is full (percent)"


class Rule(models.Model):
    """A condition that raises alarms.

    Rules of errors and of time to first token fire above ``bound`` if the value is also more than
    ``factor`` times that of the seven days before.
    """

    kind = models.CharField(max_length=16, choices=RuleKind.choices)
    bound = models.FloatField(validators=[MinValueValidator(0)])
    factor = models.FloatField(
        "times the usual",
        default=0,
        validators=[MinValueValidator(0)],
        help_text=(
            "Only for errors and time to first token: how many times the value of the seven days "
            "before. 0: the bound alone decides."
        ),
    )
    is_enabled = models.BooleanField("enabled", default=True)

    class Meta:
        ordering = ["kind", "bound"]
        constraints = [
            models.UniqueConstraint(fields=["kind", "bound"], name="alarm_rule_once"),
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()}: {self.bound:g}"


class Alarm(models.Model):
    """A condition that is or was true for one subject, such as a model.

    ``seen_at`` is when it was last true; ``resolved_at`` is null while the alarm fires.
    """

    rule = models.ForeignKey(Rule, on_delete=models.CASCADE, related_name="alarms")
    subject = models.CharField(max_length=200)
    text = models.CharField(max_length=400)
    started_at = models.DateTimeField(default=timezone.now)
    seen_at = models.DateTimeField(default=timezone.now)
    resolved_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["rule", "subject"],
                condition=models.Q(resolved_at__isnull=True),
                name="alarm_fires_once",
            )
        ]

    def __str__(self) -> str:
        return self.text


def new_secret() -> str:
    """Return a random secret in the format of Standard Webhooks."""
    return f"whsec_{b64encode(secrets.token_bytes(32)).decode()}"


class Recipient(models.Model):
    """An address that gets a notice when an alarm starts and when it is resolved."""

    class Way(models.TextChoices):
        EMAIL = "email", "e-mail"
        WEBHOOK = "webhook", "webhook"

    way = models.CharField(max_length=8, choices=Way.choices, default=Way.EMAIL)
    address = models.CharField(max_length=500, help_text="An e-mail address, or an https:// URL.")
    secret = models.CharField(
        max_length=100,
        default=new_secret,
        help_text="Signs webhooks, as standardwebhooks.com says; give it to the receiver.",
    )
    is_enabled = models.BooleanField("enabled", default=True)

    class Meta:
        ordering = ["address"]
        constraints = [
            models.UniqueConstraint(fields=["way", "address"], name="alarm_recipient_once"),
        ]

    def __str__(self) -> str:
        return self.address

    def clean(self) -> None:
        """Raise ValidationError if the address is no e-mail address or URL, as ``way`` demands."""
        check = validate_email if self.way == self.Way.EMAIL else URLValidator(["https", "http"])
        try:
            check(self.address)
        except ValidationError as exc:
            raise ValidationError({"address": exc.messages}) from exc


class Notice(models.Model):
    """One message of the outbox. ``public_id`` is the same at each attempt to deliver it."""

    alarm = models.ForeignKey(Alarm, on_delete=models.CASCADE, related_name="notices")
    recipient = models.ForeignKey(Recipient, on_delete=models.CASCADE, related_name="notices")
    is_resolved = models.BooleanField("of its end", default=False)
    public_id = models.CharField("ID", max_length=64, unique=True)
    text = models.CharField(max_length=400)
    created_at = models.DateTimeField(default=timezone.now)
    attempts = models.PositiveSmallIntegerField(default=0)
    # Time of the next attempt; null after delivery, and after the last attempt.
    next_at = models.DateTimeField(null=True, default=timezone.now)
    delivered_at = models.DateTimeField(null=True, blank=True)
    error = models.CharField(max_length=300, blank=True, default="")

    class Meta:
        indexes = [
            models.Index(
                fields=["next_at"],
                condition=models.Q(next_at__isnull=False),
                name="alarm_notice_open",
            )
        ]

    def __str__(self) -> str:
        return self.public_id
