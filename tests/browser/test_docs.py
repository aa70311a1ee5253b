"""The page of the API's endpoints, ``/docs``: accessible closed, open, and while a key is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import (
    ALL_RULES,
    ONLY_COLOURS,
    assert_fits,
    faults,
    resize,
    settled,
)

_SMALL = """() => [...document.querySelectorAll("#swagger-ui :is(button, select, input, .link)")]
    .filter((control) => control.checkVisibility())
    .map((control) => [control.getBoundingClientRect(), control.outerHTML.slice(0, 120)])
    .filter(([box]) => box.width < 24 || box.height < 24)
    .map(([box, html]) => `${box.width} x ${box.height}: ${html}`)"""
"""Controls smaller than 24 pixels, wherever the mouse is: some grew only under it, in half a
second, and the rule of axe found them on slow machines alone."""
_DRAWN = """async () => {
    for (let frame = 0; frame < 4; frame++) await new Promise(requestAnimationFrame);
}"""
OPENED = ("audio-postTranscriptions", "conversations-getConversation")
"""A form, and a path with methods of several colours, in the order of the page."""


def open_form(page: Page, operation: str) -> None:
    """Open an operation and its form; its controls are large enough wherever the mouse is."""
    page.mouse.move(640, 400)
    block = page.locator(f"#operations-{operation}")
    while not block.count():  # The page holds only what is near.
        page.mouse.wheel(0, 500)
        page.evaluate(_DRAWN)  # Else a busy machine scrolls past it before it is drawn.
    block.locator(".opblock-summary-control").click()
    block.get_by_role("button", name="Try it out").click()
    expect(block.locator(".execute")).to_be_visible()
    page.mouse.move(0, 0)
    assert page.evaluate(_SMALL) == []
    block.locator(".opblock-summary").hover()
    assert page.evaluate(_SMALL) == []


def assert_key_can_be_given(page: Page, rules: dict[str, Any]) -> None:
    """The dialog for a key, which covers the page, has no fault."""
    page.locator(".btn.authorize").click()
    expect(page.locator(".modal-ux")).to_be_visible()
    assert faults(page, rules, ".modal-ux") == []
    page.get_by_role("button", name="Close").first.click()


def test_the_page_of_the_endpoints_has_no_fault_of_accessibility(
    open_page: Callable[..., Page],
) -> None:
    page = open_page("desktop", "light")
    page.route("**/v1/openapi.json", lambda route: route.fulfill(json=_cut(route.fetch().json())))
    page.goto("/docs", timeout=90_000)  # The document may be built now.
    expect(page.locator(".opblock-tag").first).to_be_visible(timeout=90_000)
    expect(page.get_by_role("heading", name="Inference site", level=1)).to_be_visible()
    for width in ("desktop", "phone"):
        resize(page, width)
        assert_fits(page)
    resize(page, "desktop")
    form, several = OPENED
    open_form(page, form)
    assert faults(page) == []
    # All but this operation is as it was.
    open_form(page, several)
    assert faults(page, ALL_RULES, f"#operations-{several}") == []
    page.locator(f"#operations-{form} .opblock-summary-control").click()  # Close it.
    resize(page, "phone")
    assert_fits(page)
    resize(page, "desktop")
    assert_key_can_be_given(page, ALL_RULES)
    page.get_by_role("link", name="Console").click()
    page.wait_for_url("**/admin/")


def test_the_colours_of_the_page_of_the_endpoints_can_be_told_apart_in_the_dark(
    open_page: Callable[..., Page],
) -> None:
    page = open_page("desktop", "dark")
    page.route("**/v1/openapi.json", lambda route: route.fulfill(json=_cut(route.fetch().json())))
    page.goto("/docs", timeout=90_000)  # The document may be built now.
    expect(page.locator(".opblock-tag").first).to_be_visible(timeout=90_000)
    for operation in OPENED:
        open_form(page, operation)
    assert faults(page, ONLY_COLOURS) == []
    assert_key_can_be_given(page, ONLY_COLOURS)


def _cut(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the paths of the opened operations, and one for each other set of methods.

    The colour of an operation is that of its method. The page takes ten seconds with all of them;
    ``test_admin`` opens it whole.
    """
    paths: dict[str, Any] = {}
    for path, item in document["paths"].items():
        is_opened = any(
            f"{operation['tags'][0]}-{operation['operationId']}" in OPENED
            for operation in item.values()
        )
        if is_opened or item.keys() not in [kept.keys() for kept in paths.values()]:
            paths[path] = item
    return {**document, "paths": paths}


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
    # Its clothes are not those of the operations, which the other tests of this file draw.
    empty = {"openapi": "3.1.0", "info": {"title": "Inference site", "version": "1"}, "paths": {}}
    page.route("**/v1/openapi.json", lambda route: route.fulfill(json=empty))
    page.goto("/admin/")
    page.evaluate("theme => localStorage.setItem('adminTheme', JSON.stringify(theme))", chosen)
    page.reload()
    settled(page)
    console = page.evaluate(_CLOTHES)
    page.goto("/docs")
    assert page.evaluate(_CLOTHES) == console
    page.evaluate("localStorage.removeItem('adminTheme')")
    page.reload()
    assert page.evaluate(_CLOTHES) != console, "without a choice, the system's scheme"
    expect(page.get_by_role("heading", name="Inference site", level=1)).to_be_visible()
