"""The services of docker-compose.yml as processes of this machine.

Each runs its very command with its very environment. What a container would have and a process has
not is put in its place: the names ``postgres`` and ``redis``, ports of its own, and directories.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import psycopg
from psycopg import sql

from inference_site.ops.serve.services import EmbeddedPostgres, plan_redis, wait_for_redis
from tests.deployment.compose import ROOT, Service, service
from tests.ports import free_port

WITHOUT = Path(__file__).parent / "without"
_UNTOUCHED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")


def listens(port: int) -> bool:
    """Whether a port of this machine takes connections; cheaper to ask than a health check."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Container:
    """One process of a service, with a port of its own."""

    def __init__(self, site: LocalSite, spec: Service, number: int, **env: str) -> None:
        self.spec, self.port = spec, free_port()
        self.name = f"{spec.name}-{number}"
        self._site = site
        self.log = site.directory / f"{self.name}.log"
        self.env = {**site.environment(spec, self.port), **env}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Run its command."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._site.local(self.spec.command, self.port),
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def is_healthy(self) -> bool:
        """Run the command of its health check."""
        command = self._site.local(self.spec.health, self.port)
        done = subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, timeout=90, check=False
        )
        return done.returncode == 0

    def stop(self) -> float:
        """Ask it to end; return how many seconds that took. Raise past its grace period."""
        assert self.process is not None
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(self.spec.stop_grace_s)
        return time.monotonic() - started

    def lines(self) -> list[dict[str, object]]:
        """What it has logged: each line is a JSON object. The last may be half written."""
        whole = self.log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


class LocalSite:
    """A directory with the secrets of a site, its PostgreSQL and Redis, and its processes."""

    def __init__(self, directory: Path, **env: str) -> None:
        self.directory, self._env = directory, env
        self.secrets = directory / "secrets"
        self.running: list[Container] = []
        self._postgres = EmbeddedPostgres(directory)
        self.files = directory / "files"
        self.files.mkdir()
        self._redis_port = free_port()

    def start_services(self) -> None:
        """Make the secrets as an operator does, and start PostgreSQL and Redis with them."""
        subprocess.run(
            ["/bin/sh", "deploy/make_secrets.sh", str(self.secrets)],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        self._start_postgres()
        self._start_redis()

    def _start_postgres(self) -> None:
        self.admin_url = self._postgres.start()
        password = (self.secrets / "postgres_password").read_text()
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE ROLE site LOGIN PASSWORD {}").format(sql.Literal(password))
            )
            connection.execute("CREATE DATABASE site OWNER site")
        secret = self.secrets / "database_url"
        assert secret.read_text() == f"postgresql://site:{password}@postgres:5432/site"
        socket = self.admin_url.rpartition("?host=")[2]
        self.database_url = f"postgresql://site:{password}@/site?host={socket}"
        secret.write_text(self.database_url)

    def _start_redis(self) -> None:
        program = Path(plan_redis(self.directory).command[0])
        command = self.local(service("redis").command, 0)
        found = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
        home = str(self.directory / "redis")
        listen = ["--port", str(self._redis_port), "--bind", "127.0.0.1"]
        self._redis = subprocess.Popen(
            [*command, *listen, "--dir", home], env=found, stdout=subprocess.DEVNULL
        )
        secret = self.secrets / "redis_url"
        self.redis_url = secret.read_text().replace("@redis:6379", f"@127.0.0.1:{self._redis_port}")
        assert str(self._redis_port) in self.redis_url
        secret.write_text(self.redis_url)
        wait_for_redis(self.redis_url)

    def environment(self, spec: Service, port: int) -> dict[str, str]:
        """The environment of a container: what the files say, and nothing of this process."""
        kept = {name: os.environ[name] for name in _UNTOUCHED if name in os.environ}
        said = dict(zip(spec.env, self.local(list(spec.env.values()), port), strict=True))
        hidden = ",".join(name.replace("-", "_") for name in spec.absent)
        without = {"PYTHONPATH": str(WITHOUT), "HIDDEN_MODULES": hidden}
        # In an image nothing could keep what Python compiles; here it would be compiled each time.
        compiled = {"PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", "")}
        said.pop("STATIC_ROOT", None)  # What the build of the image collects is not here.
        return {**said, **kept, **without, **compiled, **self._env}

    def local(self, words: list[str], port: int) -> list[str]:
        """Put what this machine has in place of what a container has."""
        places = {
            "/run/secrets": str(self.secrets),
            "/data": str(self.directory / "data"),
            "/models": str(self.directory / "models"),
            "/files": str(self.files),
            "0.0.0.0": "127.0.0.1",  # noqa: S104  # Only replaced.
            "8000": str(port),
            "9100": str(port),
        }
        container = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, places))})(?!\w)")
        done = [sys.executable if word == "python" else str(word) for word in words]
        return [container.sub(lambda found: places[found[0]], word) for word in done]

    def run(self, name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a service to its end, with other arguments of its entrypoint if any are given."""
        spec = service(name)
        command = [*spec.command[:2], *arguments] if arguments else spec.command
        return subprocess.run(
            self.local(command, 0),
            cwd=ROOT,
            env={**self.environment(spec, 0), **env},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def up(self, name: str, count: int = 1, **env: str) -> list[Container]:
        """Start so many of a service, and wait until all are healthy."""
        started = self.start(name, count, **env)
        self.wait_for(started)
        return started

    def start(self, name: str, count: int = 1, **env: str) -> list[Container]:
        """Start so many of a service."""
        begun = len([c for c in self.running if c.spec.name == name])
        started = [Container(self, service(name), begun + n, **env) for n in range(count)]
        for container in started:
            container.start()
        self.running += started
        return started

    def wait_for(self, containers: list[Container]) -> None:
        """Return when all are healthy. Raise AssertionError with the log of one that has ended."""
        deadline = time.monotonic() + 200
        for container in containers:
            while not (is_open := listens(container.port)) or not container.is_healthy():
                assert container.process is not None
                if container.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"{container.name}:\n{container.log.read_text()[-3000:]}")
                time.sleep(1.0 if is_open else 0.1)  # A health check is a process of its own.

    def client(self, web: Container, key: str) -> openai.OpenAI:
        """The official client of one web process."""
        return openai.OpenAI(base_url=f"{web.url}/v1", api_key=key, max_retries=0, timeout=120)

    def close(self) -> None:
        """End what still runs."""
        for container in self.running:
            if container.process is not None and container.process.poll() is None:
                container.process.kill()
                container.process.wait()
        self._redis.terminate()
        self._redis.wait()
        self._postgres.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
