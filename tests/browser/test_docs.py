"""The page of the API's endpoints, ``/docs``: accessible closed, open, and while a key is given."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.browser.conftest import assert_fits, faults, resize

OPENED = ("/v1/audio/transcriptions", "/v1/conversations/{conversation_id}")
"""A form, and a path with methods of each colour."""


def test_the_page_of_the_endpoints_has_no_fault_of_accessibility(
    open_page: Callable[..., Page],
) -> None:
    page = open_page("desktop")
    page.goto("/docs", timeout=90_000)  # The document is built now.
    sections = page.locator(".opblock-tag-section")
    expect(sections.first).to_be_visible()
    expect(page.get_by_role("heading", name="Inference site", level=1)).to_be_visible()
    for width in ("desktop", "phone"):
        resize(page, width)
        assert_fits(page)
    resize(page, "desktop")
    # To look at colours takes seconds for each section, so the others are closed.
    for section in sections.all():
        if not any(section.locator(f"[data-path='{path}']").count() for path in OPENED):
            section.locator(".opblock-tag").click()
    for path in OPENED:
        block = page.locator(".opblock").filter(has=page.locator(f"[data-path='{path}']")).first
        block.locator(".opblock-summary-control").click()
        block.get_by_role("button", name="Try it out").click()
        expect(block.locator(".execute")).to_be_visible()
    assert faults(page) == []
    page.locator(".btn.authorize").click()
    expect(page.locator(".modal-ux")).to_be_visible()
    assert faults(page) == []
    page.get_by_role("button", name="Close").first.click()
    page.get_by_role("link", name="Console").click()
    page.wait_for_url("**/admin/")
