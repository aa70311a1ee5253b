"""One stack and one browser for all tests of this folder; pages that fail on any complaint."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Locator,
    Page,
    expect,
    sync_playwright,
)

from tests.served_stack import ROOT, ServedStack

IMAGES = ROOT / "docs" / "images"
WIDTHS = {"desktop": (1440, 900), "laptop": (1024, 768), "phone": (390, 844)}
PICTURED = ("desktop", "phone")
"""The widest and the narrowest; of these the documentation has pictures."""
_NAMES = (
    *("chromium-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable"),
)
"""The shell has no windows of its own to draw: half the processor time."""
expect.set_options(timeout=120_000)


def find_chromium() -> str | None:
    """Where a Chromium is: ``CHROMIUM``, or one of the usual names."""
    found = (shutil.which(name) for name in _NAMES)
    return os.environ.get("CHROMIUM") or next(filter(None, found), None)


@pytest.fixture(scope="package")
def chromium() -> str:
    """The browser's program; without one the tests are skipped, unless one is required."""
    path = find_chromium()
    if path is None and os.environ.get("REQUIRE_BROWSER") != "1":
        pytest.skip("no Chromium was found: install one, or name it in CHROMIUM")
    assert path is not None, "REQUIRE_BROWSER=1, and no Chromium was found"
    return path


@pytest.fixture(scope="package")
def stack(chromium: str, plain_stack: ServedStack) -> ServedStack:
    """The whole product, running."""
    return plain_stack


@pytest.fixture(scope="package")
def client(stack: ServedStack) -> openai.OpenAI:
    """The official client."""
    return stack.client()


# Not for the session: while it lives, Django takes this thread for an event loop's.
@pytest.fixture(scope="package")
def browser(chromium: str) -> Iterator[Browser]:
    """A headless Chromium."""
    with sync_playwright() as playwright:
        # Nobody looks: what stands in for a graphics card would take a sixth of the time.
        args = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"]
        launched = playwright.chromium.launch(executable_path=chromium, args=args)
        yield launched
        launched.close()


@pytest.fixture(scope="package")
def password(stack: ServedStack) -> str:
    """The password of the user ``admin``, as the first run prints it."""
    found = re.search(r"user: admin +password: (\S+)", stack.text())
    assert found, stack.text()
    return found.group(1)


@pytest.fixture(scope="package")
def cookies(stack: ServedStack, browser: Browser, password: str) -> Any:
    """What a browser keeps after the login."""
    context = browser.new_context(base_url=stack.url)
    page = context.new_page()
    page.goto("/admin/")
    page.get_by_label("Username").fill("admin")
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{stack.url}/admin/password_change/")
    expect(page.get_by_text("Choose a password of your own")).to_be_visible()
    state = context.storage_state()
    context.close()
    return state


