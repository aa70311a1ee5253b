"""Sets of cases: what they hold once, how much, and what an end user may have forgotten."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from completions.models import StoredCompletion
from inference_site.accounts.models import ApiKey
from inference_site.cases import models
from inference_site.cases.models import Case, CaseResult, CaseRun, CaseSet, SavedAnswer, forget
from inference_site.core.errors.api_errors import ConflictError
from responses_api.models import StoredResponse

pytestmark = pytest.mark.django_db


@pytest.fixture
def case_set(api_key: tuple[ApiKey, str]) -> CaseSet:
    project = api_key[0].project
    return CaseSet.objects.create(project=project, name="a", endpoint="/v1/responses")


def answers(*sources: str) -> list[SavedAnswer]:
    return [SavedAnswer(source, {"input": source}, source.upper()) for source in sources]


def test_an_answer_is_in_a_set_once(case_set: CaseSet) -> None:
    assert case_set.add(answers("resp_a", "resp_b", "resp_a")) == 2
    assert case_set.add(answers("resp_b", "resp_c")) == 1
    assert list(case_set.cases.values_list("number", "source", "expected")) == [
        (1, "resp_a", "RESP_A"),
        (2, "resp_b", "RESP_B"),
        (3, "resp_c", "RESP_C"),
    ]


def test_a_set_has_a_limit_and_keeps_what_it_had(
    case_set: CaseSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MAX_CASES", 2)
    case_set.add(answers("resp_a"))
    with pytest.raises(ConflictError, match="2 cases at most"):
        case_set.add(answers("resp_b", "resp_c"))
    assert case_set.cases.count() == 1


def test_numbers_are_not_given_twice(case_set: CaseSet) -> None:
    case_set.add(answers("resp_a", "resp_b"))
    case_set.cases.filter(number=1).delete()
    case_set.add(answers("resp_c"))
    assert list(case_set.cases.values_list("number", flat=True)) == [2, 3]


def test_nul_in_an_answer_can_be_stored(case_set: CaseSet) -> None:
    assert case_set.add([SavedAnswer("resp_a", {"input": "a\0"}, "b\0")]) == 1


def test_nul_in_the_other_settings_of_a_run_can_be_stored(case_set: CaseSet) -> None:
    given = {"metadata": {"a": "b\0"}}
    run = CaseRun.objects.create(case_set=case_set, number=1, model="m", overrides=given)
    run.refresh_from_db()
    assert run.overrides == {"metadata": {"a": "b\ufffd"}}


def test_what_is_forgotten_takes_its_results_along(case_set: CaseSet) -> None:
    case_set.add(answers("resp_a", "resp_b"))
    run = CaseRun.objects.create(case_set=case_set, number=1, model="demo")
    for case in case_set.cases.all():
        CaseResult.objects.create(run=run, case=case, text="x")
    assert forget("mary", None, ["resp_a"]) == {"saved cases": 1}
    assert [case.source for case in Case.objects.all()] == ["resp_b"]
    assert run.results.count() == 1
    assert forget("mary", None, ["resp_a"]) == {"saved cases": 0}


@pytest.mark.parametrize(
    ("source", "model"), [("chatcmpl-1", StoredCompletion), ("resp_1", StoredResponse)]
)
def test_a_case_goes_with_the_user_whom_the_metadata_of_its_source_name(
    case_set: CaseSet, source: str, model: type[StoredCompletion | StoredResponse]
) -> None:
    given: dict[str, Any] = {"public_id": source, "project": case_set.project, "model": "m"}
    if model is StoredCompletion:
        given |= {"messages": [], "completion": {"choices": []}}
    else:
        given |= {"status": "completed", "request": {"model": "m"}}
    model.objects.create(metadata={"user_id": "mary"}, **given)
    case_set.add(answers(source, "other"))
    call_command("forget", "--user", "mary", stdout=StringIO())
    assert [case.source for case in Case.objects.all()] == ["other"]
