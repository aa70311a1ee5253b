"""A copy of the checkout that Docker Compose runs under a project name of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "containers-check"
_MODELS = """models:
  demo:
    file: /app/worker/demo/demo-q8_0.gguf
    slots: 4
    threads: 1
    chat_template_kwargs: {enable_thinking: false}
  scripted: {engine: scripted, slots: 4, context_length: 5000}
"""
_KEPT = ("PATH", "HOME", "LANG", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR")


class Failed(Exception):
    """The fault that a check has found."""


class Skipped(Exception):
    """The reason why a check cannot run here."""


def need(is_so: object, otherwise: str) -> None:
    """Raise Failed with this text if the condition is false."""
    if not is_so:
        raise Failed(otherwise)


@dataclass
class Stack:
    """A folder with the files of the checkout, its secrets, ``.env`` and models."""

    name: str
    folder: Path
    https_port: int
    key: str = ""

    def prepare(self) -> None:
        """Copy the checkout as under umask 077, and put a models file beside it."""
        before = os.umask(0o077)
        try:
            for name in self.command("git", "-C", str(ROOT), "ls-files").splitlines():
                _copy(ROOT / name, self.folder / name)
        finally:
            os.umask(before)
        models = self.folder / "models" / "models.yaml"
        models.parent.mkdir()
        models.write_text(_MODELS)
        models.parent.chmod(0o755)  # The user of the images reads it.
        models.chmod(0o644)
        curl = (
            f'connect-to = "localhost:443:localhost:{self.https_port}"\nfail\nno-progress-meter\n'
        )
        (self.folder / ".curlrc").write_text(curl)

    def compose(
        self,
        *arguments: str,
        given: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> str:
        """Run ``docker compose`` in the folder; return its output. Raise Failed if it fails."""
        return self.command("docker", "compose", *arguments, given=given, env=env, check=check)

    def command(
        self,
        *command: str,
        given: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> str:
        """Run a command in the folder, for this project; return its standard output."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**_environment(), **self._settings(), **(env or {})},
            input=given,
            stdin=None if given is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if check:
            said = done.stdout[-1500:] + done.stderr[-1500:]
            need(done.returncode == 0, f"{' '.join(command)[:200]} ended {done.returncode}: {said}")
        return done.stdout + ("" if check else done.stderr)

    def shell(self, script: str) -> str:
        """Run commands, until one fails; return their output. Raise Failed if one does."""
        return self.command("sh", "-ec", script)

    def containers(self, service: str) -> list[str]:
        """The ids of the running containers of a service."""
        return self.compose("ps", "--quiet", service).split()

    def inspect(self, container: str, template: str) -> str:
        """A container's facts from the engine, by a Go template."""
        return self.command("docker", "inspect", "--format", template, container).strip()

    def _settings(self) -> dict[str, str]:
        """Variables that override ``.env``, so that this project runs beside others on its host."""
        return {
            "COMPOSE_PROJECT_NAME": self.name,
            "IMAGE": IMAGE,
            "HTTPS_PORT": str(self.https_port),
            "HTTP_PORT": str(self.https_port + 1),
            "MODELS_FILE": "/models/models.yaml",
            "CURL_HOME": str(self.folder),
        }

    def remove(self) -> None:
        """Remove the containers, networks and volumes, and the folder."""
        self.compose("--profile", "*", "down", "--volumes", "--timeout", "5", check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())


def _environment() -> dict[str, str]:
    """The variables of this environment that Docker needs, without settings of the site."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith(("DOCKER_", "BUILDKIT_", "BUILDX_"))
    }
