"""Running: a set's cases become a batch, and the results of the batch those of the run.

So cases run as background work under the limits and the budget of a key, and survive the death of
any process. Beat collects the results; a second process that does so at the same time waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import orjson
from django.db import transaction
from django.db.models import Max, Q
from django.utils import timezone

from inference_site.accounts.keys import Caller, caller_of_key
from inference_site.batches.models import ENDED, OPENAI, Batch, BatchStatus
from inference_site.batches.requests import check_request, endpoints, new_line
from inference_site.batches.results import texts_of
from inference_site.batches.views import accept_batch
from inference_site.cases.judging import judged, judging_request, read_reply, text_of
from inference_site.cases.models import (
    CaseResult,
    CaseRun,
    CaseSet,
    Judge,
    RunState,
    Verdict,
)
from inference_site.core.errors.api_errors import ApiError, InvalidRequestError, NotFoundError
from inference_site.core.storage.fields import replace_nul
from inference_site.files.models import StoredFile
from inference_site.runs.maintenance import try_and_log
from inference_site.runs.models import Generation
from inference_site.runs.queue import new_id

_CHAT = "/v1/chat/completions"
_WINDOW = timedelta(days=7)
_RESULTS_KEPT = timedelta(days=1)
"""How long the files of the batches are kept: the results are in the run then."""
_NO_ANSWER = "no_answer"


def begin(run: CaseRun, caller: Caller) -> None:
    """Save a new run and its batch, for the caller. Raise ApiError if the cases cannot be run."""
    cases = list(run.case_set.cases.all())
    if not cases:
        raise InvalidRequestError("The set has no cases.")
    bodies = [(case.pk, {**case.body, **run.overrides, "model": run.model}) for case in cases]
    check_request(endpoints()[run.case_set.endpoint], caller, bodies[0][1])
    if run.judge == Judge.MODEL:
        asked = judging_request(run, cases[0], "")
        check_request(endpoints()[_CHAT], caller, asked)
    with transaction.atomic():
        CaseSet.objects.select_for_update().get(pk=run.case_set_id)  # One number at a time.
        run.number = 1 + (run.case_set.runs.aggregate(most=Max("number"))["most"] or 0)
        run.batch = _batch(run, caller, run.case_set.endpoint, run.model, dict(bodies))
        run.save(force_insert=True)


def _batch(
    run: CaseRun, caller: Caller, endpoint: str, model: str, bodies: Mapping[int, Mapping[str, Any]]
) -> Batch:
    """Store a batch, which begins at once; the ids of its lines are those of the cases."""
    batch = Batch(
        public_id=new_id("batch_"),
        dialect=OPENAI,
        endpoint=endpoint,
        model=model,
        window_s=int(_WINDOW.total_seconds()),
        output_lifetime_s=int(_RESULTS_KEPT.total_seconds()),
        status=BatchStatus.IN_PROGRESS,
        times={BatchStatus.IN_PROGRESS.value: int(time.time())},
        total=len(bodies),
        metadata={"set_of_cases": run.case_set.name},
    )
    lines = [
        new_line(batch, caller.project_id, number, str(case_id), body)
        for number, (case_id, body) in enumerate(bodies.items(), 1)
    ]
    return accept_batch(caller, batch, lines)


def collect() -> None:
    """Take the results of the runs whose batch has ended."""
    ended = CaseRun.objects.exclude(state=RunState.ENDED).filter(
        Q(state=RunState.RUNNING) & (Q(batch=None) | Q(batch__status__in=ENDED))
        | Q(state=RunState.JUDGING) & (Q(judging=None) | Q(judging__status__in=ENDED))
    )
    for pk in ended.values_list("pk", flat=True):
        try_and_log(f"run of cases {pk}", partial(_collect, pk))


def _collect(pk: int) -> None:
    with transaction.atomic():
        rows = CaseRun.objects.select_for_update(of=("self",), skip_locked=True)
        run = rows.select_related("case_set").filter(pk=pk).first()
        if run is not None and run.state == RunState.RUNNING:
            _take_answers(run)
        elif run is not None and run.state == RunState.JUDGING:
            _take_verdicts(run)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the results of a batch: an answer, or the code of an error."""

    case_id: int
    generation_id: str
    body: dict[str, Any] | None
    error_code: str


