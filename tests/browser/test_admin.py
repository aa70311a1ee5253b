"""The pages of the admin: they fit, they are accessible, and they show what was asked."""

from __future__ import annotations

import datetime as dt
import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from playwright.sync_api import Page, Route, expect

from inference_site.runs.usage.models import add_sql, sums_sql
from tests.browser.conftest import (
    ONLY_COLOURS,
    PICTURED,
    WIDTHS,
    assert_fits,
    assert_usable,
    faults,
    keep_screenshot,
    press,
    resize,
    settled,
)
from tests.browser.test_playground import message, settings
from tests.e2e.scripts import call, respond, script, slow
from tests.served_stack import ServedStack, wait_until

MENU = [
    "/admin/",
    "/admin/queue/",
    "/admin/fleet/",
    "/admin/settings/",
    "/admin/playground/",
    "/admin/my-keys/",
    "/admin/my-connections/",
    "/admin/requests/",
    "/admin/requests/?status=failed",
    "/admin/requests/?sort=-duration",
    "/admin/requests/?status=unfinished",
    "/admin/requests/?status=refused",
    "/admin/responses_api/storedresponse/",
    "/admin/responses_api/conversation/",
    "/admin/completions/storedcompletion/",
    "/admin/cases/caseset/",
    "/admin/batches/batch/",
    "/admin/files/storedfile/",
    "/admin/vector_stores/vectorstore/",
    "/admin/responses_api/prompttemplate/",
    "/admin/generations/generation/",
    "/admin/responses_api/mcpapproval/",
    "/admin/mcp_servers/mcpserver/",
    "/admin/alarms/alarm/",
    "/admin/alarms/rule/",
    "/admin/outbox/endpoint/",
    "/admin/outbox/message/",
    "/admin/accounts/project/",
    "/admin/accounts/apikey/",
    "/admin/accounts/budget/",
    "/admin/auth/user/",
    "/admin/auth/group/",
    "/admin/admin/logentry/",
    "/admin/axes/accessfailurelog/",
    "/admin/password_change/",
    "/docs",
]
PAGES = [
    "/admin/?range=custom",
    "/admin/queue/",
    "/admin/fleet/",
    "/admin/fleet/models/demo/",
    "/admin/settings/",
    "/admin/parts/",
    "/admin/playground/",
    "/admin/requests/",
    "/admin/accounts/apikey/",
    "/admin/accounts/apikey/add/",
    "/admin/accounts/apikey/1/change/",
    "/admin/my-keys/",
    "/admin/my-connections/",
    "/admin/alarms/alarm/",
    "/admin/alarms/rule/",
    "/admin/alarms/rule/1/change/",
    "/admin/accounts/project/1/change/",
    "/admin/model_store/storedmodel/add/",
    "/admin/responses_api/storedresponse/1/change/",
    "/admin/responses_api/conversation/1/change/",
    "/admin/responses_api/prompttemplate/1/change/",
    "/admin/batches/batch/1/change/",
    "/admin/vector_stores/vectorstore/1/change/",
    "/admin/password_change/",
]
"""One page of each template; tests/console/test_every_page.py asks for all pages."""
OPEN = "/admin/responses_api/storedresponse/?q="


@pytest.fixture(scope="module", autouse=True)
def requests(stack: ServedStack, client: openai.OpenAI) -> None:
    """One of everything that pages show."""
    message = {"type": "message", "role": "user", "content": "We talk about cats."}
    conversation = client.conversations.create(items=[message])  # type: ignore[list-item]
    respond(client, {"text": "Cats sleep."}, conversation=conversation.id)
    client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "hello there"}], store=True
    )
    [[prompt]] = stack.sql(
        "INSERT INTO responses_api_prompttemplate (public_id, project_id, name, created_at)"
        " VALUES ('pmpt_1', 1, 'cats', now()) RETURNING id"
    )
    stack.sql(
        "INSERT INTO responses_api_promptversion"
        " (template_id, number, developer_message, user_message, model, created_at)"
        " VALUES (%s, 1, 'Like {{whom}}.', 'Hi {{whom}}!', '', now()) RETURNING id",
        prompt,
    )
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hello there"}]}
    url = "/v1/chat/completions"
    line = json.dumps({"custom_id": "1", "method": "POST", "url": url, "body": body}).encode()
    file = client.files.create(file=("lines.jsonl", line), purpose="batch")
    client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    stack.sql(
        "INSERT INTO vector_stores_vectorstore (public_id, project_id, name, description, language,"
        " embedding_model, metadata, created_at, last_active_at, is_deleted)"
        " VALUES ('vs_1', 1, 'shelf', '', 'english', 'demo-embedding', '{}', now(), now(), false)"
        " RETURNING id"
    )
    [[asking]] = stack.sql(
        "INSERT INTO responses_api_item (public_id, project_id, response_id, position, is_output,"
        " data) VALUES ('mcpr_1', 1, 1, 90, true, %s) RETURNING id",
        '{"type": "mcp_approval_request", "server_label": "files", "name": "write",'
        ' "arguments": "{}"}',
    )
    stack.sql(
        "INSERT INTO responses_api_mcpapproval (item_id, project_id, server_label, name,"
        " arguments_sha256, asked_at, answered_by) VALUES (%s, 1, 'files', 'write', '', now(), '')",
        asking,
    )
    stack.sql(
        "INSERT INTO tool_calls_toolcall (generation_id, number, type, name, arguments_hash,"
        " status, attempt, is_error, output_bytes, created_at) SELECT public_id, 0, 'mcp', 'read',"
        " '', 'unknown', 1, true, 0, now() FROM responses_api_storedresponse WHERE id = 1"
    )
    counted = "SELECT count(*) FROM usage_usagerollup WHERE period = 'minute'"
    wait_until(lambda: stack.sql(counted)[0][0] >= 1, 120, "the requests are accounted")


