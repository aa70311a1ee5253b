"""Rules, and the alarms that they raise."""

from __future__ import annotations

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
