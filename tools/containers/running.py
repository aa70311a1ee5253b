"""What the stack does when nothing goes wrong."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise

from tools.containers.stack import ROOT, Failed, Skipped, Stack, need
from tools.containers.traffic import chat, client, seconds_until_answered, slow

_HUB = """
import os, subprocess, sys
with Hub({"tiny.Q8_0.gguf": b"GGUF" * 1000}).running() as hub:
    command = [sys.executable, "manage.py", "pull", "org/repo:Q8_0"]
    sys.exit(subprocess.run(command, env={**os.environ, "HF_ENDPOINT": hub.url}).returncode)
"""
_COST = """
import json, resource, subprocess, sys
for _ in range(10):
    subprocess.run(json.loads(sys.argv[1]), check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print((used.ru_utime + used.ru_stime) / 10)
"""
_HEALTH_CPU_S = 0.1


def starts(stack: Stack) -> str:
    """Build the images of a checkout that only its owner can read, and start all services."""
    started = time.monotonic()
    stack.compose("build")
    built = time.monotonic()
    stack.compose("up", "--detach", "--wait")
    up = time.monotonic()
    made = stack.compose(
        *("run", "--rm", "-T", "migrate"), "create_api_key", "--project", "first", "--name", "check"
    )
    stack.key = made.split()[-1]
    with client(stack) as http:
        seconds_until_answered(http, up)
    return f"built in {built - started:.0f} s, healthy {up - built:.0f} s later"


def streams(stack: Stack) -> str:
    """Tokens come through the proxy one at a time, as the model makes them."""
    body = chat(slow(20, 100), model="scripted", stream=True, max_tokens=100)
    arrived = []
    with client(stack) as http, http.stream("POST", "/chat/completions", json=body) as answer:
        need(answer.status_code == 200, f"status {answer.status_code}")
        for line in answer.iter_lines():
            if line.startswith("data: {") and '"x ' in line:
                arrived.append(time.monotonic())
    gaps = [later - earlier for earlier, later in pairwise(arrived)]
    took = f"{len(arrived)} chunks in {arrived[-1] - arrived[0]:.1f} s"
    need(len([gap for gap in gaps if gap > 0.03]) >= 10, f"they came together: {took}")
    return f"{took}, longest gap {max(gaps):.2f} s"


def doctor_is_content(stack: Stack) -> str:
    """``manage.py doctor`` warns of nothing."""
    said = stack.compose("run", "--rm", "-T", "migrate", "doctor").splitlines()
    need(" 0 warn, 0 fail" in said[-1], "\n".join(said))
    return said[-1]


def pull_writes(stack: Stack) -> str:
    """``pull`` puts a file into ./models; of a hub that it cannot reach it says one line."""
    run = ("run", "--rm", "-T")
    owner = {"PULL_USER": f"{os.getuid()}:{os.getgid()}"}
    hub = (ROOT / "tests" / "hub_server.py").read_text() + _HUB
    stack.compose(*run, "--entrypoint", "python", "pull", "-", given=hub, env=owner)
    file = stack.folder / "models" / "org" / "repo" / "tiny.Q8_0.gguf"
    need(file.stat().st_size == 4000, "the file is not there")
    away = {**owner, "HF_ENDPOINT": "http://127.0.0.1:9"}
    said = stack.compose(*run, "pull", "org/repo:Q8_0", env=away, check=False)
    lines = [line for line in said.splitlines() if line.strip() and "Container" not in line]
    need(len(lines) == 1 and "does not answer" in lines[0], said)
    return f"{file.name}; {lines[0]}"


def builds_again_without_a_restart(stack: Stack) -> str:
    """An unchanged ``up --build`` leaves every container as it runs."""
    before = stack.compose("ps", "--quiet").split()
    started = time.monotonic()
    stack.compose("up", "--detach", "--build")
    need(before == stack.compose("ps", "--quiet").split(), "containers were made anew")
    return f"{len(before)} containers kept, {time.monotonic() - started:.0f} s"


def health_checks_are_cheap(stack: Stack) -> str:
    """What the health check of each of the site's containers costs."""
    costs = {}
    for service in ("web", "worker", "beat"):
        check = stack.inspect(stack.containers(service)[0], "{{json .Config.Healthcheck.Test}}")
        arguments = ("python", "-IS", "-", json.dumps(json.loads(check)[1:]))
        spent = stack.compose("exec", "-T", service, *arguments, given=_COST)
        costs[service] = float(spent)
    told = ", ".join(f"{service} {cost:.3f} s" for service, cost in costs.items())
    need(max(costs.values()) < _HEALTH_CPU_S, f"CPU of one check: {told}")
    return f"CPU of one check: {told}"


def is_monitored(stack: Stack) -> str:
    """Prometheus reaches every process."""
    _up(stack, "prometheus")
    deadline = time.monotonic() + 60
    address = "http://localhost:9090/api/v1/targets?state=active"
    while True:
        said = stack.compose("exec", "-T", "prometheus", "wget", "-qO-", address, check=False)
        targets = json.loads(said)["data"]["activeTargets"] if said.startswith("{") else []
        health = [f"{target['labels']['job']} {target['health']}" for target in targets]
        if len(health) >= 4 and all(one.endswith(" up") for one in health):
            return ", ".join(sorted(health))
        need(time.monotonic() < deadline, f"targets: {health} {said[:200] if not health else ''}")
        time.sleep(1)


def shows_dashboards(stack: Stack) -> str:
    """Grafana has the dashboards and its source of data."""
    _up(stack, "grafana")
    user = f"admin:{(stack.folder / 'deploy/secrets/grafana_password').read_text()}"
    address = f"http://{user}@localhost:3000/api/search?type=dash-db"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        said = stack.compose("exec", "-T", "grafana", "wget", "-qO-", address, check=False)
        if said.startswith("[{"):
            return ", ".join(found["title"] for found in json.loads(said))
        time.sleep(2)
    raise Failed(f"no dashboards: {said[:300]}")


def _up(stack: Stack, service: str) -> None:
    """Start a service of the profile. Raise Skipped if there is no image of it."""
    profile = ("--profile", "monitoring")
    image = stack.compose(*profile, "config", "--images", service).split()[-1]
    if stack.command("docker", "images", "--quiet", image) == "":
        said = stack.compose(*profile, "pull", service, check=False)
        if stack.command("docker", "images", "--quiet", image) == "":
            raise Skipped(f"{image} cannot be pulled: {said.strip()[-100:]}")
    stack.compose(*profile, "up", "--detach", "--no-deps", service)