def test_the_pages_that_are_looked_at_are_those_of_the_menu(page: Page) -> None:
    page.goto("/admin/")
    settled(page)
    links = page.locator("#nav-sidebar-inner a[href^='/']")
    found = links.evaluate_all("links => links.map((link) => link.getAttribute('href'))")
    assert set(MENU) == set(found) - {"/"}


def test_the_menu_says_how_many_approvals_wait_and_leads_to_the_question(page: Page) -> None:
    page.goto("/admin/responses_api/mcpapproval/")
    settled(page)
    link = page.locator("#nav-sidebar-inner a[href='/admin/responses_api/mcpapproval/']")
    assert (link.text_content() or "").split()[-1] == "1"
    page.get_by_role("link", name="Answer", exact=True).click()
    question = page.get_by_role("group", name="files.write")
    question.get_by_label("Refuse").check()
    expect(page.get_by_role("button", name="Answer and continue")).to_be_enabled()


@pytest.mark.parametrize("path", PAGES)
def test_pages_fit_and_have_no_fault_of_accessibility(page: Page, path: str) -> None:
    response = page.goto(path)
    assert response is not None
    assert response.status == 200
    settled(page)
    assert_usable(page)


@pytest.fixture
def long_names(stack: ServedStack, client: openai.OpenAI) -> Iterator[list[str]]:
    """A long name and long metadata in all that pages show; the pages of what has such a name."""
    metadata = json.dumps({"m" * 64: "v" * 500})
    stack.sql("UPDATE accounts_project SET name = repeat('n', 100) WHERE id = 1 RETURNING id")
    [[key]] = stack.sql("SELECT name FROM accounts_apikey WHERE id = 1")
    stack.sql("UPDATE accounts_apikey SET name = repeat('k', 100) WHERE id = 1 RETURNING id")
    tables = ("responses_api_storedresponse", "responses_api_conversation")
    for table in (*tables, "batches_batch", "vector_stores_vectorstore"):
        stack.sql(
            f"UPDATE {table} SET metadata = %s WHERE id = 1 RETURNING id",  # noqa: S608
            metadata,
        )
    stack.sql("UPDATE auth_user SET username = repeat('u', 150) WHERE id = 1 RETURNING id")
    [[case_set]] = stack.sql(
        "INSERT INTO cases_caseset (project_id, name, endpoint, created_at)"
        " VALUES (1, repeat('c', 100), '/v1/responses', now()) RETURNING id"
    )
    [[endpoint]] = stack.sql(
        "INSERT INTO outbox_endpoint (project_id, way, address, event_types, secret, old_secret,"
        " only_if_named, is_enabled, failures) VALUES"
        " (1, 'webhook', 'https://a.test/', '{}', '', '', false, false, 0) RETURNING id"
    )
    [[budget]] = stack.sql(
        "INSERT INTO accounts_budget (project_id, api_key_id, unit, every, amount, created_at)"
        " VALUES (1, 1, 'tokens', 'day', 1000000, now()) RETURNING id"
    )
    [[server]] = stack.sql(
        "INSERT INTO mcp_servers_mcpserver (label, url, transport, description, is_active,"
        " is_idempotent, is_per_user, credentials, oauth_issuer, oauth_client_id, oauth_secret,"
        " oauth_scope, tools, error, created_at) VALUES (repeat('s', 64), 'https://a.test/',"
        " 'auto', '', true, false, true, '', '', '', '', '', '[]', '', now()) RETURNING id"
    )
    call = {"tool_call": {"name": "f" * 64, "arguments": ["{}"]}}
    answer = respond(client, call)
    [[response]] = stack.sql(
        "SELECT id FROM responses_api_storedresponse WHERE public_id = %s", answer.id
    )
    yield [
        f"/admin/cases/caseset/{case_set}/change/",
        f"/admin/outbox/endpoint/{endpoint}/change/",
        f"/admin/responses_api/storedresponse/{response}/change/",
        f"/admin/mcp_servers/mcpserver/{server}/delete/",
    ]
    stack.sql("DELETE FROM mcp_servers_mcpserver WHERE id = %s", server)
    stack.sql("DELETE FROM outbox_endpoint WHERE id = %s", endpoint)
    stack.sql("DELETE FROM accounts_budgetspend WHERE budget_id = %s", budget)
    stack.sql("DELETE FROM accounts_budget WHERE id = %s", budget)
    stack.sql("UPDATE accounts_project SET name = 'default' WHERE id = 1 RETURNING id")
    stack.sql("UPDATE accounts_apikey SET name = %s WHERE id = 1 RETURNING id", key)
    stack.sql("UPDATE auth_user SET username = 'admin' WHERE id = 1 RETURNING id")


