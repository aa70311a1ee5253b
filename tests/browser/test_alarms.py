"""An alarm on its way: from what waits to the home page, a mail and a webhook."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import orjson
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import (
    ONLY_COLOURS,
    assert_usable,
    faults,
    find,
    keep_screenshot,
    press,
    resize,
    settled,
)
from tests.e2e.scripts import respond, slow
from tests.notice_receivers import Hook, mail_server, receiver, signature
from tests.served_stack import ServedStack, wait_until

LONG_MS = 120_000


@pytest.fixture
def waiting(client: openai.OpenAI, stack: ServedStack, page: Page) -> Iterator[None]:
    """One request waits for a model that no worker has any more."""
    made = [
        client.responses.create(model="scripted", input=slow(4000), background=True).id
        for _ in range(5)
    ]
    count = "SELECT count(*) FROM generations_generation WHERE status = "
    wait_until(lambda: stack.sql(f"{count} 'running'")[0][0] == 4, 120, "four run")
    page.goto("/admin/fleet/")
    row = page.get_by_role("region", name="Models").get_by_role("row", name="scripted")
    row.get_by_role("button", name="Unload").click()
    expect(page.get_by_text("Unloading scripted…")).to_be_visible()
    for id_ in made[:4]:
        client.responses.cancel(id_)
    yield
    client.responses.cancel(made[4])
    page.goto("/admin/fleet/")
    row.get_by_role("button", name="Load", exact=True).click()
    expect(page.get_by_text("Loading scripted…")).to_be_visible()
    page.mouse.move(0, 0)  # The page refreshes while the pointer is elsewhere.
    expect(row.locator(".status")).to_have_text("loaded", timeout=LONG_MS)


def _add_recipient(page: Page, way: str, address: str) -> str:
    """Add who is told, and return the secret that the form shows."""
    page.goto("/admin/outbox/endpoint/add/")
    page.locator("#id_way").select_option(way)
    page.get_by_label("Address").fill(address)
    secret = page.get_by_label("Secret").input_value()
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("was added successfully")).to_be_visible()
    return secret


def _told_of(subject: str, hook: Hook) -> list[tuple[dict[str, str], bytes]]:
    """What was posted of it; on a busy machine there are alarms of other things too."""
    return [post for post in hook.posted if orjson.loads(post[1])["data"]["subject"] == subject]


def test_requests_without_a_worker_raise_an_alarm_that_is_shown_mailed_and_posted(
    page: Page, stack: ServedStack, waiting: None
) -> None:
    with mail_server(int(stack.env["EMAIL_PORT"])) as mailbox, receiver() as hook:
        _add_recipient(page, "email", "ops@example.org")
        secret = _add_recipient(page, "webhook", hook.url)
        page.goto("/admin/")  # It is there before the alarm is, and refreshes itself.
        banner = page.get_by_role("alert", name="Alarms")
        expect(banner).to_contain_text("1 request for scripted has waited", timeout=LONG_MS)
        settled(page)
        assert faults(page) == []
        keep_screenshot(page, "admin-alarm-desktop")
        mail = b"Subject: Firing: 1 request for scripted has waited"

        def both_are_told() -> bool:
            return bool(_told_of("scripted", hook)) and any(
                mail in sent.content for sent in mailbox.mails
            )

        wait_until(both_are_told, 120, "both are told")
    headers, body = _told_of("scripted", hook)[0]
    assert headers["webhook-signature"] == signature(secret, headers, body)
    assert orjson.loads(body)["type"] == "alarm.firing"
    page.goto("/admin/outbox/message/")
    expect(page.get_by_role("row").filter(has_text="ops@example.org").first).to_be_visible()
    _handle(page)
    stack.sql("DELETE FROM outbox_message")
    stack.sql("DELETE FROM outbox_endpoint")


def _handle(page: Page) -> None:
    """Acknowledge, reopen and snooze the alarm with the bell; follow its link to the queue."""
    page.goto("/admin/settings/")
    settled(page)
    bell = page.locator("#bell")
    expect(bell).to_have_accessible_name(re.compile(r"^\d+ open alarms?$"))
    before = int(bell.locator(".sr").inner_text().split()[0])
    listed = page.get_by_role("dialog", name="Alarms")
    expect(listed).to_be_hidden()
    press(page, bell)
    one = listed.get_by_role("listitem").filter(has_text="for scripted")
    expect(one.first).to_be_visible()
    assert_usable(page)
    resize(page, "desktop")
    keep_screenshot(page, "admin-bell-desktop")
    one.first.get_by_role("button", name="Acknowledge").click()
    expect(page.get_by_text("Acknowledged.", exact=True)).to_be_visible()
    expect(page).to_have_url(re.compile("/admin/settings/$"))
    # Others may have ended in the meantime.
    fewer = "|".join(str(count) for count in range(before))
    expect(bell).to_have_accessible_name(re.compile(rf"^({fewer}) open alarms?$"))
    bell.click()
    expect(one.filter(has_text="acknowledged by admin").first).to_be_visible()
    page.emulate_media(color_scheme="dark")
    assert faults(page, ONLY_COLOURS) == []
    page.emulate_media(color_scheme="light")
    one.filter(has_text="acknowledged by admin").get_by_role("button", name="Reopen").click()
    expect(page.get_by_text("Reopened.", exact=True)).to_be_visible()
    bell.click()
    one.first.get_by_role("button", name="Snooze 1 h").click()
    expect(page.get_by_text(re.compile("Snoozed until .* UTC"))).to_be_visible()
    page.goto("/admin/alarms/alarm/")
    row = page.get_by_role("row").filter(has_text="snoozed by admin until")
    expect(row.first).to_be_visible()
    assert_usable(page)
    resize(page, "desktop")
    page.get_by_role("link", name="for scripted has waited").first.click()
    page.wait_for_url("**/admin/queue/?model=scripted")


def test_a_rule_has_a_scope_recipients_a_preview_and_a_test(
    page: Page, client: openai.OpenAI, stack: ServedStack
) -> None:
    respond(client, {"text": "Soon."})
    page.goto("/admin/alarms/rule/add/")
    settled(page)
    preview = page.get_by_role("status").filter(has_text="fired")
    expect(preview).to_contain_text("to see how often it would have fired.")
    page.locator("#id_kind").select_option("queue_wait")
    page.locator("#id_bound").fill("86000")
    expect(preview).to_have_text("It would not have fired in the last week.")
    page.locator("#id_bound").fill("-1")
    expect(preview).to_contain_text("Fill in a valid condition")
    kept: Any = page.context.cookies()
    page.context.clear_cookies()  # The session is over.
    page.locator("#id_bound").fill("85000")
    expect(page.locator("#rule-preview")).to_have_text("There is no preview now.")
    page.context.add_cookies(kept)
    page.locator("#id_bound").fill("86000")
    page.locator("#id_model").select_option("scripted")
    find(page, "project", "default")
    page.get_by_label("More e-mail addresses").fill("night@example.org")
    assert_usable(page)
    resize(page, "desktop")
    keep_screenshot(page, "admin-rule-desktop")
    press(page, page.get_by_role("button", name="Save", exact=True))
    row = page.get_by_role("row").filter(has_text="night@example.org")
    expect(row).to_contain_text("model scripted")
    assert_usable(page)
    resize(page, "desktop")
    row.get_by_role("link").first.click()
    expect(preview).to_have_text("It would not have fired in the last week.")
    expect(page.get_by_role("checkbox", name="night@example.org (email)")).to_be_checked()
    with mail_server(int(stack.env["EMAIL_PORT"])) as mailbox:
        press(page, page.get_by_role("button", name="Send a test to the recipients"))
        expect(page.get_by_text("The test is on its way to 1 recipient")).to_be_visible()
        wait_until(
            lambda: any(b"This is a test of the rule" in mail.content for mail in mailbox.mails),
            120,
            "the test is mailed",
        )
    assert_usable(page)
    stack.sql("DELETE FROM alarms_rule_recipients")
    stack.sql("DELETE FROM alarms_rule WHERE bound = 86000")
    stack.sql("DELETE FROM outbox_message")
    stack.sql("DELETE FROM outbox_endpoint")
