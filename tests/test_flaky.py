"""A test that fails and then passes alone does not fail a run; anything else that fails does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flaky import MOST, Outcomes

ROOT = Path(__file__).parent.parent
TESTS = """
import os
from pathlib import Path

import pytest


def is_first(name):
    seen = Path(name)
    was_there = seen.exists()
    seen.touch()
    return not was_there


def test_that_passes():
    pass


@pytest.mark.parametrize("text", ["a b", "[x::y]"])
def test_that_loses_a_race_once(text):
    assert not is_first(f"race-{text}"), "the race was lost"


def test_whose_process_dies_once():
    if is_first("crash"):
        os._exit(1)


@pytest.fixture
def untidy():
    yield
    assert not is_first("teardown")


def test_whose_fixture_fails_once(untidy):
    pass
"""


MAKE = """#!/bin/sh
case "$1" in
    test) exec .venv/bin/python -m pytest -p no:cacheprovider -n 2 test_it.py ;;
    lint) echo "all is well"; exit "$LINT_STATUS" ;;
esac
"""


def ci_run(folder: Path, tests: str, lint_status: int = 0) -> tuple[int, list[str]]:
    """Run .ci/run with these tests for all tests; return its exit status and what it printed.

    ``make`` is replaced: it installs nothing and needs no services.
    """
    for name in (".ci/run", "tests/__init__.py", "tests/flaky.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    programs = folder / "programs"
    programs.mkdir()
    for name, source in (("make", MAKE), ("promtool", "")):
        (programs / name).write_text(source)
        (programs / name).chmod(0o755)
    (folder / "pytest.ini").touch()
    (folder / "test_it.py").write_text(tests)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"PATH": f"{programs}:{env['PATH']}", "CHROMIUM": "none"}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    env["LINT_STATUS"] = str(lint_status)
    done = subprocess.run(
        [folder / ".ci" / "run"], env=env, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_what_passes_alone_is_printed_as_flaky_and_does_not_fail_the_run(tmp_path: Path) -> None:
    status, printed = ci_run(tmp_path, TESTS)
    told = [line for line in printed if line.startswith("== flaky: ")]
    assert {line.split("::", 1)[1].rpartition(" failed, and")[0] for line in told} == {
        "test_that_loses_a_race_once[a b]",
        "test_that_loses_a_race_once[[x::y]]",
        "test_whose_process_dies_once",
        "test_whose_fixture_fails_once",
    }
    again = printed[printed.index("== 4 failed: once more, alone") :]
    assert any("the race was lost" in line for line in again)  # Its first failure.
    assert "make test: exit status 0, after a second run of what had failed" in printed[-3]
    assert "3 failed, 2 passed, 1 error in" in printed[-2]
    assert "4 passed in" in printed[-1]  # Only these four ran.
    assert status == 0


@pytest.mark.slow
def test_what_fails_again_fails_the_run(tmp_path: Path) -> None:
    status, printed = ci_run(tmp_path, f"{TESTS}\n\ndef test_that_fails():\n    assert 1 == 2\n")
    assert sum(line.startswith("== flaky: ") for line in printed) == 4
    assert "make test: exit status 1, after a second run" in printed[-3]
    assert "1 failed, 4 passed in" in printed[-1]
    assert status == 1


@pytest.mark.slow
def test_a_run_in_which_all_pass_ends_with_one_closing_line(tmp_path: Path) -> None:
    status, printed = ci_run(tmp_path, "def test_it(): pass", lint_status=1)
    assert printed[-2] == "== make lint: exit status 1; make test: exit status 0"
    assert "1 passed in" in printed[-1]
    assert status == 1


def test_nothing_runs_again_after_many_failures_or_another_fault() -> None:
    failed = pytest.ExitCode.TESTS_FAILED
    few = {f"test_it.py::test_{n}": "" for n in range(MOST)}
    assert Outcomes(failed, failed=few).may_run_again()
    assert not Outcomes(failed, failed={**few, "test_it.py::test_more": ""}).may_run_again()
    assert not Outcomes(failed).may_run_again()
    assert not Outcomes(pytest.ExitCode.OK).may_run_again()
    for other in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
        assert not Outcomes(other, failed=few).may_run_again()


def test_without_a_record_nothing_runs_again(tmp_path: Path) -> None:
    assert not Outcomes.read(tmp_path / "none").may_run_again()
    (tmp_path / "half").write_text('{"exit_status": 1, "fai')
    assert not Outcomes.read(tmp_path / "half").may_run_again()