def test_long_names_make_no_page_wider_than_the_window(page: Page, long_names: list[str]) -> None:
    paths = (
        "/admin/",
        "/admin/accounts/project/1/change/",
        "/admin/accounts/apikey/1/change/",
        "/admin/generations/generation/1/change/",
        "/admin/responses_api/storedresponse/",
        "/admin/responses_api/storedresponse/1/change/",
        "/admin/responses_api/conversation/1/change/",
        "/admin/responses_api/prompttemplate/1/change/",
        "/admin/batches/batch/1/change/",
        "/admin/vector_stores/vectorstore/1/change/",
        "/admin/auth/user/1/change/",
        "/admin/queue/",
        "/admin/requests/",
        "/admin/requests/?project=1",
        "/admin/my-connections/",
        *long_names,
    )
    for path in paths:
        page.goto(path)
        settled(page)
        for width in WIDTHS:
            resize(page, width)
            assert_fits(page)


def test_the_form_that_saves_cases_is_seen_as_a_whole(page: Page) -> None:
    page.goto("/admin/responses_api/storedresponse/")
    page.get_by_text("Save as cases").click()
    for width in WIDTHS:
        resize(page, width)
        for shown in (page.get_by_label("Set", exact=True), page.locator("#times")):
            expect(shown).to_be_in_viewport(ratio=1)
    assert_usable(page)


def test_prompt_is_tried_in_the_playground(page: Page) -> None:
    page.goto("/admin/responses_api/prompttemplate/1/change/")
    page.get_by_label("whom").fill("a {{cat}}")
    page.get_by_role("button", name="Open in playground").click()
    expect(page.get_by_text("Opened cats, version 1.")).to_be_visible()
    expect(message(page)).to_have_value("Hi a {{cat}}!")
    expect(settings(page).get_by_label("System prompt", exact=True)).to_have_value(
        "Like a {{cat}}."
    )


def test_one_facet_of_the_requests_can_be_touched_without_the_next(page: Page) -> None:
    page.goto("/admin/requests/")
    facets = page.locator(".facets li")
    heights = facets.evaluate_all("all => all.map((one) => one.getBoundingClientRect().height)")
    assert min(heights) >= 24


DARK = [
    *("/admin/", "/admin/responses_api/storedresponse/1/change/"),
    "/admin/mcp_servers/mcpserver/add/",
]


@pytest.mark.parametrize("path", DARK)
def test_the_dark_pages_have_enough_contrast_too(open_page: Callable[..., Page], path: str) -> None:
    page = open_page("desktop", "dark")
    page.goto(path)
    settled(page)
    assert faults(page, ONLY_COLOURS) == []


def test_the_charts_show_the_requests_and_can_be_read_as_tables(page: Page) -> None:
    page.goto("/admin/")
    press(page, page.get_by_text("1 hour"))
    page.wait_for_url("**/admin/?range=1h*")
    chart = page.get_by_role("img", name="Requests", exact=True)
    expect(chart.locator("desc")).to_contain_text("completed: at most", use_inner_text=False)
    expect(chart.locator("path").first).to_be_attached()
    resize(page, "desktop")
    chart.hover()
    tip = page.locator(".chart-tip")
    expect(tip).to_contain_text("UTC")
    expect(tip).to_contain_text("completed: ")
    figure = page.locator("#chart-requests")
    press(page, figure.get_by_text("As a table"))
    bars = figure.get_by_role("row").filter(has_text=re.compile(r"[1-9]\d*$"))
    expect(bars.first).to_be_visible()
    table = page.get_by_role("region", name="Usage by Model")
    expect(table.get_by_role("rowheader", name="scripted")).to_be_visible()