def _take_answers(run: CaseRun) -> None:
    """Save what the model answered. A case without a line has no answer.

    Cases that were saved after the run had begun are left out: they are newer than its lines.
    """
    lines = {line.case_id: line for line in _lines(run.batch)}
    ids = [line.generation_id for line in lines.values()]
    rows = {row.public_id: row for row in Generation.objects.filter(public_id__in=ids)}
    cases = run.case_set.cases.filter(pk__lte=max(lines)) if lines else run.case_set.cases.all()
    results = []
    for case in cases:
        line = lines.get(case.pk)
        if line is None or line.body is None:
            code = _NO_ANSWER if line is None else line.error_code
            results.append(CaseResult(run=run, case=case, error_code=code[:64]))
            continue
        text = str(replace_nul(text_of(line.body)))
        verdict, reason = judged(run, case, text)
        result = CaseResult(run=run, case=case, text=text, verdict=verdict, reason=reason)
        if row := rows.get(line.generation_id):
            result.input_tokens, result.output_tokens = row.input_tokens, row.output_tokens
            result.cost = row.cost
            if row.claimed_at and row.finished_at:
                result.duration_ms = (row.finished_at - row.claimed_at).total_seconds() * 1000
        results.append(result)
    CaseResult.objects.bulk_create(results)
    run.state, run.ended_at = RunState.ENDED, timezone.now()
    answered = [result for result in results if not result.error_code]
    if run.judge == Judge.MODEL and answered:
        _ask_judge(run, answered)
    run.save()


def _ask_judge(run: CaseRun, results: list[CaseResult]) -> None:
    """Have a batch judge the answers, for the key of the run."""
    caller = None if run.batch is None else caller_of_key(run.batch.api_key_id)
    try:
        if caller is None:
            raise InvalidRequestError("The key of the run is not valid any more.")
        bodies = {one.case_id: judging_request(run, one.case, one.text) for one in results}
        run.judging = _batch(run, caller, _CHAT, run.judge_model, bodies)
    except ApiError as exc:
        for one in results:
            one.reason = f"Not judged: {exc.message}"
        CaseResult.objects.bulk_update(results, ["reason"])
    else:
        run.state, run.ended_at = RunState.JUDGING, None


def _take_verdicts(run: CaseRun) -> None:
    lines = {line.case_id: line for line in _lines(run.judging)}
    results = list(run.results.filter(error_code=""))
    for result in results:
        line = lines.get(result.case_id)
        if line is None or line.body is None:
            code = _NO_ANSWER if line is None else line.error_code
            result.verdict, result.reason = Verdict.NONE, f"The judging model failed: {code}."
        else:
            result.verdict, result.reason = read_reply(str(replace_nul(text_of(line.body))))
    CaseResult.objects.bulk_update(results, ["verdict", "reason"])
    run.state, run.ended_at = RunState.ENDED, timezone.now()
    run.save()


def _lines(batch: Batch | None) -> Iterator[_Line]:
    """Yield the results of a batch that has ended; none if it was deleted, or its files were."""
    if batch is None:
        return
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        try:
            file = StoredFile.objects.get_readable(batch.project_id, file_id)
        except NotFoundError:
            continue
        for text in texts_of(file):
            entry = orjson.loads(text)
            answer, error = entry["response"] or {}, entry["error"] or {}
            body = answer.get("body")
            is_answer = answer.get("status_code", 500) < 400
            if not is_answer and body:
                error = body.get("error") or {}
            yield _Line(
                int(entry["custom_id"]),
                answer.get("request_id", ""),
                body if is_answer else None,
                str(error.get("code") or error.get("type") or _NO_ANSWER),
            )
