"""Endpoints of webhooks: a test event, the log with its answer, and sending it again."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import assert_usable, find, settled
from tests.notice_receivers import Hook, receiver, signature
from tests.served_stack import ServedStack
from tests.waiting import wait_until


@pytest.fixture
def hook(stack: ServedStack) -> Iterator[Hook]:
    with receiver() as running:
        yield running
    stack.sql("DELETE FROM outbox_message")
    stack.sql("DELETE FROM outbox_endpoint")


def choose(page: Page, action: str) -> None:
    """Do this with the only endpoint of the list."""
    page.goto("/admin/outbox/endpoint/")
    page.locator("#result_list tbody input[type=checkbox]").first.check()
    page.locator("select[name=action]").select_option(label=action)
    page.get_by_role("button", name="Run", exact=True).click()


def test_an_endpoint_is_added_tested_rotated_and_sent_to_again(page: Page, hook: Hook) -> None:
    page.goto("/admin/outbox/endpoint/add/")
    page.get_by_label("Way").select_option("webhook")
    page.get_by_label("Address").fill(hook.url)
    find(page, "project", "default")
    page.get_by_label("batch.completed").check()
    settled(page)
    assert_usable(page)
    secret = page.get_by_label("Secret").input_value()
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("was added successfully")).to_be_visible()
    choose(page, "Send a test event")
    expect(page.get_by_text("The test is on its way")).to_be_visible()
    wait_until(lambda: hook.posted)
    headers, body = hook.posted[0]
    assert headers["webhook-signature"] == signature(secret, headers, body)
    assert orjson.loads(body)["type"] == "endpoint.test"
    page.goto("/admin/outbox/message/")
    row = page.get_by_role("row").filter(has_text="endpoint.test")
    expect(row.get_by_text("204")).to_be_visible()
    row.get_by_role("link").first.click()
    page.get_by_role("button", name="Send again").click()
    expect(page.get_by_text("The message is sent again.")).to_be_visible()
    settled(page)
    assert_usable(page)
    wait_until(lambda: len(hook.posted) == 2)
    assert hook.posted[1][0]["webhook-id"] == headers["webhook-id"]
    choose(page, "Give it a new secret")
    expect(page.get_by_text("Shown once")).to_be_visible()