def test_usage_by_end_user_leads_to_their_requests(
    page: Page, client: openai.OpenAI, stack: ServedStack
) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    name = f"ann {secrets.token_hex(4)}"
    client.chat.completions.create(model="demo", messages=messages, max_tokens=3, user=name)
    counted = "SELECT count(*) FROM usage_dimensionrollup WHERE period = 'hour' AND value = %s"
    wait_until(lambda: stack.sql(counted, name)[0][0] == 1, 120, "the request is accounted")
    page.goto("/admin/?range=1h")
    page.get_by_label("Table by").select_option("End user")
    page.wait_for_url("**by=user*")
    table = page.get_by_role("region", name="Usage by End user")
    row = table.get_by_role("row").filter(has_text=name)
    expect(table.get_by_role("rowheader", name="Sum")).to_be_visible()
    settled(page)
    assert_usable(page)
    press(page, row.get_by_role("link", name="1", exact=True))
    filters = page.get_by_label("Filters", exact=True)
    expect(filters.get_by_label("End user")).to_have_value(name)
    listed = page.get_by_role("region", name="Requests").locator("tbody tr")
    expect(listed).to_have_count(1)
    page.goto("/admin/?range=1h")
    page.get_by_role("textbox", name="End user").fill(name)
    page.get_by_role("textbox", name="End user").press("Enter")
    page.wait_for_url("**user=ann*")
    expect(page.get_by_role("region", name="Usage by Model")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="JSONL").click()
    [line] = download.value.path().read_text().splitlines()
    assert json.loads(line)["value"] == name


def test_a_custom_range_is_shown_after_its_button(page: Page) -> None:
    page.goto("/admin/")
    press(page, page.get_by_text("Custom", exact=True))
    page.wait_for_url("**/admin/?range=custom*")
    page.get_by_label("From (UTC)").fill("2026-01-31T10:00")
    page.get_by_label("To (UTC)").fill("2026-01-31T12:30")
    press(page, page.get_by_role("button", name="Show"))
    page.wait_for_url("**from=2026-01-31*")
    expect(page.get_by_label("From (UTC)")).to_have_value("2026-01-31T00:00")
    expect(page.get_by_label("To (UTC)")).to_have_value("2026-02-01T00:00")
    expect(page.locator("#refreshed")).to_contain_text("Updated")


@pytest.fixture
def weather(client: openai.OpenAI) -> str:
    """A conversation in which a tool was called; the id of its last response."""
    arguments = ('{"city": ', '"Oslo"}')
    thought = {"reasoning": "A tool knows the weather."}
    asked = respond(client, thought, call("get_weather", *arguments), instructions="Be short.")
    output = {
        "type": "function_call_output",
        "call_id": asked.output[-1].call_id,
        "output": '{"sky": "rain"}',
    }
    answer = {"role": "user", "content": script({"text": "It rains in Oslo."})}
    told = client.responses.create(
        model="scripted",
        previous_response_id=asked.id,
        input=[output, answer],  # type: ignore[list-item]
    )
    return str(told.id)


def test_a_conversation_is_read_from_the_list(page: Page, weather: str) -> None:
    page.goto(f"{OPEN}{weather}")
    press(page, page.get_by_role("link", name=weather[:13]))
    turns = page.get_by_role("region", name="Conversation")
    expect(turns.get_by_text("It rains in Oslo.", exact=True)).to_be_visible()
    told = turns.locator(".bubble-call")
    expect(told).to_contain_text("get_weather")
    expect(told).to_contain_text('"sky": "rain"')
    reasoning = turns.get_by_text("A tool knows the weather.", exact=True)
    expect(reasoning).to_be_hidden()
    press(page, turns.get_by_text("Reasoning", exact=True))
    expect(reasoning).to_be_visible()
    for width in PICTURED:
        resize(page, width)
        keep_screenshot(page, f"admin-response-{width}")
    press(page, page.get_by_role("button", name="Copy as curl"))
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("curl http://127.0.0.1")
    assert "previous_response_id" in copied


