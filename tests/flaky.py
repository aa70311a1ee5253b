"""What failed runs once more, alone: a test that passes then is flaky, and is reported as such.

As a pytest plugin (``-p tests.flaky --outcomes-to FILE``) this writes the outcome of every test to
a file. As a command (``python -m tests.flaky FILE``) it runs the tests that failed, at most five,
in one process and without the others. Its exit status is 0 if all of them pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

MOST = 5
"""With more failures nothing is run again: that many races are not lost in one run."""


@dataclass
class Outcomes:
    """The outcomes of one run of pytest. A test whose teardown fails has failed."""

    exit_status: int = -1
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """By the ids of the tests, what their first failures printed."""

    @classmethod
    def read(cls, path: Path) -> Outcomes:
        """Return the outcomes in a file; those of a run that did not end if there are none."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError):
            return cls()

    def may_run_again(self) -> bool:
        """Whether tests failed, not more than may, and nothing else is wrong with the run.

        An error while tests are collected, an interrupt and an internal error have other statuses.
        """
        has_failed_tests = self.exit_status == pytest.ExitCode.TESTS_FAILED
        return has_failed_tests and 0 < len(self.failed) <= MOST


class _Recorder:
    """Collects the reports of all processes of a run and writes the file at its end."""

    def __init__(self, path: Path) -> None:
        self._path, self._outcomes = path, Outcomes()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a report, also that of a process of pytest-xdist that died during a test."""
        if report.failed:
            self._outcomes.failed.setdefault(report.nodeid, report.longreprtext)
        elif report.when == "call" and report.passed:
            self._outcomes.passed.append(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the file."""
        self._outcomes.exit_status = int(exitstatus)
        self._path.write_text(json.dumps(asdict(self._outcomes)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the file."""
    parser.addoption("--outcomes-to", help="write the outcome of each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Record the outcomes, in the process that hands out the tests."""
    path = config.getoption("--outcomes-to")
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Recorder(Path(path)))


def run_again(first: Outcomes) -> int:
    """Run what failed once more; print what is flaky, and return the exit status of the tests."""
    if not first.may_run_again():
        print(f"== {len(first.failed)} failed, exit status {first.exit_status}: no second run")
        return 1
    print(f"== {len(first.failed)} failed: once more, alone", flush=True)
    second = _outcomes_of(list(first.failed))
    flaky = {test: said for test, said in first.failed.items() if test in second.passed}
    for test in second.failed:
        flaky.pop(test, None)
    for test, said in flaky.items():
        print(f"== flaky: {test} failed, and passed alone. Its first failure:\n{said}")
    return int(second.exit_status != 0 or flaky.keys() != first.failed.keys())


def _outcomes_of(tests: list[str]) -> Outcomes:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "outcomes"
        command = [sys.executable, "-m", "pytest", "-p", "tests.flaky", "--outcomes-to", str(path)]
        env = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
        subprocess.run([*command, "-n", "0", *tests], env=env, check=False)
        return Outcomes.read(path)


if __name__ == "__main__":
    sys.exit(run_again(Outcomes.read(Path(sys.argv[1]))))
