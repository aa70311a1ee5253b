"""Roll-ups: sums of the usage log by minute, hour and day. Reports read only these tables."""

from __future__ import annotations

from django.db import models

from inference_site.accounts.models import ApiKey, Project


class Period(models.TextChoices):
    """The length of time that a roll-up row covers; periods begin at UTC boundaries."""

    MINUTE = "minute", "minute"  # Kept for two days.
    HOUR = "hour", "hour"  # Kept for thirteen months.
    DAY = "day", "day"  # Kept forever.


class Rollup(models.Model):
    """The usage of one model by one key in one period.

    A generation counts in the period in which it ended.
    """

    period = models.CharField(max_length=8, choices=Period.choices)
    start = models.DateTimeField()
    project = models.ForeignKey(
        Project, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    api_key = models.ForeignKey(
        ApiKey, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    model = models.CharField(max_length=200)

    class Meta:
        abstract = True


class UsageRollup(Rollup):
    """Sums of requests by final status, of tokens, of milliseconds and of cost."""

    requests = models.PositiveBigIntegerField(default=0)
    completed = models.PositiveBigIntegerField(default=0)
    failed = models.PositiveBigIntegerField(default=0)
    cancelled = models.PositiveBigIntegerField(default=0)
    input_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    reasoning_tokens = models.PositiveBigIntegerField(default=0)
    queue_ms = models.FloatField(default=0)
    prefill_ms = models.FloatField(default=0)
    decode_ms = models.FloatField(default=0)
    cost = models.DecimalField(max_digits=24, decimal_places=9, default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["period", "start", "project", "api_key", "model"], name="usage_rollup_once"
            ),
        ]
        indexes = [
            models.Index(fields=["project", "period", "start"], name="usage_rollup_by_project"),
        ]

    def __str__(self) -> str:
        return f"{self.period} of {self.start}"


class Measure(models.TextChoices):
    """What a histogram measures."""

    QUEUE = "queue", "queue wait (ms)"
    TTFT = "ttft", "time to first token (ms)"
    SPEED = "speed", "tokens per second"


class LatencyHistogram(Rollup):
    """One bucket of a histogram: how many generations had a measure in this range.

    Sums over all keys of a project have their own rows, with ``EVERY`` as the key, and so do sums
    over all projects. Without them a report of a week would add up a million rows.
    """

    EVERY = 0
    """Means all keys, or all projects; no key and no project has this primary key."""

    measure = models.CharField(max_length=8, choices=Measure.choices)
    # inference_site.runs.usage.histograms defines the bounds of buckets.
    bucket = models.SmallIntegerField()
    count = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [
            # The key and the project come first: a report reads one range of this index.
            models.UniqueConstraint(
                fields=["period", "api_key", "project", "start", "model", "measure", "bucket"],
                name="latency_histogram_once",
            ),
        ]
        indexes = [
            models.Index(fields=["period", "start"], name="latency_histogram_by_age"),
        ]

    def __str__(self) -> str:
        return f"{self.measure} {self.bucket} of {self.start}"


class LatencyRollup(Rollup):
    """Histograms as processes of the previous release write them; accounting moves the rows.

    To be dropped in the next release.
    """

    measure = models.CharField(max_length=8, choices=Measure.choices)
    bucket = models.SmallIntegerField()
    count = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["period", "start", "project", "api_key", "model", "measure", "bucket"],
                name="latency_rollup_once",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.measure} {self.bucket} of {self.start}"
