"""Messages about calls that wait for an approval: mails with a link, and webhooks."""

from __future__ import annotations

import email
import email.policy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from inference_site.outbox.models import new_secret
from tests.e2e.keys import make_key
from tests.e2e.scripts import dicts
from tests.mcp.conftest import (
    ADD,
    SAY,
    SITE_URL,
    McpSite,
    browser_of,
    continued,
    kinds,
    logged_in,
    posted,
    question_of,
)
from tests.notice_receivers import Hook, receiver
from tests.served_stack import wait_until

EVENT = "mcp_approval.requested"
ASKED = {"calls": [["asked__add", {"a": 20, "b": 3}]]}


def add_endpoint(
    site: McpSite, way: str, address: str, events: list[str], project: int | None, **fields: Any
) -> str:
    """Add an endpoint; return its secret."""
    secret = new_secret()
    site.stack.sql(
        "INSERT INTO outbox_endpoint (project_id, way, address, event_types, secret, old_secret,"
        " is_enabled, failures, with_arguments) VALUES (%s, %s, %s, %s, %s, '', true, 0, %s)",
        *(project, way, address, events, secret, fields.get("with_arguments", False)),
    )
    return secret


@pytest.fixture(autouse=True)
def no_endpoints(site: McpSite) -> Iterator[None]:
    yield
    site.stack.sql("DELETE FROM outbox_message")
    site.stack.sql("DELETE FROM outbox_endpoint")
    site.mailbox.mails.clear()


@pytest.fixture
def project(site: McpSite) -> int:
    """The project of the site's first key."""
    ((found,),) = site.stack.sql("SELECT id FROM accounts_project WHERE name = 'default'")
    number: int = found
    return number


@pytest.fixture
def hook() -> Iterator[Hook]:
    with receiver() as running:
        yield running


def mails(site: McpSite, count: int) -> dict[str, Any]:
    """The mails, by receiver, once this number of them has come."""
    wait_until(lambda: len(site.mailbox.mails) >= count, 200, "the mails")
    return {
        mail.rcpt_tos[0]: email.message_from_bytes(mail.content, policy=email.policy.default)
        for mail in site.mailbox.mails
    }


@pytest.mark.usefixtures("operator")  # The first login leads to the page of the password.
def test_a_mailed_link_leads_to_a_login_and_to_buttons_and_does_nothing_by_itself(
    site: McpSite, registered: dict[str, Any]
) -> None:
    def lists() -> bool:  # On a busy host the first listing of a worker takes too long.
        listing, *_ = dicts(site.respond(SAY, tool=registered).output)
        return not listing.get("error")

    wait_until(lists, 120, "a listing")
    add_endpoint(site, "email", "boss@example.org", [EVENT], None)
    before = len(site.server.calls)
    first = site.respond(ASKED, SAY, tool=registered)
    mail = mails(site, 1)["boss@example.org"]
    text = mail.get_content()
    assert mail["subject"] == "Approval needed: 1 call of MCP tools in default"
    assert "- asked: add" in text
    assert '"a"' not in text
    pk, item = question_of(site, first)
    page = f"/admin/responses_api/storedresponse/{pk}/change/"
    assert f"{SITE_URL}{page}#approvals" in text.split()
    with browser_of(site) as browser:
        opened = browser.get(page)
        assert opened.url.path == "/admin/login/"
        assert opened.url.params["next"] == page
        shown = logged_in(browser, site, page)
        assert shown.url.path == page
        assert "Calls that wait for an approval" in shown.text
        assert (continued(site, first), len(site.server.calls)) == ([], before)
        address = f"/admin/responses_api/mcpapproval/of/{pk}/answer/"
        posted(browser, page, address, {f"answer-{item}": "approve"})
    (second,) = continued(site, first)
    assert kinds(second) == ["mcp_call", "message"]
    assert len(site.server.calls) == before + 1


