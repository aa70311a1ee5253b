"""Downloads of model files from a Hugging Face hub, and the references that name them.

``HF_ENDPOINT`` is the hub's address, ``HF_TOKEN`` a token for models that are not public.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from django.core.exceptions import ImproperlyConfigured

from inference_site.catalogue.gguf_files import is_later_part, parts_of
from inference_site.catalogue.model_files import MAGIC_BYTES, is_weights
from inference_site.catalogue.operator_settings import WEIGHTS
from inference_site.core import environment

if TYPE_CHECKING:
    import httpx

_REFERENCE = re.compile(
    r"(?:hf:|(?:https://)?(?i:hf\.co|huggingface\.co)/)?"
    r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+)|:(?P<quantisation>[\w.-]+))?"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TIMEOUT_S = 30.0
_TRIES, _RETRY_S = 3, 2.0
"""How many connections in a row may break without a further byte, and the pause before the next."""
_NOT_AVAILABLE = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
_UNFINISHED = ".part"
"""The ending of a file during its download."""
OnProgress = Callable[[int, int], None]
"""Called with the downloaded bytes and the size of the file."""


class HubError(Exception):
    """A download failed; the message says why, in one line."""


class BeingFetched(HubError):
    """Another process downloads the file."""


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
        """Parse a reference. Raise HubError.

        The prefixes ``hf:``, ``hf.co/`` and ``huggingface.co/`` all mean the hub of this site.
        """
        found = _REFERENCE.fullmatch(text)
        if found is None or ".." in text:
            raise HubError(f"{text!r} is no model: expected owner/name:Q4_K_M or owner/name/file.")
        file = found["file"] or ""
        if file and not file.lower().endswith(WEIGHTS):
            raise HubError(f"{file} is no model file: only {', '.join(WEIGHTS)} are fetched.")
        return cls(found["repository"], file, found["quantisation"] or "")

    def choose(self, files: list[str]) -> str:
        """Return the file of a repository that is meant; of a split model the first part.

        Raise HubError.
        """
        if self.file:
            if self.file not in files:
                raise HubError(f"{self.repository} has no file {self.file}.")
            return self.file
        models = [
            file
            for file in files
            if (name := Path(file).name.lower()).endswith(".gguf")
            and "mmproj" not in name
            and not is_later_part(Path(file))
        ]
        pattern = rf"(?<![a-z0-9]){re.escape(self.quantisation)}(?![a-z0-9_])"
        matches = [
            file
            for file in models
            if not self.quantisation or re.search(pattern, Path(file).name, re.IGNORECASE)
        ]
        if len(matches) == 1:
            return matches[0]
        there = ", ".join(sorted(Path(file).name for file in matches or models)) or "no GGUF file"
        asks = f" of {self.quantisation}" if self.quantisation else ""
        what = "several models" if matches else "no model"
        raise HubError(f"{self.repository} has {what}{asks}; there are: {there}.")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; ``sha256`` is empty if the hub does not know it."""

    path: str
    size: int
    sha256: str


def downloaded(reference: Reference, folder: Path) -> Path | None:
    """Return the file of a model that was downloaded before; the hub is not asked."""
    home = folder / reference.repository
    files = [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()]
    try:
        path = home / reference.choose(files)
    except HubError:
        return None
    return path if all(part.is_file() for part in parts_of(path)) else None


def fetch(
    reference: Reference,
    folder: Path,
    revision: str = "main",
    on_progress: OnProgress = lambda _, __: None,
) -> Path:
    """Download a model into ``folder/owner/name``; return its file, of a split one the first part.

    A file with the hub's content is only checked; an interrupted download is resumed. A file gets
    its final name only if it is whole and holds weights: until then another content that has this
    name, and may be served, stays. Raise HubError.
    """
    import httpx

    repository = reference.repository
    try:
        with httpx.Client(
            base_url=_endpoint(), follow_redirects=True, timeout=_TIMEOUT_S, headers=_headers()
        ) as client:
            files = _list_files(client, repository, revision)
            chosen = Path(reference.choose(list(files)))
            # The first part is last: once it has its name, the model is complete.
            for part in reversed(parts_of(chosen)):
                file = files.get(part.as_posix())
                if file is None:
                    raise HubError(f"{repository} lacks the part {part}.")
                _fetch_file(client, repository, revision, file, folder, on_progress)
    except httpx.HTTPStatusError as exc:
        response = exc.response
        message = f"{repository}: {response.url.host} answered {response.status_code}."
        if response.status_code in _NOT_AVAILABLE:
            why = "does not exist, or needs a token in HF_TOKEN"
            message = f"{repository} {why} ({response.status_code} from {response.url.host})."
        raise HubError(message) from exc
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as exc:
        raise HubError(f"HF_ENDPOINT is not the address of a hub: {_endpoint()}.") from exc
    except httpx.HTTPError as exc:
        raise HubError(f"{_endpoint()} does not answer: {exc or type(exc).__name__}.") from exc
    except (OSError, ValueError) as exc:
        raise HubError(f"{repository}: {exc}.") from exc
    except ImproperlyConfigured as exc:
        raise HubError(str(exc)) from exc
    return folder / repository / chosen


