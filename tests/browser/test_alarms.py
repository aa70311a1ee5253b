"""An alarm on its way: from what waits to the home page, a mail and a webhook."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import orjson
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import faults, keep_screenshot, settled
from tests.e2e.scripts import slow
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
    page.get_by_label("Way").select_option(way)
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
    stack.sql("DELETE FROM outbox_message")
    stack.sql("DELETE FROM outbox_endpoint")
