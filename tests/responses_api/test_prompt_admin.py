"""The admin of prompt templates: versions, what is tried, and who may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from inference_site.accounts.models import Project
from responses_api.admin.prompts import PromptTemplateAdmin
from responses_api.models import PromptTemplate
from tests.conftest import AtTheSameMoment

pytestmark = pytest.mark.django_db
LIST = "/admin/responses_api/prompttemplate/"
VIEW = "responses_api.view_prompttemplate"
_INLINE = {"versions-TOTAL_FORMS": 0, "versions-INITIAL_FORMS": 0}


@pytest.fixture
def prompt(admin: Client, project: Project) -> PromptTemplate:
    """A prompt that was added."""
    given = {"developer_message": "Be {{tone}}.", "user_message": "Hi {{name}}!", "model": "m"}
    answer = admin.post(
        f"{LIST}add/", {"project": project.pk, "name": "greeting", **given, **_INLINE}
    )
    assert answer.status_code == 302, answer.context["errors"]
    return PromptTemplate.objects.get()


def saved(browser: Client, prompt: PromptTemplate, **changes: Any) -> Any:
    newest = prompt.newest
    assert newest is not None
    names = ("developer_message", "user_message", "model")
    given = {"name": prompt.name, **{name: getattr(newest, name) for name in names}, **changes}
    return browser.post(f"{LIST}{prompt.pk}/change/", {**given, **_INLINE})


def shown_state(browser: Client, prompt: PromptTemplate) -> str:
    page = browser.get(f"{LIST}{prompt.pk}/change/")
    state: str = page.context["shown_states"]["shown"]
    return state


def test_other_messages_make_a_version_and_other_fields_none(
    admin: Client, prompt: PromptTemplate
) -> None:
    assert prompt.public_id.startswith("pmpt_")
    assert saved(admin, prompt, developer_message="Be  {{ tone }}.").status_code == 302
    assert saved(admin, prompt, name="greetings", default_version=1).status_code == 302
    prompt.refresh_from_db()
    assert (prompt.name, prompt.default_version) == ("greetings", 1)
    texts = list(prompt.versions.order_by("number").values_list("number", "developer_message"))
    assert texts == [(1, "Be {{tone}}."), (2, "Be  {{ tone }}.")]
    newest = prompt.newest
    assert newest is not None
    assert newest.created_by is not None
    shown = [entry.change_message for entry in LogEntry.objects.order_by("pk")][1:]
    assert shown[0] == "Developer message: Be {{tone}}. → Be  {{ tone }}."
    assert shown[1] == "Name: greeting → greetings; Default version: empty → 1"


def test_lines_end_as_they_do_in_requests_and_a_page_that_is_saved_unchanged_makes_no_version(
    admin: Client, prompt: PromptTemplate
) -> None:
    for _ in range(2):
        assert saved(admin, prompt, user_message="Hi\r\n\r\n{{name}}!").status_code == 302
        newest = prompt.newest
        assert newest is not None
        assert (newest.number, newest.user_message) == (2, "Hi\n\n{{name}}!")


def test_white_space_around_a_message_is_kept_and_is_no_message_by_itself(
    admin: Client, prompt: PromptTemplate
) -> None:
    text = "\n\n  Be {{tone}}.\n"
    assert saved(admin, prompt, developer_message=text).status_code == 302
    newest = prompt.newest
    assert newest is not None
    assert newest.developer_message == text
    page = admin.get(f"{LIST}{prompt.pk}/change/").content.decode()
    assert f">\n{text}</textarea>" in page  # A browser drops the first line break.
    refused = saved(admin, prompt, developer_message=" \n", user_message=" ")
    assert "Write a developer message or a user message." in refused.content.decode()


def test_no_id_is_shown_of_a_prompt_that_is_not_saved(
    admin: Client, prompt: PromptTemplate
) -> None:
    assert "pmpt_" not in admin.get(f"{LIST}add/").content.decode()
    assert prompt.public_id in admin.get(f"{LIST}{prompt.pk}/change/").content.decode()


def test_a_name_that_another_prompt_of_the_project_has_is_refused(
    admin: Client, prompt: PromptTemplate
) -> None:
    other = PromptTemplate.objects.create(project=prompt.project, name="farewell")
    answer = saved(admin, prompt, name=other.name)
    assert answer.context["errors"] == [["The project has another prompt of this name."]]
    PromptTemplate.objects.filter(pk=other.pk).update(project=Project.objects.create(name="else"))
    assert saved(admin, prompt, name=other.name).status_code == 302


@pytest.mark.django_db(transaction=True)
def test_of_two_versions_saved_at_the_same_moment_one_is_refused(
    admin: Client,
    prompt: PromptTemplate,
    at_the_same_moment: AtTheSameMoment,
) -> None:
    at_the_same_moment(
        PromptTemplateAdmin, lambda: prompt.versions.create(number=2, user_message="Bye!")
    )
    answer = saved(admin, prompt, shown=shown_state(admin, prompt), user_message="Hi!")
    assert "This was changed meanwhile." in answer.content.decode()
    assert [one.user_message for one in prompt.versions.all()] == ["Bye!", "Hi {{name}}!"]


@pytest.mark.django_db(transaction=True)
def test_a_prompt_that_is_deleted_at_the_same_moment_stays_deleted(
    admin: Client,
    prompt: PromptTemplate,
    at_the_same_moment: AtTheSameMoment,
) -> None:
    at_the_same_moment(PromptTemplateAdmin, PromptTemplate.objects.filter(pk=prompt.pk).delete)
    answer = saved(admin, prompt, shown=shown_state(admin, prompt), user_message="Hi!")
    assert answer["Location"] == "/admin/"  # With the message that it is not there.
    assert not PromptTemplate.objects.exists()


def test_messages_that_another_user_saved_meanwhile_are_not_replaced_unseen(
    admin: Client, prompt: PromptTemplate
) -> None:
    shown = shown_state(admin, prompt)
    assert saved(admin, prompt, shown=shown, user_message="Bye!").status_code == 302
    answer = saved(admin, prompt, shown=shown, developer_message="Be kind.", user_message="Hi!")
    assert "This was changed meanwhile by admin at " in answer.content.decode()
    newest = prompt.newest
    assert newest is not None
    assert (newest.number, newest.user_message) == (2, "Bye!")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"developer_message": "", "user_message": " "}, "Write a developer message"),
        ({"default_version": 7}, "There is no version 7."),
        ({"user_message": "x" * 50_001}, "at most 50000 characters"),
    ],
)
def test_prompt_that_makes_no_sense_is_not_saved(
    admin: Client, prompt: PromptTemplate, changes: dict[str, Any], told: str
) -> None:
    answer = saved(admin, prompt, **changes)
    assert told in answer.content.decode()
    assert prompt.versions.count() == 1


def test_newest_version_is_tried_in_the_playground_with_values(
    admin: Client, prompt: PromptTemplate, staff: Callable[..., Client]
) -> None:
    page = admin.get(f"{LIST}{prompt.pk}/change/").content.decode()
    assert 'name="variable.tone"' in page
    assert 'name="variable.name"' in page
    values = {"variable.tone": "{{name}} & ü", "variable.name": "Ann"}
    answer = admin.post(f"{LIST}{prompt.pk}/try/", values)
    opened = parse_qs(urlsplit(answer["Location"]).query)["open"][0]
    found = admin.get(f"/admin/playground/open/{opened}").json()
    assert found["request"] == {"model": "m", "instructions": "Be {{name}} & ü."}
    assert found["draft"] == "Hi Ann!"
    assert staff("accounts.view_project").get(f"/admin/playground/open/{opened}").status_code == 403
    back = admin.post(f"{LIST}{prompt.pk}/try/", {"variable.tone": "kind"}, follow=True)
    assert "prompt.variables.name" in back.content.decode()
    long = {"variable.tone": "長" * 1000, "variable.name": "長" * 1000}
    back = admin.post(f"{LIST}{prompt.pk}/try/", long, follow=True)
    assert "The values are too long to be tried here." in back.content.decode()


@pytest.mark.parametrize(
    "opened", ["", ".", ".x", ".e30", ".bnVsbA", ".W10", ".eyJ2ZXJzaW9uIjoxfQ"]
)
def test_playground_opens_no_prompt_by_what_is_no_id(
    admin: Client, prompt: PromptTemplate, opened: str
) -> None:
    answer = admin.get(f"/admin/playground/open/{prompt.public_id}{opened}")
    assert answer.status_code == 404


def test_viewer_may_try_and_not_write(prompt: PromptTemplate, staff: Callable[..., Client]) -> None:
    viewer = staff(VIEW)
    assert viewer.get(f"{LIST}{prompt.pk}/change/").status_code == 200
    assert saved(viewer, prompt, name="mine").status_code == 403
    assert viewer.post(f"{LIST}{prompt.pk}/try/").status_code == 302
    assert staff("accounts.view_project").post(f"{LIST}{prompt.pk}/try/").status_code == 403
