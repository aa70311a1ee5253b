"""Model files of a Hugging Face hub: which one is meant, and fetching it.

``HF_ENDPOINT`` is the hub's address, ``HF_TOKEN`` a token for models that are not public.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from inference_site.catalogue.gguf_files import is_later_part, parts_of
from inference_site.catalogue.model_files import MAGIC_BYTES, is_weights
from inference_site.catalogue.operator_settings import WEIGHTS

if TYPE_CHECKING:
    import httpx

_REFERENCE = re.compile(
    r"(?:hf:|(?:https://)?(?i:hf\.co|huggingface\.co)/)?"
    r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+)|:(?P<quantisation>[\w.-]+))?"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TIMEOUT_S = 30.0
_UNFINISHED = ".part"
"""The ending of a file that is being fetched."""
Told = Callable[[int, int], None]
"""Called with the bytes that are there, and with all bytes; 0 when they are not known."""


class HubError(Exception):
    """A file cannot be fetched; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Reference:
    """``owner/name:Q4_K_M``, ``owner/name/file.gguf``, or ``owner/name`` for its only model."""

    repository: str
    file: str = ""
    quantisation: str = ""

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        return f"{self.repository}{file or (self.quantisation and f':{self.quantisation}')}"

    @classmethod
    def read(cls, text: str) -> Reference:
        """Return what a text refers to. Raise HubError.

        ``hf:``, ``hf.co/`` and ``huggingface.co/`` before it mean the hub of this site.
        """
        found = _REFERENCE.fullmatch(text)
        if found is None or ".." in text:
            raise HubError(f"{text!r} is no model: expected owner/name:Q4_K_M or owner/name/file.")
        file = found["file"] or ""
        if file and not file.lower().endswith(WEIGHTS):
            raise HubError(f"{file} is no model file: only {', '.join(WEIGHTS)} are fetched.")
        return cls(found["repository"], file, found["quantisation"] or "")

    def chosen(self, files: list[str]) -> str:
        """Return which of a repository's files is meant: of a split model the first part.

        Raise HubError.
        """
        if self.file:
            if self.file not in files:
                raise HubError(f"{self.repository} has no file {self.file}.")
            return self.file
        models = [file for file in files if _is_model(file)]
        meant = [file for file in models if _is_named(file, self.quantisation)]
        if len(meant) == 1:
            return meant[0]
        there = ", ".join(sorted(Path(file).name for file in meant or models)) or "no GGUF file"
        asks = f" of {self.quantisation}" if self.quantisation else ""
        what = "several models" if meant else "no model"
        raise HubError(f"{self.repository} has {what}{asks}; there are: {there}.")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; ``sha256`` is empty when the hub does not say."""

    path: str
    size: int
    sha256: str


def _is_model(file: str) -> bool:
    name = Path(file).name.lower()
    return name.endswith(".gguf") and "mmproj" not in name and not is_later_part(Path(file))


def _is_named(file: str, quantisation: str) -> bool:
    pattern = rf"(?<![a-z0-9]){re.escape(quantisation)}(?![a-z0-9_])"
    return not quantisation or re.search(pattern, Path(file).name, re.IGNORECASE) is not None


def kept(reference: Reference, folder: Path) -> Path | None:
    """Return the file of a model that was fetched before, without asking the hub."""
    home = folder / reference.repository
    files = [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()]
    try:
        path = home / reference.chosen(files)
    except HubError:
        return None
    return path if all(part.is_file() for part in parts_of(path)) else None


def fetch(
    reference: Reference, folder: Path, revision: str = "main", told: Told = lambda _, __: None
) -> Path:
    """Fetch a model into ``folder/owner/name``; return its file, of a split one the first.

    What was fetched before is checked, not fetched again, and a download that was interrupted goes
    on. Nothing but weights gets the name that it has in the repository. Raise HubError.
    """
    import httpx

    try:
        with httpx.Client(
            base_url=_endpoint(), follow_redirects=True, timeout=_TIMEOUT_S, headers=_headers()
        ) as client:
            files = _listed(client, reference.repository, revision)
            chosen = Path(reference.chosen(list(files)))
            # The first part comes last: the model is there when all of it is.
            for part in reversed(parts_of(chosen)):
                if part.as_posix() not in files:
                    raise HubError(f"{reference.repository} lacks the part {part}.")
                _fetch_file(
                    client, reference.repository, revision, files[part.as_posix()], folder, told
                )
    except httpx.HTTPStatusError as exc:
        raise HubError(_refusal(reference.repository, exc.response)) from exc
    except httpx.HTTPError as exc:
        raise HubError(f"{_endpoint()} does not answer: {exc or type(exc).__name__}.") from exc
    except (OSError, ValueError) as exc:
        raise HubError(f"{reference.repository}: {exc}.") from exc
    return folder / reference.repository / chosen


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _headers() -> dict[str, str]:
    """Return what each request has: with a token, which is not passed on to another host."""
    token = os.environ.get("HF_TOKEN", "").strip()
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    if not token and (home / "token").is_file():
        token = (home / "token").read_text().strip()  # Of `hf auth login`.
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    return {"Accept-Encoding": "identity", **authorization}


def _refusal(repository: str, answer: httpx.Response) -> str:
    if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
        why = "does not exist, or needs a token in HF_TOKEN"
        return f"{repository} {why} ({answer.status_code} from {answer.url.host})."
    return f"{repository}: {answer.url.host} answered {answer.status_code}."


def _listed(client: httpx.Client, repository: str, revision: str) -> dict[str, HubFile]:
    """Return the files of a repository by their paths."""
    url: str | None = f"/api/models/{repository}/tree/{quote(revision, safe='')}?recursive=true"
    files = {}
    while url:
        answer = client.get(url).raise_for_status()
        for item in answer.json():
            if item["type"] == "file":
                digest = str((item.get("lfs") or {}).get("oid", ""))
                known = digest if _SHA256.fullmatch(digest) else ""
                files[item["path"]] = HubFile(item["path"], int(item["size"]), known)
        url = answer.links.get("next", {}).get("url")
    return files


def _fetch_file(
    client: httpx.Client, repository: str, revision: str, file: HubFile, folder: Path, told: Told
) -> None:
    path = folder / repository / file.path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise HubError(f"{repository} has a file outside of it: {file.path!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        url = f"/{repository}/resolve/{quote(revision, safe='')}/{quote(file.path)}"
        part = path.with_name(f"{path.name}{_UNFINISHED}")
        with part.open("ab", buffering=0) as taken:
            _lock(taken, file)
            _download(client, url, file, taken, told)
            _check(part, file)
            _check_weights(part, file)
            part.rename(path)
    else:
        _check(path, file)
        _check_weights(path, file)


def _lock(part: IO[bytes], file: HubFile) -> None:
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        raise HubError(f"{file.path} is being fetched by another process.") from exc


def _download(client: httpx.Client, url: str, file: HubFile, part: IO[bytes], told: Told) -> None:
    """Add what lacks to the part of a file that an earlier call has left."""
    have = part.tell()
    lacks, free = file.size - have, shutil.disk_usage(Path(part.name).parent).free
    if lacks > free:
        raise HubError(f"{file.path} needs {lacks:,} bytes, and the disk has {free:,}.")
    if not lacks and have:
        return
    with client.stream("GET", url, headers={"Range": f"bytes={have}-"} if have else {}) as answer:
        answer.raise_for_status()
        if have and answer.status_code != HTTPStatus.PARTIAL_CONTENT:
            part.truncate(0)
            have = 0
        is_known = False
        for chunk in answer.iter_raw():
            have += len(chunk)
            if have > file.size:
                raise HubError(f"{file.path}: the hub sends more than its {file.size:,} bytes.")
            part.write(chunk)
            if not is_known and have >= MAGIC_BYTES:  # Not after 100 GB.
                _check_weights(Path(part.name), file)
                is_known = True
            told(have, file.size)


def _check(path: Path, file: HubFile) -> None:
    """Raise HubError for a file that is not as the hub has it, and remove it."""
    size = path.stat().st_size
    if size < file.size:
        raise HubError(f"{file.path}: the hub sent {size:,} of {file.size:,} bytes; pull it again.")
    if file.sha256 and (seen := sha256_of(path)) != file.sha256:
        path.unlink()
        told = f"its SHA-256 is {seen}, not {file.sha256}; it has been removed."
        raise HubError(f"{file.path}: {told}")


def _check_weights(path: Path, file: HubFile) -> None:
    """Raise HubError for a file that does not begin as weights do; remove what is unfinished."""
    with path.open("rb") as content:
        if is_weights(file.path, content.read(MAGIC_BYTES)):
            return
    if path.suffix == _UNFINISHED:
        path.unlink()
    raise HubError(f"{file.path} is no model file: it is neither GGUF nor GGML.")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