def test_a_running_response_is_watched_and_stopped(
    page: Page, client: openai.OpenAI, stack: ServedStack
) -> None:
    running = client.responses.create(model="scripted", input=slow(4000), background=True)
    page.goto(f"{OPEN}{running.id}")
    press(page, page.get_by_role("link", name=running.id[:13]))
    answer = page.locator(".answer .bubble-text")
    expect(answer).to_contain_text("x x x x x")
    seen = answer.inner_text()
    expect(answer).to_contain_text(f"{seen} x x")  # It goes on while it is looked at.
    press(page, page.get_by_role("button", name="Stop"))
    expect(page.get_by_text(f"Stopping {running.id}…")).to_be_visible()
    wait_until(lambda: stack.row(running.id)["status"] == "cancelled", 120, "it is stopped")
    expect(page.locator(".response-title")).to_contain_text("cancelled")
    assert client.responses.retrieve(running.id).status == "cancelled"
    page.goto("/admin/admin/logentry/")
    expect(page.get_by_text("Stopped.").first).to_be_visible()


def test_a_stream_that_breaks_off_is_not_shown_as_one_that_runs(
    page: Page, client: openai.OpenAI
) -> None:
    running = client.responses.create(model="scripted", input=slow(4000), background=True)
    page.goto(f"{OPEN}{running.id}")
    begun = {"type": "response.in_progress", "response": {"status": "in_progress"}}
    page.route("**/events", lambda route: route.fulfill(body=f"data: {json.dumps(begun)}\n\n"))
    press(page, page.get_by_role("link", name=running.id[:13]))
    expect(page.get_by_role("alert")).to_contain_text("The connection was lost.")
    client.responses.cancel(running.id)


def test_a_response_is_run_again(page: Page, client: openai.OpenAI) -> None:
    first = respond(client, {"text": "Once more."})
    page.goto(f"{OPEN}{first.id}")
    press(page, page.get_by_role("link", name=first.id[:13]))
    press(page, page.get_by_role("button", name="Run again"))
    again = page.locator(".response-title code")
    expect(again).not_to_have_text(first.id)
    expect(page.get_by_text("Once more.", exact=True).last).to_be_visible()


def test_a_button_that_is_clicked_twice_acts_once(
    page: Page, client: openai.OpenAI, stack: ServedStack
) -> None:
    first = respond(client, {"text": "Only once."}, metadata={"topic": "twice"})
    page.goto(f"{OPEN}{first.id}")
    press(page, page.get_by_role("link", name=first.id[:13]))
    asked: list[Route] = []

    def hold(route: Route) -> None:
        asked.append(route)

    page.route("**/again/", hold)
    button = page.get_by_role("button", name="Run again")
    button.evaluate("(one) => { for (const ms of [0, 300]) setTimeout(() => one.click(), ms); }")
    page.wait_for_timeout(1_000)
    assert len(asked) == 1
    asked[0].continue_()
    again = page.locator(".response-title code")
    expect(again).not_to_have_text(first.id)
    found = "SELECT count(*) FROM responses_api_storedresponse WHERE metadata @> %s::jsonb"
    assert stack.sql(found, '{"topic": "twice"}') == [(2,)]


def test_a_page_that_refreshes_itself_asks_a_slow_server_once(page: Page) -> None:
    page.goto("/admin/queue/")
    settled(page)
    page.mouse.move(0, 0)
    asked: list[Route] = []

    def hold(route: Route) -> None:
        asked.append(route)

    page.route("**/admin/queue/", hold)
    page.wait_for_timeout(7_000)  # It refreshes itself every three seconds.
    assert len(asked) == 1
    asked[0].continue_()


def test_responses_are_exported_as_json_lines(
    page: Page, client: openai.OpenAI, weather: str
) -> None:
    page.goto(f"{OPEN}{weather}")
    with page.expect_download() as download:
        press(page, page.get_by_role("link", name="Export JSONL"))
    lines = download.value.path().read_text().splitlines()
    assert len(lines) == 1
    assert weather in lines[0]
    assert "It rains in Oslo." in lines[0]


@pytest.fixture
def full(client: openai.OpenAI, stack: ServedStack) -> Iterator[list[str]]:
    """All slots of the model are busy and two wait; the ids of those that wait."""
    made = [
        client.responses.create(model="scripted", input=slow(4000), background=True).id
        for _ in range(6)
    ]
    wait_until(lambda: len(_waiting(stack)) == 2, 120, "two wait")
    yield _waiting(stack)
    for id_ in made:
        client.responses.cancel(id_)


def _waiting(stack: ServedStack) -> list[str]:
    rows = stack.sql(
        "SELECT public_id FROM generations_generation WHERE status = 'queued' ORDER BY id"
    )
    return [row[0] for row in rows]


