"""Rules, and the alarms that they raise."""

from __future__ import annotations

from typing import Literal

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
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


_OF_MODELS = (RuleKind.NO_WORKER, RuleKind.QUEUE_WAIT, RuleKind.ERRORS, RuleKind.TTFT)
_OF_TENANTS = (*_OF_MODELS, RuleKind.BUDGET)


class Rule(models.Model):
    """A condition that raises alarms.

    Rules of errors and of time to first token fire above ``bound`` if the value is also more than
    ``factor`` times that of the seven days before. A rule with a ``model``, ``project`` or
    ``api_key`` looks only at their requests. ``recipients`` are told of its alarms; without any,
    all endpoints of the site are.
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
    model = models.CharField(
        max_length=200, blank=True, default="", db_default="", help_text="Empty: each model."
    )
    project = models.ForeignKey(
        "accounts.Project",
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        help_text="Empty: all projects.",
    )
    api_key = models.ForeignKey(
        "accounts.ApiKey",
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        verbose_name="API key",
        help_text="Empty: all keys.",
    )
    recipients = models.ManyToManyField(
        "outbox.Endpoint",
        blank=True,
        limit_choices_to={"project": None},
        help_text="None chosen: all endpoints of the site that are not only for rules naming them.",
    )
    is_enabled = models.BooleanField("enabled", default=True)

    class Meta:
        ordering = ["kind", "bound"]
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "bound", "model", "project", "api_key"],
                nulls_distinct=False,
                name="alarm_rule_once_in_scope",
            ),
        ]

    def __str__(self) -> str:
        scope = f", {self.scope}" if self.scope else ""
        return f"{self.get_kind_display()}: {self.bound:g}{scope}"

    @property
    def scope(self) -> str:
        """What the rule is limited to, in words; "" for nothing."""
        key = f"key {self.api_key.name}" if self.api_key else ""
        project = f"project {self.project}" if self.project else ""
        return ", ".join(filter(None, (self.model and f"model {self.model}", project, key)))

    def clean(self) -> None:
        """Raise ValidationError for a scope that the kind of rule cannot have."""
        if self.model and self.kind not in _OF_MODELS:
            raise ValidationError({"model": "This kind of rule is of no model."})
        if self.kind not in _OF_TENANTS:
            for name in ("project", "api_key"):
                if getattr(self, name) is not None:
                    raise ValidationError({name: "This kind of rule is of the whole site."})
        if self.project and self.api_key and self.api_key.project_id != self.project.pk:
            raise ValidationError({"api_key": "This key is of another project."})


class Alarm(models.Model):
    """A condition that is or was true for one subject, such as a model.

    ``seen_at`` is when it was last true; ``resolved_at`` is null while the alarm fires. Its page
    lists the requests that ``query`` selects, a query string.

    A user acknowledges an alarm that they look after, or snoozes it until a time (``handled_by``).
    It is open if neither holds. A snooze also holds for the same subject if that fires again
    meanwhile, and recipients are not told of that (``is_told``); when it is over, they are told.
    """

    rule = models.ForeignKey(Rule, on_delete=models.CASCADE, related_name="alarms")
    subject = models.CharField(max_length=200)
    text = models.CharField(max_length=400)
    query = models.CharField(max_length=400, blank=True, default="", db_default="")
    started_at = models.DateTimeField(default=timezone.now)
    seen_at = models.DateTimeField(default=timezone.now)
    resolved_at = models.DateTimeField(null=True, blank=True)
    acknowledged_at = models.DateTimeField(null=True, blank=True)
    snoozed_until = models.DateTimeField(null=True, blank=True)
    handled_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True, related_name="+"
    )
    is_told = models.BooleanField(default=True, db_default=True)

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

    @property
    def state(self) -> Literal["firing", "acknowledged", "snoozed", "resolved"]:
        """Whether it fires, and what was done about it."""
        if self.resolved_at is not None:
            return "resolved"
        if self.snoozed_until is not None and self.snoozed_until > timezone.now():
            return "snoozed"
        return "firing" if self.acknowledged_at is None else "acknowledged"

    @property
    def handling(self) -> str:
        """Who handles it, and until when it is snoozed; "" if nobody does."""
        by = f" by {self.handled_by.get_username()}" if self.handled_by else ""
        if self.state == "snoozed" and self.snoozed_until:
            return f"snoozed{by} until {self.snoozed_until:%Y-%m-%d %H:%M} UTC"
        if self.acknowledged_at is not None:
            return f"acknowledged{by}, {self.acknowledged_at:%Y-%m-%d %H:%M} UTC"
        return ""
