"""What operators do to a running stack: scale, upgrade, back up, move, put GPUs to work."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.containers.stack import IMAGE, Stack, need
from tools.containers.traffic import client, seconds_until_answered, traffic

_LONGEST_S = 1.5
_ROUNDS = 5
_WITHOUT_GPU = f"""services:
  worker-gpu:
    image: {IMAGE}-worker-cpu:latest
    build: !reset null
    deploy: {{resources: {{reservations: !reset null}}}}
"""
_PSQL = ("exec", "-T", "postgres", "psql", "--username", "site", "postgres")
_RESTORE = (
    ("stop", "caddy", "web", "worker", "beat"),
    ("up", "--detach", "--wait", "postgres", "redis"),
    (*_PSQL, "-c", "DROP DATABASE site WITH (FORCE)", "-c", "CREATE DATABASE site"),
)


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


def worker_is_upgraded(stack: Stack) -> str:
    """deploy/upgrade.sh replaces the worker, and no request waits for long."""
    return _upgraded(stack, "worker")


def web_is_upgraded(stack: Stack) -> str:
    """deploy/upgrade.sh replaces the web processes, and no request waits for long."""
    return _upgraded(stack, "web")


def _upgraded(stack: Stack, service: str) -> str:
    told, longest, errors = [], 0.0, []
    for _ in range(_ROUNDS):
        old, started = stack.containers(service), time.monotonic()
        with traffic(stack) as seen:
            stack.command("sh", "deploy/upgrade.sh", service)
            time.sleep(6)  # The proxy resolves names every 5 s.
        new = stack.containers(service)
        need(len(new) == len(old) and not {*new} & {*old}, f"{old} became {new}")
        longest = max(longest, *seen.durations_s)
        errors += seen.errors
        told.append(f"{max(seen.durations_s):.2f}")
        took = time.monotonic() - started
    said = f"longest request of each of {_ROUNDS}: {', '.join(told)} s; the last took {took:.0f} s"
    need(not errors, f"{said}; {len(errors)} errors: {errors[:3]}")
    need(longest <= _LONGEST_S, said)
    return said


def is_restored_elsewhere(stack: Stack) -> str:
    """A dump of the running site, restored by another project with the secrets and ``.env``."""
    body = {"model": "demo", "input": "Hello", "max_output_tokens": 8}
    with client(stack) as http:
        kept = http.post("/responses", json=body).json()
    dump = ("pg_dump", "--username", "site", "--format=custom", "site")
    stack.command("sh", "-c", f"docker compose exec -T postgres {' '.join(dump)} > site.dump")
    with _elsewhere(stack) as other:
        started = time.monotonic()
        for arguments in _RESTORE:
            other.compose(*arguments)
        restore = "pg_restore --username site --dbname site --exit-on-error"
        file = stack.folder / "site.dump"
        other.command("sh", "-c", f"docker compose exec -T postgres {restore} < {file}")
        other.compose("run", "--rm", "-T", "migrate")
        other.compose("up", "--detach", "--wait")
        with client(other) as http:
            seconds_until_answered(http, time.monotonic())
            found = http.get(f"/responses/{kept['id']}")
        took = time.monotonic() - started
        need(found.status_code == 200, found.text[:300])
        need(found.json()["output"] == kept["output"], "the stored response is another")
    return f"{took:.0f} s from nothing to the stored response"


def gpu_worker_serves_alone(stack: Stack) -> str:
    """The profile gpu with ``--scale worker=0``; its image is that of CPUs, for want of a GPU."""
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


@contextmanager
def _elsewhere(stack: Stack) -> Iterator[Stack]:
    """Another machine's folder: the checkout, and what docs/deployment.md says to keep."""
    folder = Path(tempfile.mkdtemp(prefix="containers-restored-"))
    other = Stack(f"{stack.name}-restored", folder, stack.https_port + 2, stack.key)
    try:
        other.prepare()
        for name in (stack.folder / "deploy" / "secrets").iterdir():
            (folder / "deploy" / "secrets" / name.name).write_bytes(name.read_bytes())
        yield other
    finally:
        other.remove()
