"""The page of the API's endpoints, ``/docs``: accessible closed, open, and while a key is given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import assert_fits, faults, resize, settled

_SMALL = """() => [...document.querySelectorAll("#swagger-ui :is(button, select, input, .link)")]
    .filter((control) => control.checkVisibility())
    .map((control) => [control.getBoundingClientRect(), control.outerHTML.slice(0, 120)])
    .filter(([box]) => box.width < 24 || box.height < 24)
    .map(([box, html]) => `${box.width} x ${box.height}: ${html}`)"""
"""Controls smaller than 24 pixels, wherever the mouse is: some grew only under it, in half a
second, and the rule of axe found them on slow machines alone."""
OPENED = ("audio-postTranscriptions", "conversations-getConversation")
"""A form, and a path with methods of several colours, in the order of the page."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_the_endpoints_has_no_fault_of_accessibility(
    open_page: Callable[..., Page], scheme: str
) -> None:
    page = open_page("desktop", scheme)
    page.goto("/docs", timeout=90_000)  # The document is built now.
    expect(page.locator(".opblock-tag").first).to_be_visible(timeout=90_000)
    expect(page.get_by_role("heading", name="Inference site", level=1)).to_be_visible()
    for width in ("desktop", "phone"):
        resize(page, width)
        assert_fits(page)
    resize(page, "desktop")
    page.mouse.move(640, 400)
    for operation in OPENED:
        block = page.locator(f"#operations-{operation}")
        while not block.count():  # The page holds only what is near.
            page.mouse.wheel(0, 500)
            page.wait_for_timeout(50)
        block.locator(".opblock-summary-control").click()
        block.get_by_role("button", name="Try it out").click()
        expect(block.locator(".execute")).to_be_visible()
        page.mouse.move(0, 0)
        assert page.evaluate(_SMALL) == []
        block.locator(".opblock-summary").hover()
        assert page.evaluate(_SMALL) == []
        assert faults(page) == []
    page.locator(".btn.authorize").click()
    expect(page.locator(".modal-ux")).to_be_visible()
    assert faults(page) == []
    page.get_by_role("button", name="Close").first.click()
    page.get_by_role("link", name="Console").click()
    page.wait_for_url("**/admin/")


_CLOTHES = """() => {
    const of = (element) => getComputedStyle(element);
    return [of(document.body).fontFamily, of(document.querySelector("#main") ?? document.body)
        .backgroundColor];
}"""


@pytest.mark.parametrize("chosen", ["light", "dark"])
def test_the_page_of_the_endpoints_looks_as_the_console_does(
    open_page: Callable[..., Page], chosen: str
) -> None:
    other = "dark" if chosen == "light" else "light"
    page = open_page("desktop", other)
    page.goto("/docs")
    page.evaluate("theme => localStorage.setItem('adminTheme', JSON.stringify(theme))", chosen)
    page.goto("/admin/")
    settled(page)
    console = page.evaluate(_CLOTHES)
    page.goto("/docs", timeout=90_000)
    assert page.evaluate(_CLOTHES) == console
    page.evaluate("localStorage.removeItem('adminTheme')")
    page.reload()
    assert page.evaluate(_CLOTHES) != console, "without a choice, the system's scheme"
    expect(page.locator(".opblock-tag").first).to_be_visible(timeout=90_000)
