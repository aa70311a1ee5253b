"""What a process imports until it serves: the rest costs each start time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_COMMAND = "import inference_site.management.commands"
_ADMIN = ("unfold.admin", "inference_site.console.site", "responses_api.admin", "completions.admin")
_SCHEMA = ("drf_spectacular.generators", "django.test", "inference_site.gateway.api.openapi")
_PAGES = ("rest_framework.views", "inference_site.urls", *_ADMIN, *_SCHEMA)
_WEB = ("twisted", "autobahn", "completions.views", "responses_api.views", *_PAGES)
_MODELS = ("jinja2", "numpy", "gguf", "PIL", "httpx", "rich", "xllamacpp")
_TRACES = ("opentelemetry.exporter",)
_WIRE = ("completions.wire", "responses_api.wire")

STARTS = {
    "any command": ("", ("redis", "pydantic", "celery", "limits", *_WIRE, *_WEB, *_MODELS)),
    "serve": (
        f"{_COMMAND}.serve",
        ("celery", "prometheus_client", "limits", *_WIRE, *_WEB, *_MODELS),
    ),
    "beat": (
        f"{_COMMAND}.beat\n"
        "from inference_site.runs.kinds import mendings\n"
        "mendings()",  # As every second.
        (*_TRACES, *_WIRE, *_WEB, *_MODELS),
    ),
    "doctor": (f"{_COMMAND}.doctor", ("limits", *_TRACES, *_WIRE, *_WEB, *_MODELS)),
    "worker": (
        f"{_COMMAND}.worker\n"
        "from inference_site.celery import app\n"
        "from inference_site.runs.kinds import import_kinds\n"
        "import_kinds()\n"
        "app.loader.import_default_modules()\n"  # As Celery does when a worker starts.
        "from inference_site.catalogue.catalogue import DEMO_FILE\n"
        "from inference_site.catalogue.gguf_files import header\n"
        "from inference_site.catalogue.model_files import quantisation_of\n"
        "assert header(DEMO_FILE)[1] and quantisation_of(15) == 'Q4_K_M'",  # As before a load.
        ("limits", *_TRACES, *_WEB, "responses_api.creation", "numpy", "gguf", "xllamacpp"),
    ),
    "web": (
        f"{_COMMAND}.web\nimport inference_site.asgi, inference_site.urls",
        (*_TRACES, *_SCHEMA, *_MODELS, "worker.runtime", "worker.engines"),
    ),
}
"""For each process: what is run until it serves, and what that must not import."""

_RUN = """
import json, os, sys
import django
django.setup()
starts = json.loads(sys.argv[1])
for name, code in starts.items():
    if os.fork() == 0:  # Each goes on from what all have in common.
        exec(code)
        print(json.dumps([name, sorted(sys.modules)]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """What each process has imported."""
    starts = {name: code for name, (code, _) in STARTS.items()}
    run = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(starts)],
        cwd=ROOT,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "inference_site.settings"},
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(answers) == len(starts), run.stderr
    return {name: set(modules) for name, modules in answers}


@pytest.mark.parametrize("name", STARTS)
def test_a_process_imports_only_what_it_uses(name: str, imported: dict[str, set[str]]) -> None:
    assert sorted(imported[name].intersection(STARTS[name][1])) == []


def test_web_has_all_that_its_first_requests_need(imported: dict[str, set[str]]) -> None:
    needed = {"completions.views.chat", "responses_api.views.responses", "inference_site.celery"}
    assert needed - imported["web"] == set()


def test_a_worker_has_all_that_its_first_generation_needs(imported: dict[str, set[str]]) -> None:
    needed = {"completions.assemblers.chat", "responses_api.assembler", "worker.tasks"}
    assert needed - imported["worker"] == set()


def test_the_checks_look_at_the_admin_that_nothing_has_imported() -> None:
    code = (
        "import django; django.setup()\n"
        "from django.contrib import admin\n"
        "from django.core import checks\n"
        "from inference_site.accounts.models import Project\n"
        "checks.run_checks(tags=['admin'])\n"
        "assert admin.site.is_registered(Project)"
    )
    env = os.environ | {"DJANGO_SETTINGS_MODULE": "inference_site.settings"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, timeout=280)
