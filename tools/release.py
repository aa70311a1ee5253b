"""Builds a release of one version, the source distribution and the images; prints their digests.

``python -m tools.release [TARGET …]`` builds the images of these targets of the Dockerfile; without
targets those of docker-compose.yml that need no GPU. ``none`` builds the source distribution alone.
The version is that of pyproject.toml; CHANGELOG.md has a heading for it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
IMAGES = ("web", "worker-cpu", "real-model")


class ReleaseError(Exception):
    """The release cannot be built; the message says why."""


def version() -> str:
    """Return the version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def changelog_versions() -> list[str]:
    """Return the versions that CHANGELOG.md has a dated heading for, the newest first."""
    text = (ROOT / "CHANGELOG.md").read_text()
    return re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)


def check() -> None:
    """Raise ReleaseError for a version without a heading, or changes that are not committed."""
    if version() not in changelog_versions()[:1]:
        raise ReleaseError(f"CHANGELOG.md does not begin with '## [{version()}] - DATE'.")
    if changed := _output("git", "status", "--porcelain", "--untracked-files=no"):
        raise ReleaseError(f"There are changes that are not committed:\n{changed}")


def build_sdist() -> tuple[Path, str]:
    """Build the source distribution; return its path and SHA-256. Raise ReleaseError."""
    _run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(DIST))
    path = DIST / f"inference_site-{version()}.tar.gz"
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def build_image(target: str) -> tuple[str, str]:
    """Build the image of one target of the Dockerfile; return its name and digest."""
    name = f"inference-site-{target}:{version()}"
    label = f"org.opencontainers.image.version={version()}"
    revision = f"org.opencontainers.image.revision={_output('git', 'rev-parse', 'HEAD')}"
    labels = ("--label", label, "--label", revision)
    _run("docker", "build", "--target", target, "--tag", name, *labels, ".")
    return name, _output("docker", "image", "inspect", "--format", "{{.Id}}", name)


def main(targets: list[str]) -> int:
    """Build the requested artefacts, and print one digest a line."""
    try:
        check()
        path, digest = build_sdist()
        _say(f"sha256:{digest}  {path.relative_to(ROOT)}")
        wanted = [] if targets == ["none"] else targets or list(IMAGES)
        if wanted and shutil.which("docker") is None:
            raise ReleaseError(
                "The images need Docker; `make release IMAGES=none` leaves them out."
            )
        for target in wanted:
            name, digest = build_image(target)
            _say(f"{digest}  {name}")
    except ReleaseError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0


def _run(*command: str) -> None:
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise ReleaseError(f"`{' '.join(command)}` failed.")


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
