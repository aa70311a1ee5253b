"""How soon the supervisor starts a process again that has died."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from inference_site.ops.serve.processes import Child, Program
from tests.served_stack import wait_until


def test_one_that_has_run_for_a_while_comes_back_at_once_and_one_that_does_not_start_ever_later(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    child = Child(Program("short", ["sleep", "0"], tmp_path / "log"), {}, said.append)
    delays = []
    for ran_s in (1, 1, 1, 60, 1, 1):
        child.start()
        wait_until(lambda: child.pid is None, 120, "its end")
        child.restart_if_dead(time.monotonic() + ran_s)
        delays.append(said[-1].partition("restarting in ")[2].split()[0])
    assert delays == ["0.5", "1", "2", "0", "0.5", "1"]


def test_one_that_was_killed_by_a_signal_without_a_name_comes_back(tmp_path: Path) -> None:
    said: list[str] = []
    program = Program("short", ["sh", "-c", "kill -36 $$"], tmp_path / "log")
    child = Child(program, os.environ, said.append)
    child.start()
    wait_until(lambda: child.pid is None, 120, "its end")
    child.restart_if_dead(time.monotonic() + 60)
    assert "short was killed by signal 36; restarting in 0 s" in said[-1]


def test_one_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "logs").mkdir()
    child = Child(Program("short", ["sleep", "0"], tmp_path / "logs" / "log"), {}, said.append)
    child.start()
    wait_until(lambda: child.pid is None, 120, "its end")
    (tmp_path / "logs").rename(tmp_path / "moved")
    now = time.monotonic()
    open_files = len(os.listdir("/proc/self/fd"))
    for later_s in (0, 1, 2, 4):
        child.restart_if_dead(now + later_s)
    assert [line.rpartition("No such file or directory")[2] for line in said[1:]] == [
        f": '{tmp_path}/logs/log'; trying again in {delay_s} s" for delay_s in (1, 2, 4)
    ]
    assert len(os.listdir("/proc/self/fd")) <= open_files
    (tmp_path / "moved").rename(tmp_path / "logs")
    child.restart_if_dead(now + 60)
    wait_until(lambda: child.pid is None, 120, "its end")
    assert len(said) == 4


STATES = """
trap 'echo stopping >&$NOTIFY_FD; sleep 0.2; exit 0' TERM
trap 'echo restart >&$NOTIFY_FD' HUP
echo up ${REPLACES_PID:+instead}
[ -e started ] && sleep 0.2
touch started
[ -e broken ] && echo failed >&$NOTIFY_FD || echo ready >&$NOTIFY_FD
while true; do sleep 0.1; done
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """A program that says how far it is, and has started."""
    monkeypatch.chdir(tmp_path)
    child = Child(Program("told", ["bash", "-c", STATES], tmp_path / "log"), os.environ, print)
    child.start()
    wait_until((tmp_path / "started").exists, 60, "its start")
    yield child
    child.terminate()
    child.wait(time.monotonic() + 20)


def seen(child: Child) -> bool:
    child.restart_if_dead(time.monotonic())
    return True


def test_a_process_that_stops_drains_while_the_next_one_starts(
    program: Child, tmp_path: Path
) -> None:
    first = program.pid
    assert first is not None
    os.kill(first, signal.SIGTERM)
    wait_until(lambda: seen(program) and program.pid != first, 60, "the next")
    assert program.pid is not None
    assert psutil.pid_exists(first)
    wait_until(lambda: seen(program) and not psutil.pid_exists(first), 60, "the end of the first")
    log = tmp_path / "log"
    wait_until(lambda: log.read_text() == "up\nup instead\n", 60, "the next one's beginning")


def test_one_that_is_to_be_replaced_goes_on_until_the_next_is_ready(program: Child) -> None:
    first = program.pid
    assert first is not None
    os.kill(first, signal.SIGHUP)
    wait_until(lambda: seen(program) and program.is_rolling, 60, "the next")
    program.roll(time.monotonic())  # It is already done.
    assert program.pid == first
    wait_until(lambda: seen(program) and program.pid != first, 60, "the switch")
    assert not program.is_rolling
    wait_until(lambda: seen(program) and not psutil.pid_exists(first), 60, "the end of the first")


def test_one_goes_on_when_the_next_does_not_get_ready(program: Child, tmp_path: Path) -> None:
    first = program.pid
    (tmp_path / "broken").touch()
    program.roll(time.monotonic())
    assert program.is_rolling
    wait_until(lambda: seen(program) and not program.is_rolling, 60, "it is dropped")
    assert program.pid == first


def test_one_goes_on_when_the_next_cannot_be_started(program: Child, tmp_path: Path) -> None:
    first = program.pid
    (tmp_path / "log").rename(tmp_path / "earlier")
    (tmp_path / "log").mkdir()
    program.roll(time.monotonic())
    assert not program.is_rolling
    assert program.pid == first


def test_one_that_dies_is_replaced_by_the_next_that_was_on_its_way(program: Child) -> None:
    first = program.pid
    assert first is not None
    program.roll(time.monotonic())
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: seen(program) and not program.is_rolling, 60, "the switch")
    assert program.pid not in (None, first)
    assert program.exit_status is None
