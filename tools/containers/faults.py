"""Checks of the stack when one of its parts dies or hangs."""

from __future__ import annotations

import time

from tools.containers.stack import Stack, need
from tools.containers.traffic import client, seconds_until_answered, traffic

_KILL_ALL = "import os; os.kill(-1, 9)"
_BACK_S = 120


def web_is_killed(stack: Stack) -> str:
    """kill -9 of a web process: the other one answers, and the container comes back."""
    # What the dead process had taken ends with an error; the official client asks twice again.
    with traffic(stack, retries=2) as seen:
        back = _killed(stack, "web")
    need(not seen.errors, f"{len(seen.errors)} errors: {seen.errors[:3]}")
    return f"healthy after {back:.0f} s; {seen}"


def worker_is_killed(stack: Stack) -> str:
    """kill -9 of the only worker, with all its processes: it comes back and answers."""
    started = time.monotonic()
    back = _killed(stack, "worker")
    with client(stack) as http:
        answered = seconds_until_answered(http, started)
    return f"healthy after {back:.0f} s, a request answered after {answered:.0f} s"


def postgres_restarts(stack: Stack) -> str:
    """A restart of PostgreSQL ends no process of the site."""
    return _restarted(stack, "postgres")


def redis_restarts(stack: Stack) -> str:
    """A restart of Redis ends no process of the site."""
    return _restarted(stack, "redis")


def postgres_outlives_its_health_checks(stack: Stack) -> str:
    """An orphan of a health check is not treated as a crash of PostgreSQL."""
    left = "(sleep 1; exit 2) >/dev/null 2>&1 & exit 0"  # As pg_isready ends when none answers it.
    stack.compose("exec", "-T", "postgres", "sh", "-c", left)
    time.sleep(3)
    log = stack.compose("logs", "--no-log-prefix", "--since", "10s", "postgres")
    need("terminating any other active server processes" not in log, log[-500:])
    return "no crash"


def _killed(stack: Stack, service: str) -> float:
    """Kill every process of the first container of a service; return the seconds until healthy."""
    container = stack.containers(service)[0]
    count = int(stack.inspect(container, "{{.RestartCount}}"))
    started = time.monotonic()
    stack.command("docker", "exec", container, "python", "-c", _KILL_ALL, check=False)
    template = "{{.RestartCount}} {{.State.Health.Status}}"
    while stack.inspect(container, template) != f"{count + 1} healthy":
        took = time.monotonic() - started
        need(took < _BACK_S, f"after {took:.0f} s: {stack.inspect(container, template)}")
        time.sleep(0.5)
    return time.monotonic() - started


def _restarted(stack: Stack, service: str) -> str:
    """Restart a service; return when a request was answered and that nothing else started again."""
    ours = [one for name in ("web", "worker", "beat") for one in stack.containers(name)]
    state = "{{.RestartCount}} {{.State.StartedAt}}"
    before = [stack.inspect(one, state) for one in ours]
    stack.compose("restart", service)
    started = time.monotonic()
    with client(stack) as http:
        answered = seconds_until_answered(http, started)
    need(before == [stack.inspect(one, state) for one in ours], "other containers started again")
    return f"a request answered {answered:.1f} s after it"
