"""Write the JavaScript packages that the console's pages import: ``python -m tools.javascript``.

The files are those of the published packages, unchanged, each checked against the package's hash.
A page imports them as modules, so no build step and no Node.js is needed. To take a newer version,
change its version and its hash here (``npm view NAME dist.integrity``), run this, and change
docs/dependencies.md.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "inference_site" / "core" / "admin_pages" / "static" / "admin_pages" / "vendor"
REGISTRY = "https://registry.npmjs.org"


@dataclass(frozen=True, slots=True)
class Package:
    """A published package: its ``integrity`` as npm shows it, and the one file that is taken."""

    name: str
    version: str
    integrity: str
    file: str
    target: str

    @property
    def address(self) -> str:
        """The address of its archive."""
        base = self.name.rpartition("/")[2]
        return f"{REGISTRY}/{self.name}/-/{base}-{self.version}.tgz"


PACKAGES = (
    Package(
        "marked",
        "18.2.1",
        "sha512-ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==",
        "lib/marked.esm.js",
        "marked.js",
    ),
    Package(
        "dompurify",
        "3.4.18",
        "sha512-ofe3wI/uNm68HInABYFJYqQxRw1EaKAjNdrFVKqjUY+UZurvNd2L/HuQe097s/4RivWiZyP6tT7aoT8atjfhwg==",
        "dist/purify.es.mjs",
        "purify.js",
    ),
    Package(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        "es/highlight.min.js",
        "highlight.js",
    ),
    Package(
        "diff",
        "9.0.0",
        "sha512-svtcdpS8CgJyqAjEQIXdb3OjhFVVYjzGAPO8WGCmRbrml64SPw/jJD4GoE98aR7r25A0XcgrK3F02yw9R/vhQw==",
        "dist/diff.min.js",
        "diff.js",
    ),
)


def archive_of(package: Package) -> bytes:
    """Return a package's archive. Raise SystemExit if it is not the one whose hash is known."""
    with urllib.request.urlopen(package.address, timeout=60) as answer:  # noqa: S310
        content: bytes = answer.read()
    found = f"sha512-{base64.b64encode(hashlib.sha512(content).digest()).decode()}"
    if found != package.integrity:
        raise SystemExit(f"{package.name}: its hash is {found}")
    return content


def main() -> None:
    """Write the file and the license of each package."""
    TARGET.mkdir(exist_ok=True)
    for package in PACKAGES:
        with tarfile.open(fileobj=io.BytesIO(archive_of(package))) as archive:
            for name, target in (
                (package.file, package.target),
                ("LICENSE", f"{package.target.removesuffix('.js')}.LICENSE.txt"),
            ):
                member = archive.extractfile(f"package/{name}")
                assert member is not None
                text = member.read().decode()
                lines = (line for line in text.splitlines() if "sourceMappingURL" not in line)
                (TARGET / target).write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
