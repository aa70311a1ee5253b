"""docs/dependencies.md names every package of pyproject.toml, and no other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DOCUMENT = (ROOT / "docs" / "dependencies.md").read_text()


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[~<>=;\[ ]", requirement)[0].lower() for requirement in requirements}


def documented(heading: str, column: int) -> set[str]:
    """The packages in one column of the table below a heading."""
    section = DOCUMENT[DOCUMENT.index(f"\n{heading}\n") :]
    rows = section[section.index("|---|") :].split("\n\n")[0].splitlines()[1:]
    cells = [row.split("|")[column] for row in rows]
    return {re.sub(r"\[.*", "", name.strip()).lower() for cell in cells for name in _items(cell)}


def _items(cell: str) -> list[str]:
    return re.sub(r"\[[^\]]*\]", "", cell).split(",")


def test_packages_at_run_time_are_those_of_the_project() -> None:
    assert documented("## At run time", 1) == names(PROJECT["dependencies"])


def test_packages_of_extras_are_those_of_the_project() -> None:
    of_extras = [entry for extra, has in EXTRAS.items() if extra != "dev" for entry in has]
    assert documented("### Extras", 2) - {"below"} == names(of_extras)


def test_packages_for_development_are_those_of_the_project() -> None:
    of_run_time = names(PROJECT["dependencies"])
    assert documented("## For development", 1) - of_run_time == names(EXTRAS["dev"])


def test_code_that_is_named_is_there() -> None:
    named = re.findall(r"`((?:inference_site|worker)/[\w/]+(?:\.py|/))`", DOCUMENT)
    assert [path for path in named if not (ROOT / path).exists()] == []
