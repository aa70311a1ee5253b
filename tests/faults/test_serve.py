"""``manage.py serve``: starting, stopping, starting again."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from typing import Any

import openai
import psutil

from tests.served_stack import ROOT, ServedStack, wait_until


def descendants(stack: ServedStack) -> list[psutil.Process]:
    """Every process of the stack, PostgreSQL's too."""
    assert stack.process is not None
    own = psutil.Process(stack.process.pid).children(recursive=True)
    postmaster = psutil.Process(stack.postgres_pid())
    return [*own, postmaster, *postmaster.children(recursive=True)]


def hello(stack: ServedStack) -> Any:
    return stack.client().chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello"}]
    )


def test_children_end_with_a_supervisor_that_is_killed(stack: ServedStack) -> None:
    assert stack.process is not None
    own = psutil.Process(stack.process.pid).children(recursive=True)
    stack.process.kill()
    stack.process.wait()
    wait_until(lambda: not any(map(still_runs, own)), 120, f"the end of {own}")
    stack.start()
    wait_until(lambda: is_answered(stack), 120, "an answer of the new processes")


def still_runs(process: psutil.Process) -> bool:
    """Whether it does more than wait to be told of."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_answered(stack: ServedStack) -> bool:
    """Whether the model answers: its lease may for seconds be that of a worker that was killed."""
    try:
        return bool(hello(stack).choices[0].finish_reason == "stop")
    except openai.InternalServerError:
        return False


def stops_and_leaves_nothing(stack: ServedStack, number: signal.Signals) -> Any:
    """Stop it while something is streamed; return an answer that it gave before."""
    first = hello(stack)
    streaming = stack.client().chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": '[{"text": "x"}, {"sleep_ms": 60000}]'}],
        stream=True,
    )
    next(iter(streaming))
    processes = descendants(stack)
    assert len(processes) >= 5
    said = len(stack.text())
    stack.stop(number)  # Fails when it takes far longer than any part of it may.
    assert [process for process in processes if still_runs(process)] == []
    assert "restarting" not in stack.text()[said:]
    return first


def test_stops_by_itself_leaves_nothing_and_starts_again(stack: ServedStack) -> None:
    key_file = stack.data_dir / "api_key"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    key = stack.key
    first = stops_and_leaves_nothing(stack, signal.SIGTERM)
    stack.start()
    assert stack.key == key
    assert key not in stack.text()
    assert stack.row(first.id)["status"] == "completed"
    assert hello(stack).choices[0].finish_reason == "stop"
    assert "restarting" not in stack.text()


def test_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken, served_stack_directory() as data_dir:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "manage.py", "serve", "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, "DATA_DIR": data_dir},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line]
    assert len(errors) == 1
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use." in errors[0]


def test_an_interrupt_stops_it_too(stack: ServedStack) -> None:
    """The last test of its stack, which is not started again."""
    stops_and_leaves_nothing(stack, signal.SIGINT)


def served_stack_directory() -> Any:
    import tempfile

    return tempfile.TemporaryDirectory(prefix="served-")
