"""The playground, from end to end: settings, tools, turns, a stop; and who is kept out of it."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import PICTURED, assert_fits, faults, keep_screenshot
from tests.e2e.scripts import call, script, slow
from tests.served_stack import ServedStack, wait_until

TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ADDRESS = "/console/playground/responses"


def settings(page: Page) -> Locator:
    """The form of the settings, open also where it is folded away."""
    form = page.locator("#settings")
    if not form.get_by_label("System prompt", exact=True).is_visible():
        form.get_by_text("Settings", exact=True).click()
    return form


def message(page: Page) -> Locator:
    """The field of the message."""
    return page.get_by_role("textbox", name="Message")


def say(page: Page, *steps: dict[str, object]) -> None:
    message(page).fill(script(*steps))
    page.keyboard.press("Enter")


def usage(page: Page, number: int) -> Locator:
    """The line of facts below the answer with this number."""
    return page.locator(".usage").nth(number)


@pytest.mark.parametrize("width", PICTURED)
def test_a_conversation_with_tools_is_held_and_told_as_code(
    open_page: Callable[..., Page], stack: ServedStack, width: str
) -> None:
    page = open_page(width)
    page.goto("/playground")
    form = settings(page)
    form.get_by_label("Model", exact=True).select_option("scripted")
    form.get_by_label("System prompt", exact=True).fill("Answer shortly.")
    form.get_by_label("Temperature").fill("0.5")
    form.get_by_text("Tools", exact=True).click()
    form.get_by_label("A JSON list of functions").fill(json.dumps([TOOL]))
    assert_fits(page)

    say(page, {"reasoning": "A tool knows."}, call("get_weather", '{"city":', '"Oslo"}'))
    expect(usage(page, 0)).to_contain_text("completed")
    expect(usage(page, 0)).to_contain_text("1 reasoning")
    expect(page.locator(".bubble-call")).to_contain_text('"city": "Oslo"')
    page.get_by_label("Result of get_weather").fill('{"sky": "rain"}')
    say(page, {"text": "It rains"}, {"sleep_ms": 200}, {"text": " in Oslo."})
    expect(page.get_by_text("It rains in Oslo.", exact=True)).to_be_visible()
    expect(usage(page, 1)).to_contain_text("tokens/s")
    keep_screenshot(page, f"playground-{width}")

    page.get_by_text("The request as curl and Python").click()
    curl, python = page.locator("#as-curl"), page.locator("#as-python")
    expect(curl).to_contain_text('"previous_response_id": "resp_')
    expect(python).to_contain_text("temperature=0.5,")
    assert faults(page) == []
    program = python.inner_text()
    assert compile(program, "playground", "exec")
    stored = stack.sql(
        "SELECT key.name, project.name FROM responses_api_storedresponse stored"
        " JOIN accounts_project project ON project.id = stored.project_id"
        " JOIN generations_generation run ON run.public_id = stored.public_id"
        " JOIN accounts_apikey key ON key.id = run.api_key_id ORDER BY stored.id DESC LIMIT 1"
    )
    assert stored == [("admin", "playground")]


@pytest.mark.parametrize(("width", "way"), [("phone", "button"), ("desktop", "key")])
def test_stop_really_stops(
    open_page: Callable[..., Page], stack: ServedStack, width: str, way: str
) -> None:
    page = open_page(width)
    page.goto("/playground")
    settings(page).get_by_label("Model", exact=True).select_option("scripted")
    message(page).fill(slow(4000))
    page.keyboard.press("Enter")
    expect(page.locator(".answer .bubble-text")).to_contain_text("x x x")
    newest = "SELECT public_id FROM generations_generation ORDER BY id DESC LIMIT 1"
    ((running,),) = stack.sql(newest)
    assert stack.row(running)["status"] == "running"
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        alarms = page.get_by_role("dialog", name="Alarms")
        page.locator("#bell").click()
        expect(alarms).to_be_visible()
        page.keyboard.press("Escape")  # It closes what is open, and stops nothing.
        expect(alarms).to_be_hidden()
        expect(page.get_by_role("button", name="Stop")).to_be_enabled()
        page.keyboard.press("Escape")
    expect(usage(page, 0)).to_contain_text("cancelled")
    row = stack.row(running)
    assert row["status"] == "cancelled"
    assert 0 < row["output_tokens"] < 4000
    say(page, {"text": "And on."})  # The conversation goes on from what was said.
    expect(usage(page, 1)).to_contain_text("completed")


def begun(page: Page, stack: ServedStack) -> str:
    """Ask for a long answer and see it begin; return the id of its generation."""
    page.goto("/playground")
    page.get_by_label("Model", exact=True).select_option("scripted")
    message(page).fill(slow(4000))
    page.keyboard.press("Enter")
    expect(page.locator(".answer .bubble-text")).to_contain_text("x x x")
    newest = "SELECT public_id FROM generations_generation ORDER BY id DESC LIMIT 1"
    ((running,),) = stack.sql(newest)
    return str(running)


def test_a_new_conversation_builds_on_nothing_that_was_running(
    open_page: Callable[..., Page], stack: ServedStack
) -> None:
    page = open_page()
    running = begun(page, stack)
    page.get_by_role("button", name="New conversation").click()
    say(page, {"text": "first"})
    expect(usage(page, 0)).to_contain_text("completed")
    wait_until(lambda: stack.row(running)["status"] == "cancelled", 120, "it is stopped")
    say(page, {"text": "second"})
    expect(usage(page, 1)).to_contain_text("completed")
    chain = stack.sql(
        "SELECT one.previous_id IS NULL, two.previous_id = one.id"
        " FROM responses_api_storedresponse two, responses_api_storedresponse one"
        " WHERE two.id = (SELECT max(id) FROM responses_api_storedresponse)"
        " AND one.id = (SELECT max(id) FROM responses_api_storedresponse WHERE id < two.id)"
    )
    assert chain == [(True, True)]


BUSY_DATABASE = """() => {
  const opening = indexedDB.open("playground", 1);
  return new Promise((held) => {
    opening.onsuccess = () => {
      const stores = ["talks", "titles"];
      const talks = opening.result.transaction(stores, "readwrite").objectStore("talks");
      const goOn = () => {
        held();
        if (!window.released) talks.count().onsuccess = goOn;
        else opening.result.close();
      };
      goOn();
    };
  });
}"""


def test_what_is_typed_in_a_new_conversation_waits_for_no_database(
    open_page: Callable[..., Page],
) -> None:
    page = open_page()
    page.goto("/playground")
    page.get_by_label("Model", exact=True).select_option("scripted")
    say(page, {"text": "first"})
    expect(usage(page, 0)).to_contain_text("completed")
    page.evaluate(BUSY_DATABASE)
    page.get_by_role("button", name="New conversation").click()
    say(page, {"text": "second"})
    expect(page.locator(".answer .bubble-text")).to_have_text("second")
    expect(usage(page, 0)).to_contain_text("completed")
    page.evaluate("window.released = true")
    conversations = page.get_by_label("Conversation", exact=True).locator("option")
    expect(conversations).to_have_count(2)


def test_an_answer_that_is_begun_anew_is_shown_once(open_page: Callable[..., Page]) -> None:
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": []}
    response = {"id": "resp_1", "status": "in_progress", "output": []}
    told = [
        *[
            event
            for text in ("half of", "all of it")
            for event in (
                {"type": "response.in_progress", "response": response},
                {"type": "response.output_item.added", "output_index": 0, "item": item},
                {"type": "response.output_text.delta", "output_index": 0, "delta": text},
            )
        ],
        {"type": "response.completed", "response": {**response, "status": "completed"}},
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in told)
    page = open_page()
    page.route(f"**{ADDRESS}", lambda route: route.fulfill(body=stream))
    ended = {"response": {**response, "status": "completed"}, "run": {"cost": "1 USD"}}
    page.route("**/admin/playground/responses/resp_1", lambda route: route.fulfill(json=ended))
    page.goto("/playground")
    message(page).fill("hi")
    page.keyboard.press("Enter")
    expect(usage(page, 0)).to_contain_text("completed")
    expect(page.locator(".answer .bubble-text")).to_have_text("all of it")


def test_who_leaves_the_page_stops_the_answer(
    open_page: Callable[..., Page], stack: ServedStack
) -> None:
    page = open_page()
    running = begun(page, stack)
    page.goto("/admin/")
    wait_until(lambda: stack.row(running)["status"] == "cancelled", 120, "it is stopped")


def test_an_answer_is_bound_by_a_json_schema(open_page: Callable[..., Page]) -> None:
    page = open_page("phone")
    page.goto("/playground")
    form = settings(page)
    form.get_by_label("Model", exact=True).select_option("demo")
    form.get_by_text("JSON schema of the answer").click()
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    field = form.get_by_label("A JSON schema", exact=True)
    field.fill("{not json")
    expect(page.get_by_role("alert")).to_contain_text("JSON schema")
    field.fill(json.dumps(schema))
    expect(page.locator("#complaint")).to_be_empty()
    form.get_by_label("Max output tokens").fill("60")
    message(page).fill("Which colour?")
    page.keyboard.press("Enter")
    expect(usage(page, 0)).to_contain_text("completed", timeout=30_000)
    said = page.locator(".answer .bubble-text").inner_text()
    assert json.loads(said) == {"colour": "red"}


def test_an_error_is_shown_and_the_conversation_goes_on(
    open_page: Callable[..., Page],
) -> None:
    page = open_page()
    page.goto("/playground")
    page.get_by_label("Model", exact=True).select_option("scripted")
    say(page, {"text": "half"}, {"fail": "boom"})
    expect(page.locator(".bubble-error").first).to_contain_text("boom")
    say(page, {"text": "whole"})
    expect(page.get_by_text("whole", exact=True)).to_be_visible()
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".bubble")).to_have_count(0)


@pytest.fixture
def cookie(open_page: Callable[..., Page]) -> dict[str, str]:
    """The cookies of an operator who is logged in."""
    page = open_page()
    page.goto("/playground")
    found = page.context.cookies()
    return {entry["name"]: entry["value"] for entry in found}


BODY = {"model": "scripted", "input": '[{"text": "ok"}]'}


def test_a_session_needs_the_csrf_token_to_ask(stack: ServedStack, cookie: dict[str, str]) -> None:
    url = f"{stack.url}{ADDRESS}"
    forged = httpx.post(url, json=BODY, cookies=cookie)
    assert forged.status_code == 403
    assert forged.json()["error"]["code"] == "csrf_failed"
    token = {"x-csrftoken": cookie["csrftoken"]}
    assert httpx.post(url, json=BODY, cookies=cookie, headers=token).status_code == 200
    stop = f"{url}/resp_unknown/stop"
    assert httpx.post(stop, cookies=cookie).status_code == 403
    assert httpx.post(stop, cookies=cookie, headers=token).status_code == 404


def test_neither_strangers_nor_keys_ask_the_console(stack: ServedStack) -> None:
    url = f"{stack.url}{ADDRESS}"
    assert httpx.post(url, json=BODY).status_code == 401
    key = {"authorization": f"Bearer {stack.key}"}
    assert httpx.post(url, json=BODY, headers=key).status_code == 401
    events = f"{stack.url}/console/responses/resp_x/events"
    assert httpx.get(events, headers=key).status_code == 401


def test_a_session_never_opens_the_api(stack: ServedStack, cookie: dict[str, str]) -> None:
    token = {"x-csrftoken": cookie["csrftoken"]}
    answer = httpx.post(f"{stack.url}/v1/responses", json=BODY, cookies=cookie, headers=token)
    assert answer.status_code == 401