class Watch:
    """What a browser complains of, asks, and where its requests go; each is told once.

    Questions are answered with "OK".
    """

    def __init__(self, context: BrowserContext, host: str) -> None:
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._host = host
        context.on("dialog", self._dialog)
        context.on("console", self._console)
        context.on("weberror", lambda error: self.complaints.append(f"error: {error.error}"))
        context.on("request", lambda request: self._request(request.url))

    def _dialog(self, dialog: Dialog) -> None:
        self.asked.append(dialog.message)
        dialog.accept()

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console: {message.text}")

    def _request(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self._host:
            self.complaints.append(f"request to {url}")

    def told(self) -> list[str]:
        """What came since the last call."""
        complaints, self.complaints = self.complaints, []
        return complaints


@pytest.fixture(scope="package")
def window(stack: ServedStack, browser: Browser, cookies: Any) -> Iterator[tuple[Page, Watch]]:
    """The window of an operator who is logged in.

    It stays open: a new one takes a processor for seconds, and has none of the files of a page.
    """
    context = browser.new_context(
        base_url=stack.url, storage_state=cookies, reduced_motion="reduce"
    )
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.set_default_timeout(120_000)
    yield context.new_page(), Watch(context, urlsplit(stack.url).netloc)
    context.close()


_FORGET = """() => new Promise((resolve) => {
    for (const storage of [localStorage, sessionStorage]) storage.clear();
    indexedDB.deleteDatabase("playground").onsuccess = resolve;
}).then(() => null)"""


@pytest.fixture
def open_page(window: tuple[Page, Watch]) -> Iterator[Callable[..., Page]]:
    """The page in the window, as if it were new. What the browser complains of fails the test.

    The arguments are a width and a colour scheme.
    """
    page, watch = window

    def make(width: str = "desktop", scheme: Any = "light") -> Page:
        resize(page, width)
        page.emulate_media(color_scheme=scheme)
        return page

    yield make
    page.unroute_all()
    if page.url != "about:blank":
        # It runs nothing that could write them again, and keeps the process of the site's pages.
        page.goto("/static/console/favicon.svg")
        page.evaluate(_FORGET)
    assert watch.told() == []


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    """The page at the width of a desk, to be resized."""
    opened: Page = open_page()
    return opened


def resize(page: Page, width: str) -> None:
    """Give the window one of the widths."""
    w, h = WIDTHS[width]
    page.set_viewport_size({"width": w, "height": h})


def press(page: Page, control: Locator) -> None:
    """Click what can be clicked at each width."""
    for width in WIDTHS:
        resize(page, width)
        control.click(trial=True)
    control.click()


def find(page: Page, field: str, text: str) -> None:
    """Choose what a box of a form finds for a text."""
    page.locator(f"#id_{field} + .select2").click()
    page.locator(".select2-container--open .select2-search__field").fill(text)
    found = page.locator(".select2-results__option--highlighted", has_text=text)
    found.click()


_AXE = Axe()
_LOOK = """async ([within, rules]) => (await axe.run(within, {
    resultTypes: ["violations"], iframes: false, ...rules,
})).violations"""
_TARGETS = {"target-size": {"enabled": True}}
"""What can be clicked is 24 pixels wide and high, or has as much space; axe leaves it out."""
ALL_RULES: dict[str, Any] = {"rules": _TARGETS}
ONLY_COLOURS: dict[str, Any] = {"runOnly": ["color-contrast", "link-in-text-block"]}
"""To look at colours takes most of the time, and no colour depends on the width."""
ALL_BUT_COLOURS: dict[str, Any] = {
    "rules": {**_TARGETS, **{name: {"enabled": False} for name in ONLY_COLOURS["runOnly"]}}
}
_ONLY_SIZES: dict[str, Any] = {"runOnly": ["scrollable-region-focusable", "target-size"]}
_IS_SHOWN_AS_BEFORE = """() => {
    const shown = [...document.querySelectorAll("*")].filter(
        (one) => one.checkVisibility({ visibilityProperty: true }));
    const earlier = window.shownEarlier ??= [];
    const isKnown = earlier.some(
        (before) => before.length === shown.length && before.every((one, i) => one === shown[i]));
    earlier.push(shown);
    return isKnown;
}"""


def faults(page: Page, rules: dict[str, Any] = ALL_RULES, within: str = "html") -> list[str]:
    """The accessibility faults that axe-core finds within an element, and where they are."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_AXE.axe_script)
    return [
        f"{fault['id']}: {node['html'][:200]}"
        for fault in page.evaluate(_LOOK, [within, rules])
        for node in fault["nodes"]
    ]


_UNKNOWN_ICONS = """() => document.fonts.ready.then(() => {
    const pencil = document.createElement("canvas").getContext("2d");
    const nameOf = (element, part) => {
        const style = getComputedStyle(element, part);
        if (!style.fontFamily.includes("Material Symbols")) return null;
        const name = part ? style.content.match(/^"(.+)"$/)?.[1] : element.textContent.trim();
        pencil.font = `${style.fontSize} ${style.fontFamily}`;
        return name && pencil.measureText(name).width > 1.5 * parseFloat(style.fontSize) && name;
    };
    return [...document.querySelectorAll("body *")]
        .filter((element) => element.checkVisibility())
        .flatMap((one) => [null, "::before", "::after"].map((part) => nameOf(one, part)))
        .filter(Boolean);
})"""
"""An icon that the font lacks is drawn as the letters of its name; styles name some, too."""


def assert_usable(page: Page) -> None:
    """The page, just loaded, fits at any width, has all its icons, and no fault of accessibility.

    The elements are looked at on a desk and on a phone. If these show the same elements, only what
    depends on sizes is looked at again.
    """
    for width in WIDTHS:
        resize(page, width)
        assert_fits(page)
        if width not in PICTURED:
            continue
        assert page.evaluate(_UNKNOWN_ICONS) == [], "run tools/fonts.py"
        is_known = page.evaluate(_IS_SHOWN_AS_BEFORE)
        narrow = _ONLY_SIZES if is_known else ALL_BUT_COLOURS
        rules = ALL_RULES if width == "desktop" else narrow
        assert faults(page, rules) == [], (page.url, width)


def settled(page: Page) -> None:
    """Wait until the scripts of a page have drawn it."""
    page.locator("html:not([x-cloak])").wait_for(state="attached")


def assert_fits(page: Page) -> None:
    """The page is not wider than the window."""
    width = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert width <= 0, f"{page.url} is {width} pixels too wide"


def keep_screenshot(page: Page, name: str) -> None:
    """Write a picture for the documentation, when ``WRITE_SCREENSHOTS=1`` asks for them."""
    if os.environ.get("WRITE_SCREENSHOTS") == "1":
        page.screenshot(path=Path(IMAGES / f"{name}.png"))
