"""Saving the answers of a list as cases."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from inference_site.accounts.models import ApiKey
from inference_site.cases import admin as cases_admin
from inference_site.cases.judging import judged
from inference_site.cases.models import Case, CaseRun, CaseSet, Judge, Verdict
from tests.responses_api.chains import Chain

pytestmark = pytest.mark.django_db
LIST = "/admin/responses_api/storedresponse/"


def test_what_the_list_showed_is_saved_whatever_came_meanwhile(
    admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    shown = [Chain(api_key[0]).turn(f"question {n}", f"answer {n}") for n in range(2)]
    page = admin.get(LIST).content.decode()
    form = {"set": "seen", "shown": re.findall(r'name="shown" value="(\d+)"', page)}
    Chain(api_key[0]).turn("a later question", "a later answer")
    assert admin.post(f"{LIST}cases/", form).status_code == 302
    sources = list(Case.objects.values_list("source", flat=True))
    assert sources == [one.public_id for one in shown]


def test_it_is_said_how_many_of_the_answers_are_new(
    admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    shown = [str(Chain(api_key[0]).turn(f"question {n}", "answer").pk) for n in range(3)]

    def told(*pks: str) -> str:
        form = {"set": "seen", "shown": pks}
        return admin.post(f"{LIST}cases/", form, follow=True).content.decode()

    assert "Saved 1 case." in (first := told(shown[0]))
    assert "already" not in first
    assert "Saved 2 cases. The set had 1 of the answers already." in told(*shown)


def test_a_set_is_not_renamed_to_another_one_of_its_project(
    admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    project = api_key[0].project
    sets = [
        CaseSet.objects.create(project=project, name=name, endpoint="/v1/responses")
        for name in ("first", "second")
    ]
    page = f"/admin/cases/caseset/{sets[1].pk}/change/"
    refused = admin.post(page, {"name": "first"}).content.decode()
    assert "The project has another set of this name." in refused
    assert admin.post(page, {"name": "third"}).status_code == 302
    assert [one.name for one in CaseSet.objects.order_by("pk")] == ["first", "third"]


def test_a_case_that_is_deleted_while_it_is_edited_is_not_there(
    admin: Client, api_key: tuple[ApiKey, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pk = Chain(api_key[0]).turn("question", "answer").pk
    admin.post(f"{LIST}cases/", {"set": "seen", "shown": [pk]})
    case = Case.objects.get()
    monkeypatch.setattr(cases_admin, "replace_nul", lambda text: case.delete() and text)
    page = f"/admin/cases/caseset/{case.case_set_id}/case/"
    assert admin.post(page, {"pk": case.pk, "expected": "another"}).status_code == 404


def test_an_expected_answer_of_lines_is_still_that_of_the_model_when_it_was_edited(
    admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    answer = "Oslo\n\nis the capital."
    pk = Chain(api_key[0]).turn("question", answer).pk
    admin.post(f"{LIST}cases/", {"set": "seen", "shown": [pk]})
    case = Case.objects.get()
    assert case.expected == answer
    sent = {"pk": case.pk, "expected": answer.replace("\n", "\r\n")}  # As a browser sends it.
    admin.post(f"/admin/cases/caseset/{case.case_set_id}/case/", sent)
    case.refresh_from_db()
    assert judged(CaseRun(judge=Judge.EXACT), case, answer)[0] == Verdict.PASSED
