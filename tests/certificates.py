"""Certificates for servers of the tests, which nobody trusts unless a test does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def write_certificate(folder: Path, name: str) -> Path:
    """Return a file with a certificate of this name (``DNS:…`` or ``IP:…``) and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes its certificate with the openssl command")
    pem = folder / "cert.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name.split(':')[1]}"]
    extensions = ["-addext", f"subjectAltName={name}"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(pem)]
    subprocess.run([openssl, "req", *options, *extensions, *files], check=True, capture_output=True)
    pem.write_bytes(pem.read_bytes() + (folder / "key.pem").read_bytes())
    return pem
