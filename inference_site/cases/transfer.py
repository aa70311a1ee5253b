"""Export and import of sets of cases, their cases, and the runs that have ended.

These have no ids of the API. A set is found again by its name, a case by its source, and a run by
the time at which it began and its model; a number that is taken there gives way to the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from django.db import transaction
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from inference_site.batches.models import Batch
from inference_site.batches.requests import endpoints
from inference_site.cases.models import (
    LONGEST_JUDGEMENT,
    MAX_CASES,
    Case,
    CaseResult,
    CaseRun,
    CaseSet,
    Judge,
    RunState,
    Verdict,
)
from inference_site.core.transfer import Count, Id, Money, ObjectLine, Refused

_BATCH = 100

Name = Annotated[str, Field(min_length=1, max_length=100)]
ModelId = Annotated[str, Field(max_length=200)]


class CaseSetLine(ObjectLine):
    """A set without its cases. The ids of these lines are those of the exporting site's rows."""

    kind: Literal["case_set"] = "case_set"
    name: Name
    endpoint: Annotated[str, Field(max_length=64)]
    created_at: AwareDatetime


class CaseLine(ObjectLine):
    """A case of the set with this name."""

    kind: Literal["case"] = "case"
    case_set: Name
    number: Count
    source: Id
    body: dict[str, Any]
    expected: str


class ResultPart(BaseModel):
    """What a run's model answered to the case with this source."""

    model_config = ConfigDict(extra="forbid")
    source: Id
    text: str
    error_code: Annotated[str, Field(max_length=64)]
    input_tokens: Count | None
    output_tokens: Count | None
    duration_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    cost: Money
    verdict: Verdict
    reason: str


class CaseRunLine(ObjectLine):
    """A run that has ended, with its results. Its batches have their ids of the API."""

    kind: Literal["case_run"] = "case_run"
    case_set: Name
    number: Count
    model: ModelId
    overrides: dict[str, Any]
    judge: Judge
    rule: Annotated[str, Field(max_length=LONGEST_JUDGEMENT)]
    judge_model: ModelId
    batch: Id | None
    judging: Id | None
    created_at: AwareDatetime
    ended_at: AwareDatetime | None
    results: Annotated[list[ResultPart], Field(max_length=MAX_CASES)]


LINES: dict[str, type[ObjectLine]] = {
    "case_set": CaseSetLine,
    "case": CaseLine,
    "case_run": CaseRunLine,
}
_CASE = ("number", "source", "body", "expected")
_RUN = ("model", "overrides", "judge", "rule", "judge_model", "created_at", "ended_at")
_RESULT = tuple(ResultPart.model_fields.keys() - {"source"})


def export_lines(project_id: int, folder: Path) -> Iterator[ObjectLine]:
    """Yield the sets, then their cases and runs; see ``inference_site.core.transfer.Transfer``."""
    del folder
    sets = list(CaseSet.objects.filter(project=project_id).order_by("pk"))
    for one in sets:
        columns = {name: getattr(one, name) for name in ("name", "endpoint", "created_at")}
        yield CaseSetLine(id=f"set_{one.pk}", **columns)
    with transaction.atomic():  # Rows are read in pieces only in a transaction.
        for one in sets:
            for case in one.cases.order_by("number").iterator(_BATCH):
                columns = {name: getattr(case, name) for name in _CASE}
                yield CaseLine(id=f"case_{case.pk}", case_set=one.name, **columns)
    for one in sets:
        ended = one.runs.filter(state=RunState.ENDED).select_related("batch", "judging")
        for run in ended.order_by("number"):
            results = run.results.select_related("case").defer("case__body").order_by("pk")
            yield CaseRunLine(
                id=f"run_{run.pk}",
                case_set=one.name,
                number=run.number,
                batch=run.batch and run.batch.public_id,
                judging=run.judging and run.judging.public_id,
                results=[
                    ResultPart(
                        source=result.case.source,
                        **{name: getattr(result, name) for name in _RESULT},
                    )
                    for result in results
                ],
                **{name: getattr(run, name) for name in _RUN},
            )


@transaction.atomic
def import_lines(project_id: int, kind: str, lines: Sequence[ObjectLine], folder: Path) -> int:
    """Store sets, cases or runs; see ``inference_site.core.transfer.Transfer``."""
    del folder
    if kind == "case_set":
        return sum(_import_set(project_id, line) for line in cast(Sequence[CaseSetLine], lines))
    of_sets = cast("Sequence[CaseLine | CaseRunLine]", lines)
    names = {line.case_set for line in of_sets}
    rows = CaseSet.objects.select_for_update().filter(project=project_id, name__in=names)
    sets = {one.name: one for one in rows.order_by("pk")}
    new = 0
    for name, group in groupby(of_sets, lambda line: line.case_set):
        some = list(group)
        if name not in sets:
            raise Refused(some[0].id, f"the project has no set of cases {name}")
        if kind == "case":
            new += _import_cases(sets[name], cast(list[CaseLine], some))
        else:
            new += _import_runs(sets[name], cast(list[CaseRunLine], some))
    return new


def _import_set(project_id: int, line: CaseSetLine) -> bool:
    if line.endpoint not in endpoints():
        raise Refused(line.id, f"cases of this site have no endpoint {line.endpoint}")
    given = {"endpoint": line.endpoint, "created_at": line.created_at}
    found, is_new = CaseSet.objects.get_or_create(
        project_id=project_id, name=line.name, defaults=given
    )
    if found.endpoint != line.endpoint:
        other = f"the project has a set of cases {line.name} for {found.endpoint}"
        raise Refused(line.id, f"{other}; rename it")
    return is_new


def _import_cases(case_set: CaseSet, lines: Sequence[CaseLine]) -> int:
    held = set(case_set.cases.values_list("source", flat=True))
    numbers = set(case_set.cases.values_list("number", flat=True))
    new = []
    for line in lines:
        if line.source in held:
            continue
        held.add(line.source)
        if len(held) > MAX_CASES:
            raise Refused(line.id, f"a set has {MAX_CASES} cases at most")
        number = _free(line.number, numbers)
        given = {name: getattr(line, name) for name in ("source", "body", "expected")}
        new.append(Case(case_set=case_set, number=number, **given))
    Case.objects.bulk_create(new)
    return len(new)


def _import_runs(case_set: CaseSet, lines: Sequence[CaseRunLine]) -> int:
    held = set(case_set.runs.values_list("created_at", "model"))
    numbers = set(case_set.runs.values_list("number", flat=True))
    cases = dict(case_set.cases.values_list("source", "pk"))
    named = {name for line in lines for name in (line.batch, line.judging) if name}
    found = Batch.objects.filter(project=case_set.project_id, public_id__in=named)
    batches = dict(found.values_list("public_id", "pk"))
    new = 0
    for line in lines:
        if (line.created_at, line.model) in held:
            continue
        held.add((line.created_at, line.model))
        run = CaseRun.objects.create(
            case_set=case_set,
            number=_free(line.number, numbers),
            state=RunState.ENDED,
            batch_id=batches.get(line.batch or ""),
            judging_id=batches.get(line.judging or ""),
            **{name: getattr(line, name) for name in _RUN},
        )
        CaseResult.objects.bulk_create(
            CaseResult(
                run=run,
                case_id=cases[part.source],
                **{name: getattr(part, name) for name in _RESULT},
            )
            for part in line.results
            if part.source in cases  # A case may have been deleted since.
        )
        new += 1
    return new


def _free(number: int, taken: set[int]) -> int:
    """Return the number, or the next one above all that are taken, and take it."""
    free = number if number not in taken else max(taken) + 1
    taken.add(free)
    return free
