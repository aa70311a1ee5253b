"""A key from its making to its end: its secret, its state, its buttons; and a key of one's own."""

from __future__ import annotations

import re

import openai
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import (
    ONLY_COLOURS,
    Watch,
    assert_usable,
    faults,
    find,
    keep_screenshot,
    press,
    resize,
    settled,
)
from tests.served_stack import ServedStack, wait_until

SECRET = re.compile(r"sk-[A-Za-z0-9_-]{40,}")


def _copied(page: Page) -> str:
    """Press Copy on the page of a secret, and return what was copied."""
    assert_usable(page)
    press(page, page.get_by_role("button", name="Copy", exact=True))
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    text = str(page.evaluate("navigator.clipboard.readText()"))
    assert SECRET.fullmatch(text)
    return text


def _models(stack: ServedStack, secret: str) -> list[str]:
    return [model.id for model in stack.client().with_options(api_key=secret).models.list()]


def _assert_dark_contrast(page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    page.reload()
    settled(page)
    assert faults(page, ONLY_COLOURS) == [], page.url
    page.emulate_media(color_scheme="light")


def test_a_key_is_made_copied_rotated_and_revoked_on_its_page(
    page: Page, window: tuple[Page, Watch], stack: ServedStack
) -> None:
    page.goto("/admin/accounts/apikey/add/")
    find(page, "project", "default")
    page.locator("#id_name").fill("desk")
    page.get_by_role("checkbox", name="usage:read").uncheck()
    page.get_by_role("checkbox", name=re.compile("^demo ")).check()
    press(page, page.get_by_role("button", name="Save", exact=True))
    first = _copied(page)
    assert "demo" in _models(stack, first)
    page.get_by_role("link", name="I have copied it").click()

    state = page.get_by_role("region", name="State")
    expect(state).to_contain_text("Works; last used")
    assert_usable(page)
    press(page, state.get_by_role("button", name="Rotate"))
    second = _copied(page)
    page.reload()  # It rotates nothing once more, and leads to the key.
    secrets = page.get_by_role("region", name="Secrets")
    expect(secrets.get_by_role("row").filter(has_text="Old")).to_have_count(1)
    expect(secrets.get_by_role("row").filter(has_text="Old")).to_contain_text("ago")
    keep_screenshot(page, "admin-key-secrets-desktop")
    assert_usable(page)
    _assert_dark_contrast(page)
    press(page, secrets.get_by_role("button", name="End the old one now"))
    expect(page.get_by_text("The old secret stops working within 5 seconds.")).to_be_visible()

    def is_refused(secret: str) -> bool:
        try:
            _models(stack, secret)
        except openai.AuthenticationError:
            return True
        return False

    wait_until(lambda: is_refused(first), 20, "the old secret is refused")
    assert not is_refused(second)
    with pytest.raises(openai.PermissionDeniedError):
        stack.client().with_options(api_key=second).get("/usage", cast_to=object)
    with pytest.raises(openai.PermissionDeniedError):
        stack.client().with_options(api_key=second).chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "Hi"}]
        )

    def is_told() -> bool:
        page.reload()
        return "the key does not allow the model" in state.inner_text()

    wait_until(is_told, 30, "the refusals are on the page")
    expect(state).to_contain_text("scope usage:read is missing")
    press(page, state.get_by_role("button", name="Revoke"))
    expect(state).to_contain_text(re.compile(r"Refused: revoked \d\d:\d\d UTC by admin\."))
    expect(page.get_by_role("button", name="Rotate")).to_have_count(0)
    asked = window[1].asked
    assert any("Revoke desk?" in question for question in asked)
    assert any("Rotate desk?" in question for question in asked)
    assert_usable(page)

    page.goto("/admin/accounts/apikey/")
    row = page.get_by_role("row").filter(has_text="desk")
    expect(row.locator(".status")).to_have_text("revoked")
    page.goto("/admin/accounts/project/1/change/")
    link = page.get_by_role("region", name="Keys").get_by_role("link", name="desk", exact=True)
    press(page, link)
    expect(state).to_contain_text("revoked")


