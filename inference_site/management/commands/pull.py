"""``manage.py pull hf:owner/name/file``: fetch a model file from a Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from tqdm import tqdm

_REFERENCE = re.compile(r"(?:hf:)?(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>[\w./-]+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60.0


class Command(BaseCommand):
    """An interrupted download continues. ``HF_ENDPOINT`` and ``HF_TOKEN`` are honoured."""

    help = "Fetch a model file into MODELS_DIR, resume an interrupted download, and check the file."
    requires_system_checks: list[str] = []  # They import the whole site.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("reference", help="hf:owner/name/file")
        parser.add_argument("--revision", default="main", help="branch, tag or commit")

    def handle(self, *_: Any, reference: str, revision: str, **__: Any) -> None:
        found = _REFERENCE.fullmatch(reference)
        if found is None or ".." in reference:
            raise CommandError("Expected hf:owner/name/file.")
        path = fetch(found["repository"], found["file"], revision)
        self.stdout.write(f"{path}\nIn models.yaml: file: hf:{found['repository']}/{found['file']}")


def fetch(repository: str, file: str, revision: str) -> Path:
    """Return where the file lies. Raise CommandError for what cannot be fetched, or is damaged."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # Read when the library is imported.
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    path = Path(settings.MODELS_DIR) / repository / file
    url = hf_hub_url(repository, file, revision=revision)
    try:
        found = get_hf_file_metadata(url)
        if not path.exists():
            _download(url, get_token(), found.size or 0, path)
    except (HfHubHTTPError, httpx.HTTPError, OSError) as exc:
        raise CommandError(f"{repository}/{file}: {exc}") from exc
    # The hub's tag of a large file is its SHA-256.
    expected = found.etag or ""
    if _SHA256.fullmatch(expected) and (seen := sha256_of(path)) != expected:
        path.unlink()
        raise CommandError(f"{path}: its SHA-256 is {seen}, not {expected}; it has been removed.")
    return path


def _download(url: str, token: str | None, size: int, path: Path) -> None:
    """Fetch into ``path``, through a part file that a later call continues."""
    part = path.with_name(f"{path.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    known = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={known}-"} if known else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"  # Not passed on to another host.
    with httpx.stream(
        "GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S
    ) as answer:
        answer.raise_for_status()
        is_rest = answer.status_code == HTTPStatus.PARTIAL_CONTENT
        first = known if is_rest else 0
        with (
            part.open("ab" if is_rest else "wb") as file,
            tqdm(total=size or None, initial=first, unit="B", unit_scale=True) as bar,
        ):
            for chunk in answer.iter_bytes():
                file.write(chunk)
                bar.update(len(chunk))
    part.rename(path)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
