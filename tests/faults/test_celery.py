"""Celery's own commands, and Flower, in front of a stack that runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import httpx
import psutil
import pytest
from celery import Celery

from tests.faults.test_processes_die import Reader, slow, works
from tests.ports import free_port
from tests.served_stack import ROOT, ServedStack, wait_until


@pytest.fixture(scope="module")
def stack(routes_stack: ServedStack) -> ServedStack:
    return routes_stack


def _environment(stack: ServedStack) -> dict[str, str]:
    """What an operator has set who types a command beside the site."""
    return {**stack.env, **stack.services, "SECRET_KEY": "only-for-this-command"}


def _inspect(stack: ServedStack, what: str) -> Any:
    """Return what the only worker answers to a command of ``celery inspect``."""
    url = stack.services["REDIS_URL"].replace("unix://", "redis+socket://")
    with Celery(broker=url, set_as_current=False) as app:
        # The first answer is enough; the program would wait for others until its timeout.
        [answer] = getattr(app.control.inspect(timeout=60, limit=1), what)().values()
    return answer


def _running(stack: ServedStack) -> str:
    """Return the id of the only generation that runs."""
    statement = "SELECT public_id FROM generations_generation WHERE status = 'running'"
    wait_until(lambda: len(stack.sql(statement)) == 1, 60, "a generation that runs")
    [(public_id,)] = stack.sql(statement)
    return str(public_id)


def test_inspect_shows_the_worker_and_the_generations_that_run(stack: ServedStack) -> None:
    command = [sys.executable, "-m", "celery", "-A", "inference_site", "inspect", "ping"]
    command += ["--json", "--timeout", "5"]
    environment = _environment(stack)
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert list(json.loads(said.stdout).values()) == [{"ok": "pong"}]
    assert "worker.generate" in _inspect(stack, "registered")
    assert _inspect(stack, "active") == []
    queues = {queue["name"] for queue in _inspect(stack, "active_queues")}
    assert {"model.scripted", "model.large"} < queues
    reader = Reader(stack, slow(100))
    public_id = _running(stack)
    [shown] = _inspect(stack, "active")
    stats = _inspect(stack, "stats")
    reader.wait(60)
    assert (shown["id"], shown["name"], shown["args"]) == (
        public_id,
        "worker.generate",
        ["scripted"],
    )
    assert stats["pid"] == shown["worker_pid"] == stack.pid_of("worker")
    assert stats["total"]["worker.generate"] > 0


def test_the_task_can_be_called_as_any_task_of_celery(stack: ServedStack) -> None:
    def received() -> int:
        return int(_inspect(stack, "stats")["total"]["worker.generate"])

    before = received()
    code = (
        "import django; django.setup()\n"
        "from worker.tasks import generate\n"
        "generate.delay('scripted')\n"
        "generate.apply_async(kwargs={'model': 'scripted'}, countdown=1)\n"
    )
    environment = {**_environment(stack), "DJANGO_SETTINGS_MODULE": "inference_site.settings"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    wait_until(lambda: received() == before + 2, 60, "both tasks")
    assert works(stack)


def test_a_queue_that_was_cancelled_by_hand_is_read_again(stack: ServedStack) -> None:
    """Else requests would wait for a worker that is free, and that no page shows as stopped."""
    url = stack.services["REDIS_URL"].replace("unix://", "redis+socket://")
    with Celery(broker=url, set_as_current=False) as app:
        control: Any = app.control
        answers = control.cancel_consumer("model.scripted", reply=True, timeout=60, limit=1)
    assert "no longer consuming" in str(answers)
    wait_until(lambda: works(stack), 60, "an answer of the model")


def test_flower_shows_the_worker_and_a_generation_that_runs(stack: ServedStack) -> None:
    port = free_port()
    command = [sys.executable, "-m", "celery", "-A", "inference_site", "flower"]
    command += ["--address=127.0.0.1", f"--port={port}"]
    environment = {**_environment(stack), "FLOWER_UNAUTHENTICATED_API": "true"}
    flower = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

            def workers() -> dict[str, Any]:
                try:
                    answer = http.get("/api/workers", params={"status": "true"})
                except httpx.TransportError:
                    return {}
                return dict(answer.json()) if answer.status_code == 200 else {}

            wait_until(lambda: any(workers().values()), 60, "a worker that is online")
            [name] = workers()
            reader = Reader(stack, slow(150))
            public_id = _running(stack)
            answer = http.get("/api/workers", params={"refresh": "true", "workername": name})
            reader.wait(60)
            tasks = http.get("/api/tasks").json()
    finally:
        flower.kill()
        flower.wait()
    assert [task["id"] for task in answer.json()[name]["active"]] == [public_id]
    assert "worker.generate" in {task["name"] for task in tasks.values()}


def test_control_shutdown_drains_the_worker(stack: ServedStack) -> None:
    worker = stack.pid_of("worker")
    reader = Reader(stack, slow(100))
    _running(stack)
    subprocess.run(
        [sys.executable, "-m", "celery", "-A", "inference_site", "control", "shutdown"],
        cwd=ROOT,
        env=_environment(stack),
        check=False,  # Nobody answers, because the worker does not outlive the command.
    )
    reader.wait(60)
    assert (reader.error, reader.text) == (None, "x " * 100)
    wait_until(lambda: not psutil.pid_exists(worker), 120, "the end of the worker")
    wait_until(lambda: works(stack), 120, "the next worker")
    assert "draining for 60 s" in (stack.data_dir / "log" / "worker.log").read_text()


def test_a_worker_drains_at_the_signal_that_has_celery_kill_its_tasks(stack: ServedStack) -> None:
    wait_until(lambda: works(stack), 120, "a worker")
    worker, log = stack.pid_of("worker"), stack.data_dir / "log" / "worker.log"
    reader = Reader(stack, slow(100))
    logged = log.stat().st_size
    os.kill(worker, signal.SIGQUIT)
    reader.wait(60)
    assert (reader.error, reader.text) == (None, "x " * 100)
    wait_until(lambda: not psutil.pid_exists(worker), 120, "the end of the worker")
    wait_until(lambda: works(stack), 120, "the next worker")
    assert "Traceback" not in log.read_text()[logged:]