def test_a_spent_budget_is_told_with_its_reset(page: Page, stack: ServedStack) -> None:
    stack.sql(
        "INSERT INTO accounts_budget (project_id, api_key_id, unit, every, amount, created_at) "
        "SELECT project_id, id, 'tokens', 'day', 0, now() FROM accounts_apikey WHERE name = 'desk'"
    )
    stack.sql("UPDATE accounts_apikey SET revoked_at = NULL WHERE name = 'desk'")
    [[pk]] = stack.sql("SELECT max(id) FROM accounts_apikey WHERE name = 'desk'")
    page.goto(f"/admin/accounts/apikey/{pk}/change/")
    state = page.get_by_role("region", name="State")
    expect(state).to_contain_text("Refused: budget of 0 tokens a day spent until 00:00 UTC.")
    expect(page.get_by_text("resets at 00:00 UTC")).to_be_visible()
    assert_usable(page)
    stack.sql("DELETE FROM accounts_budget WHERE amount = 0")


def test_a_project_gets_a_budget_for_each_end_user(page: Page, stack: ServedStack) -> None:
    page.goto("/admin/accounts/project/1/change/")
    resize(page, "desktop")
    page.get_by_role("link", name="Add another Budget").click()
    page.get_by_label("For each").first.select_option("each end user")
    page.get_by_label("Unit").first.select_option("tokens")
    page.get_by_label("Every").first.select_option("day")
    page.get_by_label("Amount").first.fill("5000000")
    page.get_by_role("link", name="Add another Limit of a model").click()
    page.locator("#id_model_limits-0-model").select_option("scripted")
    page.locator("#id_model_limits-0-tokens_per_minute").fill("40000")
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_url("**/admin/accounts/project/")
    page.goto("/admin/accounts/project/1/change/")
    name = "Budget of a day, whole project, for each end user (the highest)"
    expect(page.get_by_role("progressbar", name=name)).to_be_visible()
    expect(page.get_by_text("0 used up; resets at 00:00 UTC")).to_be_visible()
    limit = page.get_by_role("progressbar", name="Tokens in this minute for scripted")
    expect(limit).to_be_visible()
    assert_usable(page)
    page.goto("/admin/accounts/budget/")
    expect(page.get_by_role("row").filter(has_text="end user")).to_contain_text("5,000,000 tokens")
    assert_usable(page)
    stack.sql("DELETE FROM accounts_budgetspend")
    stack.sql("DELETE FROM accounts_budget WHERE amount = 5000000")
    stack.sql("DELETE FROM accounts_modellimit")


def test_a_user_makes_a_key_of_their_own(page: Page, stack: ServedStack) -> None:
    page.goto("/admin/my-keys/")
    expect(page.get_by_text("No project lets you make keys.")).to_be_visible()
    page.goto("/admin/accounts/project/1/change/")
    find(page, "members", "admin")
    press(page, page.get_by_role("button", name="Save", exact=True))
    page.goto("/admin/my-keys/")
    settled(page)
    assert_usable(page)
    page.locator("#id_name").fill("notebook")
    press(page, page.get_by_role("button", name="Make a key"))
    secret = _copied(page)
    assert _models(stack, secret)
    page.get_by_role("link", name="I have copied it").click()
    own = page.get_by_role("region", name="notebook")
    expect(own).to_contain_text("Works; last used")
    assert_usable(page)
    keep_screenshot(page, "admin-my-keys-desktop")
    _assert_dark_contrast(page)
    press(page, page.get_by_role("button", name="Copy").first)
    snippet = str(page.evaluate("navigator.clipboard.readText()"))
    assert snippet.startswith(f"curl {stack.url}/v1/chat/completions")
    press(page, own.get_by_role("button", name="Revoke"))
    expect(own).to_contain_text("Refused: revoked")
    stack.sql("DELETE FROM accounts_project_members")
