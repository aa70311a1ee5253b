"""The admin from the keyboard alone: the command palette, the shortcuts, the link past the menu."""

from __future__ import annotations

from collections.abc import Callable

import openai
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ONLY_COLOURS, assert_usable, faults, resize, settled
from tests.e2e.scripts import respond


def _search(page: Page, term: str) -> None:
    """Open the palette with the keyboard, and type."""
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Pages, actions")).to_be_focused()
    page.keyboard.type(term)


def test_the_palette_leads_to_the_page_of_an_id(page: Page, client: openai.OpenAI) -> None:
    response = respond(client, {"text": "Cats sleep."})
    page.goto("/admin/queue/")
    settled(page)
    _search(page, response.id)
    page.keyboard.press("Enter")  # At once: the search is not finished.
    page.wait_for_url("**/admin/responses_api/storedresponse/*/change/")
    expect(page.get_by_text("Cats sleep.").first).to_be_visible()


def test_the_palette_is_used_with_arrows_and_closed_with_escape(page: Page) -> None:
    page.goto("/admin/queue/")
    settled(page)
    opener = page.get_by_role("button", name="Search")
    opener.focus()
    page.keyboard.press("Enter")
    options = page.get_by_role("option")
    expect(options.first).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("option", selected=True)).to_contain_text("Change my password")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("option", selected=True)).to_contain_text("Queue")
    assert_usable(page)
    resize(page, "desktop")
    page.keyboard.type("no such thing")
    expect(page.get_by_text("Nothing found.")).to_be_visible()
    page.keyboard.press("Enter")
    assert faults(page) == []
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")  # Chromium: the first empties the field.
    expect(page.locator("#palette")).to_be_hidden()
    expect(opener).to_be_focused()
    assert page.url.endswith("/admin/queue/")


def test_the_focus_in_the_list_of_alarms_is_kept_when_the_page_refreshes_itself(page: Page) -> None:
    page.goto("/admin/queue/")
    settled(page)
    page.locator("#bell").focus()
    page.keyboard.press("Enter")
    page.mouse.move(0, 0)
    link = page.locator("#bell-list").get_by_role("link", name="All alarms")
    link.focus()
    with page.expect_response("**/admin/queue/"):
        pass
    page.wait_for_timeout(500)
    expect(link).to_be_focused()


def test_results_of_an_earlier_term_are_gone_when_the_server_cannot_be_reached(page: Page) -> None:
    page.goto("/admin/queue/")
    settled(page)
    _search(page, "usage")
    expect(page.get_by_role("option").first).to_contain_text("Usage")
    page.evaluate("() => { window.fetch = () => Promise.reject(new TypeError('lost')); }")
    page.keyboard.type(" of keys")
    expect(page.get_by_text("The server cannot be reached.")).to_be_visible()
    expect(page.get_by_role("option")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_palette_has_enough_contrast(open_page: Callable[..., Page], scheme: str) -> None:
    page = open_page("desktop", scheme)
    page.goto("/admin/queue/")
    settled(page)
    _search(page, "api")
    expect(page.get_by_role("option").first).to_contain_text("API")
    assert faults(page, ONLY_COLOURS) == []


def test_the_first_stop_of_the_tabulator_skips_the_menu(page: Page) -> None:
    page.goto("/admin/accounts/apikey/")
    settled(page)
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    assert faults(page, {}) == []  # Not what it covers: that has too little space meanwhile.
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.getElementById('content').contains(document.activeElement)")


def test_a_switch_of_a_form_shows_the_focus(page: Page) -> None:
    page.goto("/admin/mcp_servers/mcpserver/add/")
    settled(page)
    switch = page.get_by_label("Active")
    switch.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    expect(switch).to_be_focused()
    expect(switch).to_have_css("outline-style", "solid")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_question_mark_shows_the_shortcuts_unless_it_is_typed(
    open_page: Callable[..., Page], scheme: str
) -> None:
    page = open_page("desktop", scheme)
    page.goto("/admin/accounts/apikey/")
    settled(page)
    shortcuts = page.get_by_role("dialog", name="Keyboard shortcuts")
    page.keyboard.press("/")
    page.keyboard.type("?")
    expect(page.locator("#searchbar")).to_have_value("?")
    expect(shortcuts).to_be_hidden()
    page.keyboard.press("Tab")
    page.keyboard.press("?")
    expect(shortcuts).to_be_visible()
    assert faults(page) == []
    page.keyboard.press("Enter")
    expect(shortcuts).to_be_hidden()
