"""Checks of changes to a running stack: scale, upgrade, add GPUs."""

from __future__ import annotations

import time

from tools.containers.document import commands
from tools.containers.stack import IMAGE, Stack, need
from tools.containers.traffic import client, seconds_until_answered, traffic

# How much longer than without an upgrade a request may take.
_LONGEST_S = 1.5
_QUIET_S = 10
_ROUNDS = 5
_WITHOUT_GPU = f"""services:
  worker-gpu:
    image: {IMAGE}-worker-cpu:latest
    build: !reset null
    deploy: {{resources: {{reservations: !reset null}}}}
"""


def scales(stack: Stack) -> str:
    """``--scale worker=2`` adds a worker, which doctor sees; the next ``up`` takes it away."""
    stack.compose("up", "--detach", "--wait", "--no-recreate", "--scale", "worker=2")
    need(len(stack.containers("worker")) == 2, "there are not two workers")
    said = stack.compose("run", "--rm", "-T", "migrate", "doctor")
    ready = said.count("demo ready")
    need(ready == 2, said)
    stack.compose("up", "--detach", "--wait", env={"WORKER_REPLICAS": "1"})
    need(len(stack.containers("worker")) == 1, "the second worker is still there")
    return f"{ready} workers have the model; one is left after the next up"


def is_upgraded(stack: Stack) -> str:
    """Follow docs/deployment.md under clients: none is refused, and none waits for long."""
    steps = commands("Upgrade").replace("git pull && ", "")
    with traffic(stack) as quiet:
        time.sleep(_QUIET_S)
    bound = _LONGEST_S + max(quiet.durations_s)
    longest_s, errors, took = [], [], []
    for _ in range(_ROUNDS):
        old, started = _replaced(stack), time.monotonic()
        with traffic(stack) as seen:
            stack.shell(steps)
            took.append(f"{time.monotonic() - started:.0f}")
            time.sleep(6)  # The proxy resolves names every 2 s, and addresses fail for 2 s.
        new = _replaced(stack)
        need(len(new) == len(old) and not {*new} & {*old}, f"{old} became {new}")
        longest_s.append(max(seen.durations_s))
        errors += seen.errors
    longest = ", ".join(f"{one:.2f}" for one in longest_s)
    said = f"in {', '.join(took)} s each; longest request {longest} s, at most {bound:.2f} s"
    need(not errors, f"{said}; {len(errors)} errors: {errors[:3]}")
    need(max(longest_s) <= bound, said)
    return said


def _replaced(stack: Stack) -> list[str]:
    return [*stack.containers("worker"), *stack.containers("web")]


def gpu_worker_serves_alone(stack: Stack) -> str:
    """The profile gpu with ``--scale worker=0``; its image is that of CPUs, without a GPU."""
    (stack.folder / "without-gpu.yml").write_text(_WITHOUT_GPU)
    files = {"COMPOSE_FILE": "docker-compose.yml:without-gpu.yml", "COMPOSE_PROFILES": "gpu"}
    up = ("up", "--detach", "--wait", "--no-build")
    stack.compose(*up, "--scale", "worker=0", env=files)
    need(not stack.containers("worker"), "there is a worker on CPUs")
    with client(stack) as http:
        answered = seconds_until_answered(http, time.monotonic())
    stack.compose(*up, env={**files, "WORKER_REPLICAS": "0"})
    need(not stack.containers("worker"), "WORKER_REPLICAS=0 was not heeded")
    stack.compose("--profile", "gpu", "rm", "--stop", "--force", "worker-gpu", env=files)
    stack.compose("up", "--detach", "--wait")
    return f"a request answered after {answered:.1f} s"