def test_a_page_that_refreshes_itself_says_that_the_session_is_over(page: Page) -> None:
    page.goto("/admin/requests/")
    page.mouse.move(0, 0)
    kept: Any = page.context.cookies()
    page.context.clear_cookies()
    try:
        expect(page.locator("#refreshed")).to_contain_text("The session is over")
        page.goto("/admin/requests/")
        expect(page).to_have_url(re.compile("/admin/login/"))
    finally:
        page.context.add_cookies(kept)


def test_a_refused_request_comes_into_the_log_and_a_filter_is_saved(
    page: Page, client: openai.OpenAI, stack: ServedStack
) -> None:
    page.goto("/admin/requests/")
    page.mouse.move(0, 0)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="no-such-model", input="Hello")
    log = page.get_by_role("region", name="Requests")
    expect(log.get_by_text("no-such-model")).to_be_visible()  # Without a reload.
    expect(page.locator("#refreshed")).to_contain_text(re.compile(r"Updated \d+ s ago\."))
    press(page, page.get_by_role("button", name="Pause"))
    expect(page.locator("#refreshed")).to_contain_text("Paused.")
    press(page, page.get_by_role("region", name="Facets").get_by_role("link", name="404"))
    resize(page, "desktop")
    expect(log.get_by_role("rowheader")).to_have_count(1)
    log.get_by_role("rowheader").get_by_role("link").click()
    panel = page.get_by_role("complementary", name="Request", exact=True)
    expect(panel.get_by_text("The project has no such model")).to_be_visible()
    press(page, panel.get_by_role("button", name="Close"))
    resize(page, "desktop")
    address = log.get_by_role("rowheader").get_by_role("link").get_attribute("href") or ""
    page.goto(address)
    settled(page)
    expect(page.get_by_text("model_not_found")).to_be_visible()
    assert_usable(page)
    resize(page, "desktop")
    page.goto("/admin/requests/?status=404")
    page.get_by_role("textbox", name="Name of the filter").fill("Unknown models")
    press(page, page.get_by_role("button", name="Save this filter"))
    page.goto("/admin/requests/")
    press(page, page.get_by_role("link", name="Unknown models", exact=True))
    page.wait_for_url("**/admin/requests/?status=404")
    page.get_by_role("searchbox", name="Search").fill("sleep")
    page.get_by_role("combobox", name="Status").select_option("")
    expect(log.locator("mark").first).to_have_text("sleep")
    assert_usable(page)


def test_requests_are_sorted_chosen_and_downloaded_from_the_keyboard(
    page: Page, client: openai.OpenAI
) -> None:
    respond(client, {"text": "Cats sleep."}, metadata={"team": "red"}, user="ada")
    page.goto("/admin/requests/?user=ada")
    settled(page)
    page.mouse.move(0, 0)
    log = page.get_by_role("region", name="Requests")
    rows = log.get_by_role("rowheader")
    expect(rows).to_have_count(1)
    page.keyboard.press("j")
    expect(rows.first.get_by_role("link")).to_be_focused()
    page.keyboard.press("Enter")
    panel = page.get_by_role("complementary", name="Request", exact=True)
    expect(panel.get_by_role("heading", name="/v1/responses")).to_be_visible()
    expect(panel.get_by_role("group", name="Answer")).to_have_text("Cats sleep.")
    expect(panel.get_by_role("rowheader", name="Queue")).to_be_visible()
    assert faults(page) == []
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(rows.first.get_by_role("link")).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox", name="Search")).to_be_focused()
    page.get_by_role("searchbox", name="Search").blur()
    page.keyboard.press("3")
    page.wait_for_url("**/admin/requests/?user=ada&sort=-duration")
    chosen = page.get_by_role("navigation", name="Views of the list").get_by_role("link")
    expect(chosen.nth(2)).to_have_attribute("aria-current", "page")
    sorted_by = page.get_by_role("columnheader", name="Duration")
    expect(sorted_by).to_have_attribute("aria-sort", "descending")
    page.get_by_label("Metadata").fill("team=red")
    page.get_by_label("Metadata").press("Enter")
    expect(rows).to_have_count(1)
    assert_usable(page)
    resize(page, "desktop")
    heights = rows.evaluate_all("rows => rows.map((row) => row.closest('tr').clientHeight)")
    assert max(heights) < 40, "one line for each"
    page.get_by_label("Metadata").fill("team=blue")
    page.get_by_label("Metadata").press("Enter")
    expect(log.get_by_text("No requests match.")).to_be_visible()
    page.goto("/admin/requests/?user=ada")
    with page.expect_download() as download:
        page.get_by_role("link", name="JSONL").click()
    lines = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert [line["end_user"] for line in lines] == ["ada"]


