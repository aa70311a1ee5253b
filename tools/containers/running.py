"""Checks of the running stack without faults."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from itertools import pairwise

from tools.containers.document import commands
from tools.containers.stack import IMAGE, ROOT, Stack, need
from tools.containers.traffic import chat, client, slow

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
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"


def starts(stack: Stack) -> str:
    """Follow docs/deployment.md in a checkout that only its owner can read."""
    started = time.monotonic()
    stack.compose("build")
    built = time.monotonic()
    steps, found, request = commands("On one host").partition(". ./.env && curl")
    need(found, "docs/deployment.md ends without a request")
    said = stack.shell(steps)
    stack.key = re.findall(r"sk-[\w-]+", said)[0]
    models = stack.shell((found + request).replace("sk-…", stack.key))
    need('"demo"' in models, models)
    return f"built in {built - started:.0f} s; a request {time.monotonic() - built:.0f} s later"


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


def networks_lead_out_and_not_in(stack: Stack) -> str:
    """The site's processes reach the host; its stores are reached by what is on ``inside``."""

    def refused(network: str, *address: str) -> str:
        run = ("docker", "run", "--rm", "--network", f"{stack.name}_{network}")
        python = ("--entrypoint", "python", f"{IMAGE}-web", "-c", _CONNECT)
        return stack.command(*run, *python, *address, check=False)

    gateway = stack.command(
        *("docker", "network", "inspect", f"{stack.name}_outside"),
        *("--format", "{{(index .IPAM.Config 0).Gateway}}"),
    ).strip()
    with socket.create_server((gateway, 0)) as host:
        address = (gateway, str(host.getsockname()[1]))
        for service in ("web", "worker", "beat"):
            stack.compose("exec", "-T", service, "python", "-c", _CONNECT, *address)
        said = refused("inside", *address)
        need("Network is unreachable" in said, f"from inside: {said}")
    template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    for service, port in (("postgres", "5432"), ("redis", "6379")):
        said = refused("outside", stack.inspect(stack.containers(service)[0], template), port)
        need("timed out" in said, f"{service} from outside: {said}")
    ports = stack.compose("ps", "--format", "{{.Service}} {{.Ports}}").splitlines()
    published = {line.split()[0] for line in ports if "->" in line}
    need(published == {"caddy"}, f"published: {published}")
    return f"web, worker and beat reach {gateway}; only caddy publishes ports"


def redis_has_half_of_its_container(stack: Stack) -> str:
    """The bound of Redis and the limit of its container, as .env has them."""
    ask = 'REDISCLI_AUTH="$(cat /run/secrets/redis_password)" redis-cli config get maxmemory'
    bound = int(stack.compose("exec", "-T", "redis", "sh", "-c", ask).split()[-1])
    limit = int(stack.inspect(stack.containers("redis")[0], "{{.HostConfig.Memory}}"))
    need(limit == 2 * bound, f"Redis {bound}, container {limit}")
    return f"{bound >> 20} MiB of {limit >> 20} MiB"


def doctor_is_content(stack: Stack) -> str:
    """``manage.py doctor`` has no warning."""
    said = stack.compose("run", "--rm", "-T", "migrate", "doctor").splitlines()
    need(" 0 warn, 0 fail" in said[-1], "\n".join(said))
    return said[-1]


def pull_writes(stack: Stack) -> str:
    """``pull`` puts a file into ./models; if it cannot reach the hub, it prints one line."""
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


def health_checks_are_cheap(stack: Stack) -> str:
    """The processor time of the health check of each of the site's containers."""
    costs = {}
    for service in ("web", "worker", "beat"):
        check = stack.inspect(stack.containers(service)[0], "{{json .Config.Healthcheck.Test}}")
        arguments = ("python", "-IS", "-", json.dumps(json.loads(check)[1:]))
        spent = stack.compose("exec", "-T", service, *arguments, given=_COST)
        costs[service] = float(spent)
    costs_text = ", ".join(f"{service} {cost:.3f} s" for service, cost in costs.items())
    need(max(costs.values()) < _HEALTH_CPU_S, f"CPU of one check: {costs_text}")
    return f"CPU of one check: {costs_text}"
