"""Messages about calls that wait for an approval: their receivers and their contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from django.test import Client
from django.urls import reverse

from inference_site.accounts.models import Project
from inference_site.core.site_settings.models import SiteSettings, forget
from inference_site.outbox.delivery import deliver_to, due_endpoints, mail_of
from inference_site.outbox.models import (
    APPROVAL_EVENT,
    Endpoint,
    Message,
    new_secret,
    site_endpoints,
)
from responses_api.deletion import forget as forget_user
from responses_api.mcp_approvals import PAGE, publish_questions
from responses_api.models import StoredResponse
from responses_api.wire.objects import McpApprovalRequest
from tests.notice_receivers import receiver

pytestmark = pytest.mark.django_db

Staff = Callable[..., Client]
LONG = "y" * 5_000
HOSTILE = "add\r\nBcc: all@example.org"


@pytest.fixture
def asked(project: Project) -> Callable[..., None]:
    """Publishes the questions of a response."""

    def publish(*questions: McpApprovalRequest) -> None:
        publish_questions(
            questions,
            project_id=project.pk,
            response_pk=7,
            response_id="resp_1",
            tools=[{"type": "mcp", "server_label": "files"}],
        )

    return publish


@pytest.fixture
def changed_settings() -> Iterator[None]:
    """The settings of the site are read again afterwards."""
    yield
    forget()


def question(name: str = "write", arguments: str = "{}") -> McpApprovalRequest:
    return McpApprovalRequest(id="mcpr_1", server_label="files", name=name, arguments=arguments)


def endpoint(address: str, **fields: Any) -> Endpoint:
    given = {"way": "email", "event_types": [APPROVAL_EVENT], **fields}
    return Endpoint.objects.create(address=address, **given)


def told(of: Endpoint) -> dict[str, Any]:
    """The data of the message to an endpoint."""
    data: dict[str, Any] = orjson.loads(Message.objects.get(endpoint=of).body)["data"]
    return data


def test_the_page_is_that_of_the_console() -> None:
    assert PAGE.format(pk=7) == (
        f"{reverse('admin:responses_api_storedresponse_change', args=[7])}#approvals"
    )


def test_endpoints_of_alarms_are_not_told_and_those_of_approvals_not_of_alarms(
    asked: Callable[..., None],
) -> None:
    alarms, approvals = endpoint("a@example.org", event_types=[]), endpoint("b@example.org")
    endpoint("c@example.org", only_if_named=True)
    asked(question())
    assert [one.endpoint for one in Message.objects.all()] == [approvals]
    assert [*site_endpoints()] == [alarms]


def test_arguments_are_bounded_and_go_only_where_they_are_asked_for_and_may_be_shown(
    asked: Callable[..., None], changed_settings: None
) -> None:
    full, names = endpoint("a@example.org", with_arguments=True), endpoint("b@example.org")
    asked(question(arguments=LONG))
    (shown,) = told(full)["approval_requests"]
    assert shown["arguments"] == f"{LONG[:999]}…"
    assert told(names)["approval_requests"] == [
        {"id": "mcpr_1", "server_label": "files", "name": "write"}
    ]
    Message.objects.all().delete()
    SiteSettings.objects.update_or_create(pk=1, defaults={"show_content": False})
    forget()
    asked(question(arguments=LONG))
    assert "arguments" not in told(full)["approval_requests"][0]


def test_a_mail_has_one_line_for_a_name_whatever_the_name(settings: Any) -> None:
    data: dict[str, Any] = {"id": "resp_1", "project": HOSTILE, "count": 1, "page": "/admin/x/"}
    data |= {"is_answered_in_console": True}
    data["approval_requests"] = [{"id": "mcpr_1", "server_label": "files", "name": HOSTILE}]
    subject, text = mail_of(APPROVAL_EVENT, data)
    assert subject == "Approval needed: 1 call of MCP tools in add Bcc: all@example.org"
    assert "- files: add Bcc: all@example.org" in text.splitlines()
    assert "/admin/x/" in text.splitlines()
    data["approval_requests"][0]["arguments"] = "a\0b\x1b\u202e\ud800\n- files: other"
    assert "  a�b��� - files: other" in mail_of(APPROVAL_EVENT, data)[1].splitlines()
    settings.SITE_URL = "https://ai.example.org"
    assert "https://ai.example.org/admin/x/" in mail_of(APPROVAL_EVENT, data)[1].splitlines()


def test_an_endpoint_that_may_have_no_arguments_any_more_gets_none(
    asked: Callable[..., None], project: Project, settings: Any
) -> None:
    settings.WEBHOOKS_ALLOW_PRIVATE = True
    with receiver() as hook:
        of = endpoint(hook.url, way="webhook", with_arguments=True)
        asked(question(arguments='{"path": "hush"}'))
        Endpoint.objects.update(with_arguments=False)
        for one, _ in due_endpoints():
            deliver_to(one)
        assert b"arguments" not in hook.posted[0][1]
    assert "arguments" not in told(of)["approval_requests"][0]


@pytest.mark.parametrize("is_deleted", [False, True])
def test_no_message_about_a_forgotten_user_has_arguments(
    is_deleted: bool, asked: Callable[..., None], project: Project
) -> None:
    """Neither one that was given up, nor one whose endpoint has not answered yet.

    Nor has one about a response that its client has deleted.
    """
    for address in ("a@example.org", "b@example.org"):
        endpoint(address, with_arguments=True)
    asked(question(arguments='{"path": "hush"}'))
    Message.objects.filter(endpoint__address="a@example.org").update(next_at=None)
    if not is_deleted:
        given = {"model": "m", "status": "completed", "request": {"model": "m"}}
        StoredResponse.objects.create(public_id="resp_1", project=project, **given)
    forget_user("ann", None, ["resp_1"])
    bodies = Message.objects.values_list("body", flat=True)
    assert ["hush" in body for body in bodies] == [False, False]


def test_users_who_may_not_see_content_have_none_sent_and_see_no_messages_with_it(
    staff: Staff, asked: Callable[..., None]
) -> None:
    of = endpoint("a@example.org", with_arguments=True)
    asked(question(arguments='{"path": "hush"}'))
    browser = staff("outbox.view_endpoint", "outbox.change_endpoint", "outbox.view_message")
    form = {"way": "email", "address": "a@example.org", "event_types": APPROVAL_EVENT}
    form |= {"is_enabled": "on", "secret": new_secret()}
    page = f"/admin/outbox/endpoint/{of.pk}/change/"
    assert browser.post(page, form).status_code == 302
    of.refresh_from_db()
    assert of.with_arguments
    assert browser.post(page, {**form, "address": "b@example.org"}).status_code == 302
    of.refresh_from_db()
    assert not of.with_arguments
    assert browser.post(page, {**form, "with_arguments": "on"}).status_code == 302
    of.refresh_from_db()
    assert not of.with_arguments
    log = f"/admin/outbox/message/{Message.objects.get().pk}/change/"
    assert "hush" not in browser.get(log).content.decode()


def test_users_who_may_see_content_turn_it_on_and_read_the_messages(
    admin: Client, asked: Callable[..., None]
) -> None:
    of = endpoint("a@example.org")
    form = {"way": "email", "address": "a@example.org", "event_types": APPROVAL_EVENT}
    form |= {"is_enabled": "on", "secret": new_secret(), "with_arguments": "on"}
    assert admin.post(f"/admin/outbox/endpoint/{of.pk}/change/", form).status_code == 302
    asked(question(arguments='{"path": "hush"}'))
    log = f"/admin/outbox/message/{Message.objects.get().pk}/change/"
    assert "hush" in admin.get(log).content.decode()
