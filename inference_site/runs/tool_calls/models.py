"""ToolCall and SavedTurns: what is needed so that no call of a site-run tool is made twice.

planned → sent → done

A call is ``planned`` in the transaction that saves the turn of the model that made it. It becomes
``sent``, committed, before anything leaves the worker, and ``done`` with its result. If the worker
dies between the last two, the next attempt repeats the call, with the same key, if the tool is
declared idempotent; otherwise the call is ``unknown`` for ever. Each change is an UPDATE that is
guarded by the old status and by the claim of the generation, so of two workers only one sends.

The rows have no content after the response has ended: its items have that. They are deleted with
their generation (``runs.usage.pruning``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from decimal import Decimal
from typing import Any

from django.db import models
from django.db.models import Exists, F, Q, Sum
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.crypto import salted_hmac

from inference_site.core.domain.deltas import Usage
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult
from inference_site.core.storage.fields import ContentField
from inference_site.core.storage.postgresql import transaction_with_timeouts
from inference_site.runs.models import Claim, Generation


class CallStatus(models.TextChoices):
    """A call moves forward only: planned → sent → done or unknown."""

    PLANNED = "planned"  # The model has made it. Nothing has left the worker.
    SENT = "sent"  # It has left, or is about to.
    DONE = "done"  # Its result is there, or it could not be sent.
    UNKNOWN = "unknown"  # It was sent, and nobody knows whether it had an effect.


class ToolCallQuerySet(models.QuerySet["ToolCall"]):
    """The status changes of calls."""

    def of(self, generation_id: str) -> ToolCallQuerySet:
        """Return the calls of a generation, in order."""
        return self.filter(generation_id=generation_id).order_by("number")

    def plan(
        self,
        claim: Claim,
        calls: Sequence[SiteCall],
        types: Sequence[str],
        state: Mapping[str, Any],
        usage: Usage,
    ) -> dict[int, ToolCall] | None:
        """Save a turn and its calls; return the rows of the calls by number.

        Calls that an earlier attempt has planned stay as they are. ``state`` is that of the
        assembler, empty if it must not be stored. Return None if the claim no longer holds.
        """
        rows = [
            ToolCall(
                generation_id=claim.public_id,
                number=call.number,
                type=types[call.tool],
                name=call.name[:256],
                arguments_hash=hash_of(call.arguments),
            )
            for call in calls
        ]
        with transaction_with_timeouts():
            held = Generation.objects.running_attempt(claim.public_id, claim.worker, claim.attempt)
            if not held.select_for_update(no_key=True).exists():
                return None
            self.bulk_create(rows, ignore_conflicts=True)
            SavedTurns.objects.update_or_create(
                generation_id=claim.public_id,
                defaults={"state": dict(state), "usage": asdict(usage)},
            )
            numbers = [call.number for call in calls]
            found = self.of(claim.public_id).filter(number__in=numbers)
            return {row.number: row for row in found}

    def send(self, claim: Claim, call: ToolCall, arguments_hash: str, price: Decimal) -> bool:
        """Record that a call leaves now; False if another attempt has the generation or the call.

        ``call`` is the row as it was read; its attempt is raised by one. The arguments of a
        judgement are another text if the answer was generated again.
        """
        row = self.filter(pk=call.pk, status=call.status, attempt=call.attempt)
        held = Generation.objects.running_attempt(claim.public_id, claim.worker, claim.attempt)
        is_sent = bool(
            row.filter(Exists(held)).update(
                status=CallStatus.SENT,
                attempt=F("attempt") + 1,
                sent_at=Now(),
                arguments_hash=arguments_hash,
                cost=F("cost") + price,
            )
        )
        if is_sent:
            call.status, call.attempt = CallStatus.SENT, call.attempt + 1
        return is_sent

    def finish(self, call: ToolCall, result: ToolResult, *, is_unknown: bool, keeps: bool) -> bool:
        """Record the result of an attempt of a call; False if a later attempt has the call.

        ``keeps``: store the content, for a restart. It is not stored once the response has ended.
        """
        runs = Generation.objects.filter(public_id=call.generation_id, finished_at=None)
        row = self.filter(pk=call.pk, attempt=call.attempt).exclude(status=CallStatus.DONE)
        status = CallStatus.UNKNOWN if is_unknown else CallStatus.DONE
        changes = {
            "status": status,
            "is_error": result.is_error,
            "output_bytes": len(result.output.encode("utf-8", "replace")),
            "finished_at": Now(),
        }
        with transaction_with_timeouts():
            if not row.update(**changes):
                return False
            if keeps and runs.exists():
                self.filter(pk=call.pk).update(result=asdict(result))
            return True


class ToolCall(models.Model):
    """One call of a site-run tool by one generation; ``number`` counts those of the generation.

    ``arguments_hash`` is keyed, so that short arguments cannot be guessed from it. ``attempt``
    counts how often the call has left a worker. ``result`` has the fields of ``ToolResult``.
    """

    generation_id = models.CharField("generation", max_length=64)
    number = models.PositiveIntegerField()
    type = models.CharField(max_length=32)
    name = models.CharField(max_length=256)
    arguments_hash = models.CharField(max_length=64)
    status = models.CharField(max_length=16, choices=CallStatus.choices, default=CallStatus.PLANNED)
    attempt = models.PositiveSmallIntegerField(default=0)
    # Of all attempts. With a default in the database, for workers of the release before.
    cost = models.DecimalField(max_digits=18, decimal_places=9, default=0, db_default=0)
    is_error = models.BooleanField(default=False)
    output_bytes = models.PositiveIntegerField(default=0)
    result = ContentField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now)
    sent_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    objects = ToolCallQuerySet.as_manager()

    class Meta:
        default_permissions = ()  # The page of the response shows them.
        constraints = [
            models.UniqueConstraint(fields=["generation_id", "number"], name="tool_call_number"),
            models.CheckConstraint(
                condition=Q(status__in=CallStatus.values), name="tool_call_status_known"
            ),
        ]

    def __str__(self) -> str:
        return self.key

    @property
    def key(self) -> str:
        """The idempotency key of the call, for the tool."""
        return f"{self.generation_id}-{self.number}"

    @property
    def stored_result(self) -> ToolResult | None:
        """The result, while it is stored."""
        if self.result is None:
            return None
        sources = [Source(**source) for source in self.result["sources"]]
        return ToolResult(**{**self.result, "sources": sources})

    @property
    def duration_ms(self) -> float | None:
        """Milliseconds from the last sending to the result."""
        if self.sent_at is None or self.finished_at is None:
            return None
        return (self.finished_at - self.sent_at).total_seconds() * 1000


class SavedTurns(models.Model):
    """What a generation has after its last turn, while its calls or a later turn run.

    ``state`` is that of the assembler, empty in the foreground, where no other attempt continues.
    ``usage`` has the fields of ``Usage`` of the turns so far, which count if the worker dies.
    """

    generation_id = models.CharField("generation", max_length=64, unique=True)
    state = ContentField()
    usage = models.JSONField()
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.generation_id

    @property
    def usage_so_far(self) -> Usage:
        """The usage of the turns; another release may have stored other counts."""
        known = {f.name: self.usage[f.name] for f in fields(Usage) if f.name in self.usage}
        return Usage(**known)


def usage_of_saved_turns(generation_id: str) -> Usage:
    """Return the usage of the turns that are saved of a generation; nothing if none are."""
    saved = SavedTurns.objects.filter(generation_id=generation_id).first()
    return Usage() if saved is None else saved.usage_so_far


def close(generation_id: str) -> Decimal:
    """Remove the content of the calls of a generation that ends; sent ones become unknown.

    Return what the calls have cost, which is added to the cost of the generation. The caller's
    transaction ends the generation.
    """
    rows = ToolCall.objects.filter(generation_id=generation_id)
    rows.filter(status=CallStatus.SENT).update(status=CallStatus.UNKNOWN)
    rows.filter(result__isnull=False).update(result=None)
    SavedTurns.objects.filter(generation_id=generation_id).delete()
    cost: Decimal = rows.aggregate(sum=Sum("cost", default=Decimal(0)))["sum"]
    if cost:
        Generation.objects.filter(public_id=generation_id).update(cost=F("cost") + cost)
    return cost


def hash_of(arguments: str) -> str:
    """Return the keyed hash of the arguments of a call."""
    return salted_hmac("tool call", arguments, algorithm="sha256").hexdigest()
