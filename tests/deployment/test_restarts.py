"""How soon the supervisor starts a process again that has died."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from inference_site.supervisor.processes import Child, Program
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


STANDS_BY = """
if [ "$1" = --standby ]; then read line || exit 0; fi
echo up
exec sleep 60
"""


def test_a_spare_takes_over_and_ends_with_what_it_stands_by_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", STANDS_BY, "sh"]
    child = Child(Program("sleeper", command, log, has_spare=True), dict(os.environ), print)
    child.start()
    try:
        first, later = child.pid, time.monotonic() + 60
        child.keep_spare(time.monotonic())
        assert children_of_this_process() == {first}  # It has not run for long.
        child.keep_spare(later)
        child.keep_spare(later)
        (spare,) = children_of_this_process() - {first}
        wait_until(lambda: log.read_text() == "up\n", 120, "the first")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: child.pid is None, 120, "its end")
        child.restart_if_dead(later)
        child.restart_if_dead(later)
        assert child.pid == spare
        wait_until(lambda: log.read_text() == "up\nup\n", 120, "the spare")
        child.keep_spare(later + 60)
        assert len(children_of_this_process()) == 2
    finally:
        child.terminate()
        child.wait(time.monotonic() + 20)
    assert not children_of_this_process()


def children_of_this_process() -> set[int]:
    return {
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "sleep" in " ".join(child.cmdline())
    }
