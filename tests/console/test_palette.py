"""The search of the command palette: what it finds, and for whom."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from completions.models import StoredCompletion
from inference_site.accounts.models import ApiKey, Project
from inference_site.files.models import FileState, StoredFile
from inference_site.runs.queue import new_id
from responses_api.models import Conversation, StoredResponse
from tests.generations.rows import create_generation

Key = tuple[ApiKey, str]


def found(browser: Client, term: str) -> list[tuple[str, str]]:
    """The title and the address of each line."""
    page = browser.get("/admin/search/", {"s": term})
    assert page.status_code == 200
    lines = re.findall(
        r'href="([^"]+)">.*?<span class="palette-title">(.*?)</span>', page.content.decode()
    )
    return [(unescape(title), unescape(address)) for address, title in lines]


def titles(browser: Client, term: str) -> list[str]:
    return [title for title, _ in found(browser, term)]


def test_without_a_term_a_user_finds_what_they_may_open(staff: Callable[..., Client]) -> None:
    own = ["Usage", "Playground", "API documents"]
    assert titles(staff(), "") == own
    key_maker = staff("accounts.view_apikey", "accounts.add_apikey")
    assert set(titles(key_maker, "")) == {*own, "API keys", "Make an API key"}
    for _, address in found(key_maker, ""):
        assert key_maker.get(address).status_code == 200, address


def test_only_users_with_a_password_find_where_they_change_it(staff: Callable[..., Client]) -> None:
    browser = staff()
    assert titles(browser, "my password") == []
    user = User.objects.get()
    user.set_password("a right password")
    user.save()
    browser.force_login(user)
    assert titles(browser, "my password") == ["Change my password"]


def test_every_line_of_an_administrator_leads_to_a_page(admin: Client) -> None:
    lines = found(admin, "")
    assert len(lines) > 25
    for _, address in lines:
        assert admin.get(address).status_code == 200, address


@pytest.mark.parametrize(
    ("term", "permission"),
    [
        ("demo", "generations.view_generation"),
        ("others & own", "accounts.view_project"),
        ("KEY others", "accounts.view_apikey"),
    ],
)
def test_models_projects_and_keys_are_found_by_words_with_the_permission(
    staff: Callable[..., Client], term: str, permission: str
) -> None:
    project = Project.objects.create(name="Others & own")
    ApiKey.objects.create(project=project, name="the key", prefix="sk-abcdefg")
    assert titles(staff(), term) == []
    browser = staff(permission)
    [_, address] = found(browser, term)[0]
    assert browser.get(address).status_code == 200


def test_a_key_is_found_by_its_prefix_and_said_to_be_revoked(
    staff: Callable[..., Client], other_key: ApiKey
) -> None:
    browser = staff("accounts.view_apikey")
    for term in (other_key.prefix, f"{other_key.prefix}…"):
        assert titles(browser, term) == ["other key"]
    assert "revoked" not in browser.get("/admin/search/", {"s": "other"}).content.decode()
    ApiKey.objects.update(revoked_at=timezone.now())
    assert "revoked" in browser.get("/admin/search/", {"s": "other"}).content.decode()


def _response(key: ApiKey) -> str:
    row = {"project": key.project, "model": "m", "status": "completed"}
    return str(StoredResponse.objects.create(public_id=new_id("resp_"), **row).public_id)


def _conversation(key: ApiKey) -> str:
    return str(
        Conversation.objects.create(public_id=new_id("conv_"), project=key.project).public_id
    )


def _completion(key: ApiKey) -> str:
    row = {"project": key.project, "model": "m", "messages": [], "completion": {}}
    return str(StoredCompletion.objects.create(public_id=new_id("chatcmpl-"), **row).public_id)


def _file(key: ApiKey) -> str:
    row = {"project": key.project, "filename": "a.txt", "purpose": "user_data", "size_bytes": 1}
    made = StoredFile.objects.create(public_id=new_id("file-"), state=FileState.READY, **row)
    return str(made.public_id)


@pytest.mark.parametrize(
    ("make", "permission"),
    [
        (_response, "responses_api.view_storedresponse"),
        (_conversation, "responses_api.view_conversation"),
        (_completion, "completions.view_storedcompletion"),
        (_file, "files.view_storedfile"),
    ],
)
def test_an_id_leads_to_its_page_with_the_permission(
    staff: Callable[..., Client], other_key: ApiKey, make: Callable[[ApiKey], str], permission: str
) -> None:
    id_ = make(other_key)
    assert found(staff(), id_) == []
    browser = staff(permission)
    [(title, address)] = found(browser, id_)
    assert title == id_
    assert browser.get(address).status_code == 200
    assert found(browser, id_[:-1]) == []


def test_an_id_that_is_not_stored_leads_to_its_generation_and_the_request_log(
    staff: Callable[..., Client], api_key: Key
) -> None:
    ran = create_generation(api_key[0], public_id=new_id("resp_"))
    browser = staff("generations.view_generation")
    addresses = [address for _, address in found(browser, f" {ran.public_id} ")]
    page = f"/admin/generations/generation/{ran.pk}/change/"
    assert addresses == [page, f"/admin/requests/?q={ran.public_id}"]
    assert [address for _, address in found(browser, "req_x")] == ["/admin/requests/?q=req_x"]


def test_a_name_is_shown_as_text(admin: Client, other_key: ApiKey) -> None:
    Project.objects.create(name="<script>alert(1)</script>")
    assert "<script>" not in admin.get("/admin/search/", {"s": "script"}).content.decode()
    assert "<script>alert(1)</script>" in titles(admin, "script")


@pytest.mark.parametrize("odd", ["\x01", "9" * 30, "%", "resp_" + "x" * 999, "sk-²"])
def test_an_odd_term_is_no_fault_of_the_server(admin: Client, odd: str) -> None:
    found(admin, odd)
