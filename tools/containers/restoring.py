"""A backup of the running site, restored by docs/deployment.md into a new project."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.containers.document import commands
from tools.containers.stack import Stack, need
from tools.containers.traffic import client, seconds_until_answered

_SECTION = "Backup and restore"


def is_restored_elsewhere(stack: Stack) -> str:
    """What is stored exists in a new project with its own volumes; the first one is stopped."""
    body = {"model": "demo", "input": "Hello", "max_output_tokens": 8}
    with client(stack) as http:
        kept = http.post("/responses", json=body).json()
        form = {"purpose": "user_data"}
        uploaded = http.post("/files", data=form, files={"file": ("a.txt", b"kept")}).json()
    stack.shell(commands(_SECTION))
    stack.compose("stop")
    with _elsewhere(stack) as other:
        started = time.monotonic()
        other.shell(commands(_SECTION, 1))
        with client(other) as http:
            seconds_until_answered(http, time.monotonic())
            found = http.get(f"/responses/{kept['id']}")
            content = http.get(f"/files/{uploaded['id']}/content")
        took = time.monotonic() - started
        need(found.status_code == 200, found.text[:300])
        need(found.json()["output"] == kept["output"], "the stored response is another")
        need(content.content == b"kept", f"the uploaded file is not there: {content.text[:300]}")
    return f"{took:.0f} s from nothing to the stored response and file"


@contextmanager
def _elsewhere(stack: Stack) -> Iterator[Stack]:
    """Another machine's folder: the checkout, and the files to keep by docs/deployment.md."""
    folder = Path(tempfile.mkdtemp(prefix="containers-restored-"))
    other = Stack(f"{stack.name}-restored", folder, stack.https_port + 2, stack.key)
    try:
        other.prepare()
        shutil.copytree(stack.folder / "deploy/secrets", folder / "deploy/secrets")
        for name in (".env", "site.dump", "files.tgz"):
            shutil.copy(stack.folder / name, folder)
        yield other
    finally:
        other.remove()
