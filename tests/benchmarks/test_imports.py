"""Every benchmark starts: none needs Django's settings before it has set them up."""

from __future__ import annotations

import subprocess
import sys

from tests.served_stack import ROOT

IMPORT_ALL = """
import importlib, os, pkgutil
import benchmarks
from django.conf import settings
before = dict(os.environ)
for module in pkgutil.iter_modules(benchmarks.__path__):
    importlib.import_module(f"benchmarks.{module.name}")
    assert not settings.configured, f"benchmarks.{module.name} uses settings when it is imported"
    os.environ.clear()
    os.environ.update(before)
"""


def test_every_benchmark_is_imported_without_settings() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
