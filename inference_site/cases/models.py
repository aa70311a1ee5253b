"""CaseSet, Case, CaseRun and CaseResult: stored requests, and what other models answered to them.

A case is a copy of a request and of the answer that it got, so it stays when these are deleted. A
run asks a model all cases of a set, as a batch; a judge then says of each answer whether it is
right.

A run:  running → ended, or running → judging → ended if the judge is a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import models, transaction
from django.db.models import Count, Q
from django.utils import timezone

from inference_site.core.errors.api_errors import ConflictError
from inference_site.core.storage.fields import ContentField, replace_nul

MAX_CASES = 500
"""Cases of one set: its page and a comparison show all of them."""
LONGEST_JUDGEMENT = 10_000


class Judge(models.TextChoices):
    """What says whether an answer is right."""

    NONE = "none", "nothing: only show the answers"
    EXACT = "exact", "the answer is the expected one"
    PATTERN = "pattern", "the answer matches a regular expression"
    SCHEMA = "schema", "the answer is JSON that fits a JSON schema"
    MODEL = "model", "another model, which is told when an answer is right"


class RunState(models.TextChoices):
    """State of a run."""

    RUNNING = "running"  # Its batch has not ended.
    JUDGING = "judging"  # Its batch has ended; the batch of the judging model has not.
    ENDED = "ended"


class Verdict(models.TextChoices):
    """What the judge said of an answer."""

    NONE = "", "not judged"
    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SavedAnswer:
    """A stored request to be saved: ``source`` is the id of what it was answered with."""

    source: str
    body: Mapping[str, Any]
    expected: str


class CaseSet(models.Model):
    """A set of cases of one project, all of them for the same endpoint."""

    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT)
    name = models.CharField(max_length=100)
    endpoint = models.CharField(max_length=64, editable=False)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, editable=False
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        default_permissions = ("view", "change", "delete")
        verbose_name = "set of cases"
        verbose_name_plural = "sets of cases"
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["project", "name"], name="case_set_name_once")
        ]

    def __str__(self) -> str:
        return self.name

    def add(self, answers: Iterable[SavedAnswer]) -> int:
        """Add cases; return how many of them the set did not have.

        Raise ConflictError if it would have more than ``MAX_CASES``.
        """
        with transaction.atomic():
            CaseSet.objects.select_for_update().get(pk=self.pk)  # One number at a time.
            held = set(self.cases.values_list("source", flat=True))
            number = self.cases.aggregate(most=models.Max("number"))["most"] or 0
            added: list[Case] = []
            for one in answers:
                if one.source in held:
                    continue
                held.add(one.source)
                number += 1
                text = str(replace_nul(one.expected))
                given = {"source": one.source, "body": dict(one.body), "expected": text}
                added.append(Case(case_set=self, number=number, **given))
            if len(held) > MAX_CASES:
                raise ConflictError(f"A set has {MAX_CASES} cases at most.")
            Case.objects.bulk_create(added)
        return len(added)


class Case(models.Model):
    """A request, and the answer that is expected: at first the one that the request got.

    The body has none of the fields about the client (``sources.OF_CLIENT``).
    """

    case_set = models.ForeignKey(CaseSet, on_delete=models.CASCADE, related_name="cases")
    number = models.PositiveIntegerField()
    source = models.CharField(max_length=64, db_index=True)
    body = ContentField()
    expected = models.TextField(blank=True)

    class Meta:
        default_permissions = ()  # The page of the set shows them.
        ordering = ["number"]
        constraints = [
            models.UniqueConstraint(fields=["case_set", "number"], name="case_number"),
            models.UniqueConstraint(fields=["case_set", "source"], name="case_source_once"),
        ]

    def __str__(self) -> str:
        return f"case {self.number}"


class CaseRun(models.Model):
    """One model's answers to all cases of a set. ``overrides`` replace fields of the requests.

    ``rule`` is the regular expression, the JSON schema, or the instruction of the judging model.
    """

    case_set = models.ForeignKey(CaseSet, on_delete=models.CASCADE, related_name="runs")
    number = models.PositiveIntegerField()
    model = models.CharField(max_length=200)
    overrides = ContentField(default=dict)
    judge = models.CharField(max_length=8, choices=Judge.choices, default=Judge.NONE)
    rule = models.TextField(blank=True, max_length=LONGEST_JUDGEMENT)
    judge_model = models.CharField(max_length=200, blank=True)
    state = models.CharField(max_length=8, choices=RunState.choices, default=RunState.RUNNING)
    batch = models.ForeignKey(
        "batches.Batch", on_delete=models.SET_NULL, null=True, related_name="+"
    )
    judging = models.ForeignKey(
        "batches.Batch", on_delete=models.SET_NULL, null=True, related_name="+"
    )
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True)
    created_at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        default_permissions = ()
        ordering = ["-number"]
        indexes = [
            models.Index(fields=["state"], condition=~Q(state=RunState.ENDED), name="case_run_open")
        ]
        constraints = [models.UniqueConstraint(fields=["case_set", "number"], name="case_run_once")]

    def __str__(self) -> str:
        return f"run {self.number}"

    def verdicts(self) -> dict[str, int]:
        """Return how many answers have each verdict."""
        rows = self.results.order_by().values_list("verdict")
        return dict(rows.annotate(Count("pk")))


class CaseResult(models.Model):
    """What a run's model answered to a case; ``error_code`` if it did not."""

    run = models.ForeignKey(CaseRun, on_delete=models.CASCADE, related_name="results")
    case = models.ForeignKey(Case, on_delete=models.CASCADE, related_name="results")
    text = models.TextField(blank=True)
    error_code = models.CharField(max_length=64, blank=True)
    input_tokens = models.PositiveIntegerField(null=True)
    output_tokens = models.PositiveIntegerField(null=True)
    duration_ms = models.FloatField(null=True)
    cost = models.DecimalField(max_digits=18, decimal_places=9, default=0)
    verdict = models.CharField(max_length=8, choices=Verdict.choices, blank=True)
    reason = models.TextField(blank=True)

    class Meta:
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["run", "case"], name="case_result_once")]

    def __str__(self) -> str:
        return f"result of {self.case_id} in {self.run_id}"


def forget(
    end_user: str, project_id: int | None, generation_ids: Sequence[str]
) -> Mapping[str, int]:
    """Delete the cases that were saved from these generations, with what models answered them."""
    cases = Case.objects.filter(source__in=generation_ids)
    count = cases.count()
    cases.delete()
    return {"saved cases": count}
