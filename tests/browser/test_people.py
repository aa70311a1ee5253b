"""A colleague is invited, comes in with a role, and all of these pages can be used by everybody."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import (
    ONLY_COLOURS,
    Watch,
    assert_usable,
    faults,
    keep_screenshot,
    press,
    resize,
    settled,
)
from tests.served_stack import ServedStack

_PASSWORD = "correct horse 7"


def looked_at(page: Page) -> None:
    """The page, just loaded, is accessible at all widths, and dark, too."""
    settled(page)
    assert_usable(page)
    resize(page, "desktop")
    assert_dark_contrast(page)


def assert_dark_contrast(page: Page) -> None:
    """Load the page in the dark and find enough contrast; back in the light, it is not reloaded."""
    page.emulate_media(color_scheme="dark")
    page.reload()
    settled(page)
    assert faults(page, ONLY_COLOURS) == [], page.url
    page.emulate_media(color_scheme="light")


def test_a_colleague_is_invited_and_comes_in_with_a_role(
    page: Page, browser: Browser, stack: ServedStack
) -> None:
    page.goto("/admin/auth/user/add/")
    looked_at(page)
    page.get_by_label("Username").fill("grace")
    page.get_by_role("checkbox", name="operator").check()
    keep_screenshot(page, "admin-invite")
    press(page, page.get_by_role("button", name="Save", exact=True))
    expect(page.get_by_text("The invitation of grace works once")).to_be_visible()
    assert_usable(page)
    link = re.search(r"http://\S+", page.locator(".secrets").inner_text())
    assert link is not None
    page.goto("/admin/auth/user/")
    expect(page.get_by_role("row").filter(has_text="grace")).to_contain_text("invited")
    assert_dark_contrast(page)  # In the light the pages of the menu are looked at, all of them.

    context = browser.new_context(base_url=stack.url, reduced_motion="reduce")
    watch = Watch(context, urlsplit(stack.url).netloc)
    hers = context.new_page()
    hers.goto(link.group())
    looked_at(hers)
    hers.locator("#id_new_password1").fill(_PASSWORD)
    hers.locator("#id_new_password2").fill(_PASSWORD)
    press(hers, hers.get_by_role("button", name="Set the password and log in"))
    hers.wait_for_url(f"{stack.url}/admin/")
    resize(hers, "desktop")  # As wide as the menu is shown without a click.
    expect(hers.get_by_role("link", name="Queue").first).to_be_visible()
    expect(hers.get_by_role("link", name="Users")).to_have_count(0)
    context.clear_cookies()
    hers.goto(link.group())
    expect(hers.get_by_text("This link does not work")).to_be_visible()
    looked_at(hers)
    for address in ("/admin/login/", "/admin/reset/"):
        hers.goto(address)
        looked_at(hers)
    context.close()
    assert watch.told() == []

    page.goto("/admin/admin/logentry/")
    expect(page.get_by_role("row").filter(has_text="By password").first).to_be_visible()
    assert_dark_contrast(page)


def test_words_of_a_role_are_not_broken_on_a_phone(page: Page) -> None:
    page.goto("/admin/auth/group/")
    settled(page)
    resize(page, "phone")
    words = page.locator(".field-may b")
    assert words.count() >= 3
    heights = words.evaluate_all("all => all.map((one) => one.getBoundingClientRect().height)")
    assert max(heights) < 24, "each verb stands in one line"
