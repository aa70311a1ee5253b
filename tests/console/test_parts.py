"""The page of the console's parts has all of them, and templates have no others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from django.test import Client

from tests.served_stack import ROOT

PARTS = ("button", "table", "dl", "dialog", "progress", "figure")
"""Elements that are parts wherever they stand."""
_CSS = ROOT / "inference_site/core/admin_pages/static/admin_pages/pages.css"
_BADGES = ROOT / "inference_site/console/static/console/admin.css"
_MADE_BY_SCRIPTS = {"chart-tip", "select2", "select2-container"}
_UNFOLD = ("/templates/unfold/", "/templates/registration/", "/templates/people/")
"""Replacements of the theme's own templates, which have its classes."""


class _Elements(HTMLParser):
    """Collects the classes of each element, by its tag."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, set[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the classes."""
        self.found.append((tag, set((dict(attrs).get("class") or "").split())))


def _elements(html: str) -> list[tuple[str, set[str]]]:
    parser = _Elements()
    parser.feed(re.sub(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", " ", html, flags=re.DOTALL))
    return parser.found


def unknown_parts(html: str, shown: dict[str, set[str]]) -> list[str]:
    """The elements of a template that have none of the classes that the page of parts shows."""
    everything = set().union(*shown.values())
    return [
        f"<{tag} {' '.join(sorted(classes))}>"
        for tag, classes in _elements(html)
        if (tag in PARTS and not classes & shown[tag] and (classes or tag not in _BARE))
        or any(name.startswith("button-") and name not in everything for name in classes)
    ]


_BARE = {"dl", "progress"}
"""These have the looks of the part that they are in."""


@pytest.fixture
def shown(admin: Client) -> dict[str, set[str]]:
    """The classes of each tag on the page."""
    classes: dict[str, set[str]] = defaultdict(set)
    page = admin.get("/admin/parts/").content.decode()
    for tag, names in _elements(page[page.index('class="page"') - 10 :]):
        classes[tag] |= names
    classes["dialog"] = {"desk-dialog"}  # That of the shortcuts, which is on every page.
    return classes


def _templates() -> list[Path]:
    found = (
        path
        for app in ("inference_site", "completions", "responses_api")
        for path in (ROOT / app).rglob("templates/**/*.html")
    )
    return [path for path in found if not any(part in str(path) for part in _UNFOLD)]


def test_no_template_has_a_part_of_its_own(shown: dict[str, set[str]]) -> None:
    shown["button"] |= {"bell"}  # Of the header.
    templates = _templates()
    assert len(templates) > 30
    faults = {str(path): unknown_parts(path.read_text(), shown) for path in templates}
    assert {path: of for path, of in faults.items() if of} == {}


@pytest.mark.parametrize(
    "html",
    [
        '<button class="button-blue">Save</button>',
        '<a class="button-big" href="/">Save</a>',
        "<button>Save</button>",
        '<table class="striped"></table>',
        '<dialog class="{% if a %}modal{% endif %}"></dialog>',
    ],
)
def test_a_part_of_its_own_is_found(shown: dict[str, set[str]], html: str) -> None:
    assert unknown_parts(f"<div>{html}</div>", shown) != []


def test_every_class_of_the_parts_is_shown(shown: dict[str, set[str]]) -> None:
    def classes(css: Path, pattern: str) -> set[str]:
        return set(re.findall(pattern, re.sub(r"/\*.*?\*/|\{[^{}]*\}", "{}", css.read_text())))

    styled = classes(_CSS, r"\.([a-z][\w-]*)") | classes(_BADGES, r"\.(status-[\w-]+)")
    everything = set().union(*shown.values())
    assert len(styled) > 70
    assert styled - everything - _MADE_BY_SCRIPTS - {"dark"} == set()


def test_the_page_is_for_administrators(staff: Callable[..., Client]) -> None:
    assert staff().get("/admin/parts/").status_code == 403
    assert staff("auth.view_user").get("/admin/parts/").status_code == 200