def test_a_webhook_has_names_and_arguments_only_where_these_may_go(
    site: McpSite, registered: dict[str, Any], project: int
) -> None:
    with receiver() as all_, receiver() as named, receiver() as other, receiver() as full:
        secret = add_endpoint(site, "webhook", all_.url, [], project)
        add_endpoint(site, "webhook", named.url, [EVENT], project)
        add_endpoint(site, "webhook", other.url, ["batch.completed"], project)
        add_endpoint(site, "webhook", full.url, [EVENT], project, with_arguments=True)
        first = site.respond(ASKED, SAY, tool=registered, background=True)
        wait_until(lambda: len(all_.posted) == 2 and named.posted and full.posted, 30, "the hooks")
        assert other.posted == []
        client = site.stack.client()
        ended, asked = (
            client.webhooks.unwrap(body.decode(), headers, secret=secret)
            for headers, body in all_.posted
        )
        assert (ended.type, str(asked.type)) == ("response.completed", EVENT)
        (question,) = client.responses.retrieve(first.id).output[-1:]
        data: Any = json.loads(named.posted[0][1])["data"]
        (told,) = data.pop("approval_requests")
        pk, _ = question_of(site, first)
        assert data == {
            "id": first.id,
            "project": "default",
            "count": 1,
            "page": f"/admin/responses_api/storedresponse/{pk}/change/#approvals",
            "is_answered_in_console": True,
        }
        assert told == {"id": question.id, "server_label": "asked", "name": "add"}
        (told,) = json.loads(full.posted[0][1])["data"]["approval_requests"]
        assert json.loads(told["arguments"]) == {"a": 20, "b": 3}
    waiting = "SELECT 1 FROM outbox_message WHERE next_at IS NOT NULL"
    wait_until(lambda: site.stack.sql(waiting) == [], 30, "the deliveries")
    kept = "SELECT count(*) FROM outbox_message WHERE body LIKE '%%arguments%%'"
    assert site.stack.sql(kept) == [(0,)]


def test_another_project_learns_nothing_of_a_question(
    site: McpSite, registered: dict[str, Any], project: int, hook: Hook
) -> None:
    other = make_key(site.stack)
    add_endpoint(site, "webhook", hook.url, [EVENT], other.project_id)
    add_endpoint(site, "email", "theirs@example.org", [EVENT], other.project_id)
    add_endpoint(site, "email", "ours@example.org", [EVENT], project)
    add_endpoint(site, "email", "alarms@example.org", [], None)
    site.respond(ASKED, SAY, tool=registered)
    assert set(mails(site, 1)) == {"ours@example.org"}
    told = "SELECT address FROM outbox_message JOIN outbox_endpoint e ON e.id = endpoint_id"
    assert site.stack.sql(told) == [("ours@example.org",)]
    assert hook.posted == []


def test_a_mail_says_that_only_the_api_can_bring_the_credentials(site: McpSite) -> None:
    add_endpoint(site, "email", "boss@example.org", [EVENT], None)
    site.respond(ADD, SAY, tool=site.tool(require_approval="always", authorization="secret"))
    text = mails(site, 1)["boss@example.org"].get_content()
    assert "must come through the API" in text
    assert "secret" not in text


def test_many_questions_are_one_mail_and_those_of_nobody_are_none(
    site: McpSite, registered: dict[str, Any]
) -> None:
    add_endpoint(site, "email", "boss@example.org", [EVENT], None)
    calls = [["asked__add", {"a": n, "b": n}] for n in range(25)]
    site.respond({"calls": calls}, SAY, tool=registered, max_tool_calls=100)
    site.respond(ASKED, SAY, tool=registered, store=False)  # Nobody could answer it.
    text = mails(site, 1)["boss@example.org"].get_content()
    assert text.count("- asked: add") == 20
    assert "- and 5 more" in text
    assert site.stack.sql("SELECT count(*) FROM outbox_message") == [(1,)]


def test_an_address_of_a_project_is_mailed_its_questions_alone(
    site: McpSite, operator: httpx.Client, project: int
) -> None:
    page = "/admin/outbox/endpoint/add/"
    form = {"way": "email", "address": "team@example.org", "project": str(project)}
    form |= {"secret": new_secret(), "is_enabled": "on"}
    refused = posted(operator, page, page, form).text
    assert "only mcp_approval.requested is mailed" in refused
    added = posted(operator, page, page, {**form, "event_types": EVENT}).text
    assert "was added successfully" in added
