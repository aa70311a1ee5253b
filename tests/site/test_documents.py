"""Links between documents, and the files and methods that documents name, exist."""

from __future__ import annotations

import ast
import inspect
import re
from operator import attrgetter
from pathlib import Path

import openai
import pytest

from tests.first_hour.documents import DOCUMENTS, Example, examples

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if page.exists()
)
PROGRAMS = [
    example for page in DOCUMENTS for example in examples(page) if example.language == "python"
]
CURRENT = [page for page in PAGES if page.parent.name != "decisions"]
"""Decisions name the files of their time."""
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FOLDERS = (
    "inference_site",
    "completions",
    "responses_api",
    "worker",
    "tests",
    "tools",
    "benchmarks",
)
_FILE = re.compile(rf"`((?:{'|'.join(_FOLDERS)})/[\w./-]*(?:/|\.(?:py|html|js)))`")
_SHORT_NAME = re.compile(r"`([\w/-]+\.(?:py|html|js))`")
"""A file by the end of its path."""
FILES = [
    "/manage.py",
    *(f"/{f.relative_to(ROOT)}" for one in _FOLDERS for f in (ROOT / one).rglob("*.*")),
]
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = (re.sub(r"[`*]", "", heading).lower() for heading in _HEADING.findall(text_of(page)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def text_of(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for link in _LINK.findall(text_of(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    text = text_of(page)
    missing = {name for name in _FILE.findall(text) if not (ROOT / name).exists()}
    short = set(_SHORT_NAME.findall(text))
    missing |= {name for name in short if not any(file.endswith(f"/{name}") for file in FILES)}
    assert not {name for name in missing if not re.search("NAME|TYPE", name)}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.place)
def test_methods_of_the_official_client_take_what_examples_give_them(program: Example) -> None:
    """Also in the examples that are not run."""
    client = openai.OpenAI(api_key="-", admin_api_key="-")
    for call in ast.walk(ast.parse(program.text)):
        if not isinstance(call, ast.Call):
            continue
        if name := re.fullmatch(r"client\.([\w.]+)", ast.unparse(call.func)):
            method = attrgetter(name[1])(client)
            keywords = {word.arg: word.value for word in call.keywords if word.arg}
            inspect.signature(method).bind(*call.args, **keywords)
