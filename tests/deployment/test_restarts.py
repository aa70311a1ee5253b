"""How soon the supervisor starts a process again that has died."""

from __future__ import annotations

import time
from pathlib import Path

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
        wait_until(lambda: child.pid is None, 20, "its end")
        child.restart_if_dead(time.monotonic() + ran_s)
        delays.append(said[-1].partition("restarting in ")[2].split()[0])
    assert delays == ["0.5", "1", "2", "0", "0.5", "1"]
