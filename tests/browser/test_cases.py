"""Saved cases: from a list and a page to runs, which are judged and compared."""

from __future__ import annotations

import json
from typing import Any

import openai
from playwright.sync_api import Page, expect

from tests.browser.conftest import assert_usable, settled
from tests.e2e.scripts import respond, script
from tests.served_stack import ServedStack
from tests.waiting import wait_until

RESPONSES = "/admin/responses_api/storedresponse/"


def chat(client: openai.OpenAI, text: str) -> Any:
    """A stored chat completion with this answer."""
    said: Any = [{"role": "user", "content": script({"text": text})}]
    return client.chat.completions.create(model="scripted", messages=said, store=True)


def save(page: Page, stack: ServedStack, table: str, public_id: str, name: str) -> None:
    """Save an answer in a set, by the form on its page."""
    [[pk]] = stack.sql(f"SELECT id FROM {table} WHERE public_id = %s", public_id)  # noqa: S608
    page.goto(f"/admin/{table.replace('_stored', '/stored')}/{pk}/change/")
    page.get_by_label("Set", exact=True).fill(name)
    page.locator("#save-case").get_by_role("button", name="Save").click()


def set_page(stack: ServedStack, name: str) -> str:
    [[pk]] = stack.sql("SELECT id FROM cases_caseset WHERE name = %s", name)
    return f"/admin/cases/caseset/{pk}/change/"


def run(page: Page, model: str, judge: str = "none", **fields: str) -> None:
    """Fill in the form of a run and begin it."""
    form = page.locator("#run")
    form.get_by_label("Model", exact=True).select_option(model)
    form.get_by_label("An answer passes if").select_option(judge)
    for label, value in fields.items():
        form.get_by_label(label.replace("_", " ").capitalize(), exact=True).fill(value)
    form.get_by_role("button", name="Run").click()


def reach_end(stack: ServedStack, number: int, name: str) -> None:
    """Wait until a run of a set has ended."""
    found = (
        "SELECT state FROM cases_caserun r JOIN cases_caseset s ON s.id = r.case_set_id"
        " WHERE r.number = %s AND s.name = %s"
    )
    wait_until(lambda: stack.sql(found, number, name) == [("ended",)], 60)


def test_answers_of_a_list_are_saved_run_judged_and_compared(
    page: Page, stack: ServedStack, client: openai.OpenAI
) -> None:
    made = [
        respond(client, {"text": f"Answer {n}."}, metadata={"topic": "cases"}, user="mary")
        for n in range(3)
    ]
    page.goto(f"{RESPONSES}?q=topic%3Dcases")
    page.get_by_text("Save as cases").click()
    page.get_by_label("Set").fill("from a list")
    page.get_by_role("button", name="Save the 3 answers of this page").click()
    expect(page.get_by_text("Saved 3 cases.")).to_be_visible()
    bodies = stack.sql("SELECT body FROM cases_case WHERE source = %s", made[0].id)
    assert "mary" not in json.dumps(bodies)
    settled(page)
    assert_usable(page)

    run(page, "scripted", "exact")
    expect(page.get_by_role("cell", name="scripted").first).to_be_visible()
    reach_end(stack, 1, "from a list")
    page.goto(set_page(stack, "from a list"))
    expect(page.get_by_role("cell", name="3 of 3")).to_be_visible()
    run(page, "demo", "pattern", rule="^Answer", other_settings='{"max_output_tokens": 8}')
    reach_end(stack, 2, "from a list")
    page.goto(set_page(stack, "from a list"))
    settled(page)
    assert_usable(page)

    page.get_by_role("link", name="Compare the newest runs").click()
    expect(page.get_by_text("Run 1, scripted").first).to_be_visible()
    expect(page.get_by_text("Run 2, demo").first).to_be_visible()
    page.get_by_label("Show").select_option("expected")
    expect(page.locator(".bubble-diff")).to_have_count(6)
    settled(page)
    assert_usable(page)
    [[asked]] = stack.sql(
        "SELECT count(*) FROM generations_generation g JOIN batches_batch b ON"
        " g.request_id LIKE 'batch_req_' || substr(b.public_id, 7) || '%%'"
        " WHERE b.metadata = %s",
        json.dumps({"set_of_cases": "from a list"}),
    )
    assert asked == 6


def test_a_model_judges_a_saved_chat(page: Page, stack: ServedStack, client: openai.OpenAI) -> None:
    made = chat(client, "Oslo")
    save(page, stack, "completions_storedcompletion", made.id, "one chat")
    expect(page.get_by_text("Saved 1 case.")).to_be_visible()
    form = page.locator("#run")
    form.get_by_label("Judging model").select_option("demo")
    run(page, "scripted", "model", rule="It names a capital.")
    reach_end(stack, 1, "one chat")
    [[verdict, reason]] = stack.sql(
        "SELECT r.verdict, r.reason FROM cases_caseresult r JOIN cases_caserun n ON n.id = r.run_id"
        " JOIN cases_caseset s ON s.id = n.case_set_id WHERE s.name = 'one chat'"
    )
    # The demo knows nothing, but its reply has the form that was asked for, if it got to its end.
    assert verdict in ("passed", "failed") or "did not say" in reason
    page.goto(set_page(stack, "one chat"))
    page.locator("summary", has_text="Oslo").click()
    page.get_by_label("Expected answer of case 1").fill("Bergen")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("was changed")).to_be_visible()
    run(page, "scripted", "exact")
    reach_end(stack, 2, "one chat")
    page.goto(set_page(stack, "one chat"))
    expect(page.get_by_role("cell", name="0 of 1")).to_be_visible()


def test_what_cannot_be_run_is_said_in_the_form(
    page: Page, stack: ServedStack, client: openai.OpenAI
) -> None:
    stored = respond(client, {"text": "x"})
    save(page, stack, "responses_api_storedresponse", stored.id, "refused")
    run(page, "scripted", "pattern", rule="(")
    expect(page.get_by_text("This cannot be used")).to_be_visible()
    run(page, "scripted", other_settings='{"temperature": 9}')
    expect(page.locator(".reason").filter(has_text="temperature")).to_be_visible()
    count = "SELECT count(*) FROM cases_caserun r JOIN cases_caseset s ON s.id = r.case_set_id"
    assert stack.sql(f"{count} WHERE s.name = 'refused'") == [(0,)]
    made = chat(client, "y")
    save(page, stack, "completions_storedcompletion", made.id, "refused")
    expect(page.get_by_text("are for /v1/responses")).to_be_visible()