def _endpoint() -> str:
    return environment.text("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _headers() -> dict[str, str]:
    """Return the headers of each request; httpx does not send the token to another host."""
    token = environment.text("HF_TOKEN")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    if not token and (home / "token").is_file():
        token = (home / "token").read_text().strip()  # Written by `hf auth login`.
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    return {"Accept-Encoding": "identity", **authorization}


def _list_files(client: httpx.Client, repository: str, revision: str) -> dict[str, HubFile]:
    """Return the files of a repository by their paths. Raise HubError for no list of files."""
    url: str | None = f"/api/models/{repository}/tree/{quote(revision, safe='')}?recursive=true"
    files = {}
    while url:
        answer = client.get(url).raise_for_status()
        try:
            for item in answer.json():
                if item["type"] == "file":
                    digest = str((item.get("lfs") or {}).get("oid", ""))
                    known = digest if _SHA256.fullmatch(digest) else ""
                    path = str(item["path"])
                    files[path] = HubFile(path, int(item["size"]), known)
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            raise HubError(
                f"{_endpoint()} answers with no list of files: is it the address of a hub?"
            ) from exc
        url = answer.links.get("next", {}).get("url")
    return files


def _fetch_file(
    client: httpx.Client,
    repository: str,
    revision: str,
    file: HubFile,
    folder: Path,
    on_progress: OnProgress,
) -> None:
    path = folder / repository / file.path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise HubError(f"{repository} has a file outside of it: {file.path!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size == file.size and _digest(path, file) == file.sha256:
        _check_weights(path, file)
        return
    url = f"/{repository}/resolve/{quote(revision, safe='')}/{quote(file.path)}"
    part = path.with_name(f"{path.name}{_UNFINISHED}")
    with part.open("ab", buffering=0) as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise BeingFetched(f"{file.path} is being fetched by another process.") from exc
        # Who had the lock before has renamed it, and it may be served by now, or has removed it.
        if not (part.exists() and os.path.samestat(part.stat(), os.fstat(opened.fileno()))):
            raise BeingFetched(f"{file.path} was being fetched by another process.")
        _download_whole(client, url, file, opened, on_progress)
        size = part.stat().st_size
        if size < file.size:
            raise HubError(
                f"{file.path}: the hub sent {size:,} of {file.size:,} bytes; pull it again."
            )
        if (digest := _digest(part, file)) != file.sha256:
            part.unlink()
            raise HubError(
                f"{file.path}: its SHA-256 is {digest}, not {file.sha256}; it has been removed."
            )
        _check_weights(part, file)
        part.rename(path)


def _download_whole(
    client: httpx.Client, url: str, file: HubFile, part: IO[bytes], on_progress: OnProgress
) -> None:
    """Download the missing bytes; go on where a connection breaks, which large files outlast."""
    import httpx

    failures = 0
    while True:
        had = part.seek(0, os.SEEK_END)
        try:
            _download(client, url, file, part, on_progress)
        except httpx.TransportError:
            failures = 1 if part.seek(0, os.SEEK_END) > had else failures + 1
            if failures == _TRIES:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def _download(
    client: httpx.Client, url: str, file: HubFile, part: IO[bytes], on_progress: OnProgress
) -> None:
    """Append the missing bytes to a partial download."""
    have = part.tell()
    if have > file.size:  # It is of another revision.
        part.truncate(0)
        have = 0
    missing, free = file.size - have, shutil.disk_usage(Path(part.name).parent).free
    if missing > free:
        raise HubError(f"{file.path} needs {missing:,} bytes, and the disk has {free:,}.")
    if not missing and have:
        return
    with client.stream("GET", url, headers={"Range": f"bytes={have}-"} if have else {}) as answer:
        answer.raise_for_status()
        if have and answer.status_code != HTTPStatus.PARTIAL_CONTENT:
            part.truncate(0)
            have = 0
        is_checked = False
        for chunk in answer.iter_raw():
            have += len(chunk)
            if have > file.size:
                raise HubError(f"{file.path}: the hub sends more than its {file.size:,} bytes.")
            part.write(chunk)
            if not is_checked and have >= MAGIC_BYTES:  # Before 100 GB are downloaded in vain.
                _check_weights(Path(part.name), file)
                is_checked = True
            on_progress(have, file.size)


def _digest(path: Path, file: HubFile) -> str:
    """Return the SHA-256 of a file's content; empty if the hub does not know it."""
    if not file.sha256:
        return ""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _check_weights(path: Path, file: HubFile) -> None:
    """Raise HubError for a file without the magic of weights; remove it if it is unfinished."""
    with path.open("rb") as content:
        if is_weights(file.path, content.read(MAGIC_BYTES)):
            return
    if path.suffix == _UNFINISHED:
        path.unlink()
    raise HubError(f"{file.path} is no model file: it is neither GGUF nor GGML.")
