"""What docker-compose.yml and the Dockerfile say, read from the files themselves."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Image:
    """A stage of the Dockerfile with a name."""

    env: dict[str, str]
    user: str
    entrypoint: list[str]
    command: list[str]
    health: list[str]
    absent: list[str]


@dataclass(frozen=True)
class Service:
    """How a service of the compose file is run."""

    name: str
    command: list[str]
    env: dict[str, str]
    health: list[str]
    stop_grace_s: float
    absent: list[str]
    raw: dict[str, Any]


def compose_file() -> dict[str, Any]:
    """The compose file with its variables at their defaults."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    filled: dict[str, Any] = _interpolated(loaded)
    return filled


def _interpolated(value: Any) -> Any:
    match value:
        case dict():
            return {key: _interpolated(item) for key, item in value.items()}
        case list():
            return [_interpolated(item) for item in value]
        case str():
            return _VARIABLE.sub(lambda found: "$" if found[0] == "$$" else found[2] or "", value)
        case _:
            return value


def service(name: str) -> Service:
    """A service as Docker would run it: what the file does not say is the image's."""
    services = compose_file()["services"]
    raw = services[name]
    built = {one["image"]: one["build"]["target"] for one in services.values() if "build" in one}
    image = images()[built[raw["image"]]] if raw["image"] in built else None
    command = raw.get("command", image.command if image else [])
    health = raw.get("healthcheck", {})
    test: list[str] = health.get("test", [])
    if not test and image is not None and not health.get("disable"):
        test = image.health
    return Service(
        name=name,
        command=[*raw.get("entrypoint", image.entrypoint if image else []), *command],
        env={**(image.env if image else {}), **raw.get("environment", {})},
        health=test[1:] if test[:1] == ["CMD"] else test,
        stop_grace_s=float(raw.get("stop_grace_period", "10s").removesuffix("s")),
        absent=image.absent if image else [],
        raw=raw,
    )


def images() -> dict[str, Image]:
    """The named stages of the Dockerfile. A later instruction replaces an earlier one."""
    found: dict[str, Image] = {}
    text = (ROOT / "Dockerfile").read_text()
    for stage in re.split(r"(?m)^FROM ", _without_comments(text))[1:]:
        lines = stage.replace("\\\n", " ").splitlines()
        name = lines[0].split()[-1]
        said: dict[str, list[str]] = {}
        for line in lines[1:]:
            instruction, _, rest = line.strip().partition(" ")
            said.setdefault(instruction, []).append(rest)
        env = [pair.partition("=") for line in said.get("ENV", []) for pair in shlex.split(line)]
        found[name] = Image(
            env={key: value for key, _, value in env},
            user=said.get("USER", ["root"])[-1],
            entrypoint=json.loads(said.get("ENTRYPOINT", ["[]"])[-1]),
            command=json.loads(said.get("CMD", ["[]"])[-1]),
            health=_health(said.get("HEALTHCHECK", [""])[-1]),
            absent=_absent(lines, found),
        )
    return found


def _absent(lines: list[str], stages: dict[str, Image]) -> list[str]:
    """The packages of `make serve` that are in no lock which this stage installs or copies."""
    text = "\n".join(lines)
    parents = [lines[0].split()[0], *re.findall(r"COPY --from=(\S+) /venv ", text)]
    inherited = [name for parent in parents if parent in stages for name in stages[parent].absent]
    locks = re.findall(r"uv pip install --python /venv --require-hashes -r (\S+)", text)
    there = {name for lock in locks for name in locked(lock)}
    return [*inherited, *(sorted(locked("requirements.lock") - there) if locks else ())]


def locked(lock: str) -> set[str]:
    """The names of the packages that a lock holds."""
    return {name for name, _ in pins(lock)}


def pins(lock: str) -> set[tuple[str, str]]:
    """The packages of a lock with their versions."""
    return set(re.findall(r"(?m)^([a-z0-9-]+)==(\S+)", (ROOT / lock).read_text()))


def _without_comments(text: str) -> str:
    return re.sub(r"(?m)^#.*\n", "", text)


def _health(instruction: str) -> list[str]:
    _, _, command = instruction.partition("CMD ")
    return json.loads(command) if command else []