def test_the_columns_of_the_list_are_chosen_from_the_keyboard(
    page: Page, client: openai.OpenAI
) -> None:
    respond(client, {"text": "Dogs bark."}, user="grace")
    page.goto("/admin/requests/?user=grace")
    settled(page)
    opener = page.locator("details.columns summary")
    opener.focus()
    page.keyboard.press("Enter")
    for name in ("Cost", "End user"):
        page.get_by_role("checkbox", name=name).focus()
        page.keyboard.press("Space")
    assert_usable(page)
    resize(page, "desktop")
    page.get_by_role("button", name="Show these columns").focus()
    page.keyboard.press("Enter")
    log = page.get_by_role("region", name="Requests")
    expect(log.get_by_role("columnheader", name="End user")).to_be_visible()
    expect(log.get_by_role("columnheader", name="Cost")).to_have_count(0)
    expect(log.get_by_role("cell", name="grace")).to_be_visible()
    assert page.url.endswith("/admin/requests/?user=grace")
    page.reload()
    expect(log.get_by_role("columnheader", name="End user")).to_be_visible()
    assert_usable(page)


def test_conversations_are_a_tab_of_the_requests(page: Page, client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    respond(client, {"text": "Owls hoot."}, conversation=conversation.id)
    page.goto("/admin/requests/")
    tabs = page.get_by_role("navigation", name="Views of the list")
    tabs.get_by_role("link", name="Conversations").focus()
    page.keyboard.press("Enter")
    expect(tabs.get_by_role("link", name="Conversations")).to_have_attribute("aria-current", "page")
    expect(page.get_by_role("link", name=conversation.id[:13])).to_be_visible()
    assert_usable(page)


def test_content_that_is_not_stored_is_kept_once_the_settings_say_so(
    page: Page, client: openai.OpenAI, stack: ServedStack
) -> None:
    def ask() -> bool:
        message = script({"text": "It is kept for an hour."})
        odd = "odd: \0, \u202e, \N{FAMILY}"
        asked = [{"role": "system", "content": odd}, {"role": "user", "content": message}]
        client.chat.completions.create(model="scripted", messages=asked)  # type: ignore[arg-type]
        client.responses.create(model="scripted", input=message, store=False)
        return bool(stack.sql("SELECT count(*) FROM kept_content_keptcontent")[0][0] > 1)

    assert not ask()
    page.goto("/admin/settings/")
    page.get_by_label("Content of unstored requests (hours)").fill("1")
    press(page, page.get_by_role("button", name="Save"))
    wait_until(ask, 120, "it is kept")
    page.goto("/admin/requests/")
    log = page.get_by_role("region", name="Requests")
    row = log.get_by_role("row").filter(has_text="It is kept for an hour.").first
    page.goto(row.get_by_role("link").first.get_attribute("href") or "")
    kept = page.get_by_role("region", name="Content")
    expect(kept.get_by_text("It is kept for an hour.", exact=True)).to_be_visible()
    stack.sql("UPDATE site_settings_sitesettings SET debug_content_hours = NULL")

    def is_sent() -> bool:
        return "It is kept for an hour." in page.request.get(page.url).text()

    wait_until(lambda: not is_sent(), 120, "it is not shown any more, though not deleted yet")


def test_the_queue_moves_up_and_stops_what_waits(
    page: Page, full: list[str], stack: ServedStack
) -> None:
    first, last = full
    page.goto("/admin/queue/")
    settled(page)
    keep_screenshot(page, "admin-queue-desktop")
    waiting = page.get_by_role("region", name="Next in line")
    row = waiting.get_by_role("row").filter(has_text=last[:18])
    press(page, row.get_by_role("button", name="Move up"))
    expect(page.get_by_text("Moved to the front of the queue for scripted.")).to_be_visible()
    expect(waiting.get_by_role("rowheader").first).to_contain_text(last[:18])
    row = waiting.get_by_role("row").filter(has_text=first[:18])
    press(page, row.get_by_role("button", name="Stop"))
    expect(page.get_by_text(f"Stopping {first}…")).to_be_visible()
    assert stack.row(first)["status"] == "cancelled"
    assert _waiting(stack) == [last]


def test_the_page_of_the_api_works_under_the_policy(page: Page) -> None:
    page.goto("/docs")
    for width in WIDTHS:
        resize(page, width)
        expect(page.get_by_text("/api/chat", exact=True).first).to_be_visible()


BUSY_HOUR = """
INSERT INTO usage_usagerollup (period, start, project_id, api_key_id, model, requests, completed,
    failed, cancelled, input_tokens, cached_tokens, output_tokens, reasoning_tokens, queue_ms,
    prefill_ms, decode_ms, cost)
SELECT 'minute', start, key.project_id, key.id, 'demo', n + 4, n,
    (n / 20) * 2, 2, n * 900, n * 500, n * 210, n * 12, n * 20, n * 60, n * 900, n * 0.002
FROM accounts_apikey key, generate_series(2, 58) ago,
LATERAL (SELECT date_trunc('minute', now() - ago * interval '1 minute', 'UTC') AS start,
    (30 + 22 * sin(ago / 9.0) + mod(ago, 5))::int AS n) minutes
ON CONFLICT DO NOTHING
"""
BUSY_LATENCIES = """
(SELECT period, start, project_id, api_key_id, model, measure, low + spread AS bucket,
    5 - spread AS count
FROM usage_usagerollup, generate_series(0, 3) spread,
    (VALUES ('ttft', 12), ('speed', 10), ('queue', 5)) measures (measure, low)
WHERE period = 'minute' AND model = 'demo') AS made
"""


@contextmanager
def _nearly_spent(stack: ServedStack) -> Iterator[None]:
    """Give the first project a budget of which little is left."""
    stack.sql(
        "INSERT INTO accounts_budget (project_id, unit, every, amount, created_at) "
        "SELECT id, 'tokens', 'day', 1e7, now() FROM accounts_project ORDER BY id LIMIT 1"
    )
    stack.sql(
        "INSERT INTO accounts_budgetspend (budget_id, start, spent, reserved) "
        "SELECT id, (now() AT TIME ZONE 'UTC')::date, 8.6e6, 0 FROM accounts_budget "
        "WHERE amount = 1e7 ON CONFLICT (budget_id, start, value) DO UPDATE SET spent = 8.6e6"
    )
    yield
    stack.sql(
        "DELETE FROM accounts_budgetspend WHERE budget_id IN "
        "(SELECT id FROM accounts_budget WHERE amount = 1e7)"
    )
    stack.sql("DELETE FROM accounts_budget WHERE amount = 1e7")


def test_pictures_for_the_documentation(open_page: Callable[..., Page], stack: ServedStack) -> None:
    """Each page is taken as it is after a busy hour; they are kept only when that is asked for."""
    stack.sql(BUSY_HOUR)
    stack.sql(add_sql(sums_sql(BUSY_LATENCIES)))
    for width in PICTURED:
        page = open_page(width)
        page.goto("/admin/?range=1h")
        settled(page)
        assert_fits(page)
        keep_screenshot(page, f"admin-home-{width}")
        page.goto("/admin/requests/")
        settled(page)
        keep_screenshot(page, f"admin-requests-{width}")
    with _nearly_spent(stack):
        page = open_page("desktop")
        page.goto("/admin/accounts/apikey/1/change/")
        settled(page)
        keep_screenshot(page, "admin-key-desktop")
    page = open_page("desktop", "dark")
    page.goto("/admin/fleet/")
    settled(page)
    keep_screenshot(page, "admin-fleet-dark")


def test_times_are_shown_in_utc_or_in_the_zone_of_the_browser(
    page: Page, client: openai.OpenAI
) -> None:
    made = client.responses.create(model="scripted", input=script({"text": "Hi"}))
    browser = page.context.new_cdp_session(page)
    browser.send("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Kathmandu"})
    page.goto(f"/admin/responses_api/storedresponse/?q={made.id}")
    time = page.locator("#result_list time").first
    in_utc = dt.datetime.fromisoformat(time.inner_text())
    assert abs(dt.datetime.now(dt.UTC).replace(tzinfo=None) - in_utc) < dt.timedelta(minutes=5)
    local = f"{in_utc + dt.timedelta(hours=5, minutes=45)}"
    expect(time).to_have_attribute("title", f"{local} GMT+5:45")
    page.get_by_role("button", name="Times in the zone of this browser").click()
    expect(time).to_have_text(local)
    expect(time).to_have_attribute("title", f"{in_utc} UTC")
    page.get_by_role("link", name=made.id[:13]).click()
    expect(page.locator(".turn-head time")).to_have_text(f"{local} GMT+5:45")
    assert faults(page) == []
    page.get_by_role("button", name="Times in the zone of this browser").click()
    expect(page.locator(".turn-head time")).to_have_text(f"{in_utc} UTC")
    browser.send("Emulation.setTimezoneOverride", {"timezoneId": ""})
    browser.detach()
