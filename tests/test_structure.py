"""The source keeps its shape: packages that say what they are, no cycle of apps."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.structure import Module, cycle, feature_apps, graph, modules, modules_by_folder


@pytest.fixture(scope="module")
def found() -> dict[str, Module]:
    """The application's modules."""
    return modules(Path(__file__).parent.parent)


def test_no_app_needs_an_app_that_needs_it(found: dict[str, Module]) -> None:
    assert cycle(graph(found, feature_apps(found))) == []


def test_a_cycle_is_found_through_imports_and_foreign_keys(tmp_path: Path) -> None:
    for name, source in {
        "worker/apps.py": "",
        "worker/models.py": 'owner = models.ForeignKey("completions.Project", models.CASCADE)',
        "completions/apps.py": "",
        "completions/views.py": "def view():\n    from worker.models import Row",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    small = modules(tmp_path)
    assert cycle(graph(small, feature_apps(small))) == ["completions", "worker", "completions"]
    assert modules_by_folder(small) == {"worker": 2, "completions": 2}


def test_every_package_says_in_one_sentence_what_it_is(found: dict[str, Module]) -> None:
    inits = (m for m in found.values() if m.path.name == "__init__.py")
    silent = [m.name for m in inits if not (ast.get_docstring(m.tree) or "").endswith(".")]
    assert silent == []
