"""What a run takes from the results of its batch."""

from __future__ import annotations

import datetime as dt

import orjson
import pytest
import redis.exceptions
from django.test import Client
from django.utils import timezone

from inference_site.accounts.models import ApiKey
from inference_site.batches.feeding import Feeder
from inference_site.batches.models import Batch, BatchLine, BatchStatus, LineState
from inference_site.cases import admin as cases_admin
from inference_site.cases.models import CaseRun, CaseSet, Judge, SavedAnswer
from inference_site.cases.running import collect
from inference_site.catalogue.catalogue import Catalogue
from inference_site.core.domain.model_spec import ModelSpec

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("folder")]


def answered_run(key: ApiKey, case_set: CaseSet) -> CaseRun:
    """A run of all cases that the set has now, whose lines have ended with the right answers."""
    batch = Batch.objects.create(
        public_id="batch_1",
        project_id=key.project_id,
        api_key=key,
        endpoint="/v1/chat/completions",
        window_s=60,
        expires_at=timezone.now() + dt.timedelta(hours=1),
        status=BatchStatus.FINALIZING,
        total=case_set.cases.count(),
    )
    for case in case_set.cases.all():
        body = {"choices": [{"message": {"content": case.expected}}]}
        BatchLine.objects.create(
            batch=batch,
            number=case.number,
            custom_id=str(case.pk),
            request="",
            state=LineState.ENDED,
            status_code=200,
            answer=orjson.dumps(body).decode(),
        )
    return CaseRun.objects.create(
        case_set=case_set, number=1, model="m", judge=Judge.EXACT, batch=batch
    )


def test_a_case_that_was_saved_while_the_set_ran_is_not_one_of_the_run(
    api_key: tuple[ApiKey, str],
) -> None:
    """It was shown as a case without an answer, as if the model had failed."""
    case_set = CaseSet.objects.create(
        project=api_key[0].project, name="a", endpoint="/v1/chat/completions"
    )
    case_set.add([SavedAnswer("chatcmpl-1", {}, "one"), SavedAnswer("chatcmpl-2", {}, "two")])
    run = answered_run(api_key[0], case_set)
    case_set.add([SavedAnswer("chatcmpl-3", {}, "three")])
    Feeder().prepare()
    collect()
    results = run.results.order_by("case").values_list("case__source", "verdict", "error_code")
    assert list(results) == [("chatcmpl-1", "passed", ""), ("chatcmpl-2", "passed", "")]


def test_without_redis_the_form_of_a_run_says_so(
    admin: Client, api_key: tuple[ApiKey, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a page with the status 500."""

    def begin(*_: object) -> None:
        raise redis.exceptions.TimeoutError("Timeout reading from socket")

    monkeypatch.setattr(cases_admin, "begin", begin)
    monkeypatch.setattr(Catalogue, "listed", lambda *_: [ModelSpec("m", "scripted")])
    case_set = CaseSet.objects.create(
        project=api_key[0].project, name="a", endpoint="/v1/chat/completions"
    )
    form = {"model": "m", "key": api_key[0].pk, "judge": "none"}
    page = admin.post(f"/admin/cases/caseset/{case_set.pk}/run/", form)
    assert page.status_code == 200
    assert page.context["run_form"].errors == {"__all__": ["The queue is not reachable."]}
    case_set.add([SavedAnswer("chatcmpl-1", {}, "one")])
    text = admin.post(f"/admin/cases/caseset/{case_set.pk}/run/").content.decode()
    assert 'aria-describedby="id_model_error"' in text
    assert 'id="id_model_error"' in text
