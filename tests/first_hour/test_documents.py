"""Every command and example of README and docs, pasted beside a fresh ``make serve``.

One that cannot run here has ``<!-- not run: why -->`` on the line before it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference_site.catalogue.models_file import read_models_file
from tests.first_hour.documents import DOCUMENTS, ROOT, Example, commands, examples
from tests.manage_forks import Manage, manage_forks
from tests.served_stack import ServedStack

pytestmark = pytest.mark.timeout(400)  # The first test starts a whole site.

ALL = [example for path in DOCUMENTS for example in examples(path)]
RUN = [path for path in DOCUMENTS if any(e.language in ("sh", "python") for e in examples(path))]
_MANAGE = ".venv/bin/python manage.py "


@pytest.fixture(scope="package")
def manage(stack: ServedStack) -> Iterator[Manage]:
    """Runs a command of ``manage.py`` as a newcomer does, without any settings."""
    env = {name: value for name, value in stack.env.items() if name not in _GIVEN}
    with manage_forks(env | {"DATA_DIR": str(stack.data_dir)}) as forks:
        yield forks


_GIVEN = ("SECRET_KEY", "HTTPS", "MODELS_FILE", "MODEL", "DATABASE_URL", "REDIS_URL")


def here(text: str, stack: ServedStack) -> str:
    """The example with the address and the data directory of the stack."""
    local = text.replace("127.0.0.1:8000", f"127.0.0.1:{stack.port}")
    return local.replace("var/", f"{stack.data_dir}/")


def run_shell(example: Example, stack: ServedStack, manage: Manage) -> None:
    for command in commands(here(example.text, stack)):
        if command.startswith(_MANAGE):
            words, _, target = command.removeprefix(_MANAGE).partition(" > ")
            done = manage(*shlex.split(words, comments=True))
            if target:
                Path(target).write_text(done.stdout)
        else:
            local = command.replace(".venv/bin/python", sys.executable)
            done = subprocess.run(
                ["/bin/bash", "-euo", "pipefail", "-c", local.replace("curl ", "curl -sS --fail ")],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
        assert done.returncode == 0, f"{example.place}: {command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_what_a_document_says_can_be_pasted(path: Path, stack: ServedStack, manage: Manage) -> None:
    names: dict[str, Any] = {}
    promised: list[str] = []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for example in examples(path):
            if example.reason:
                continue
            if example.language == "python":
                code = compile(here(example.text, stack), example.place, "exec")
                exec(code, names)  # noqa: S102  # The documents are ours.
                promised += re.findall(r"(?m)^print\(.*\)  # (.+)$", example.text)
            elif example.language == "sh":
                run_shell(example, stack, manage)
    if (client := names.get("client")) is not None:
        client.close()
    assert [line for line in promised if line not in printed.getvalue().splitlines()] == []


def test_models_files_of_the_documents_are_good(tmp_path: Path) -> None:
    found = [example for example in ALL if example.text.startswith("models:")]
    assert len(found) > 3
    for example in found:
        (tmp_path / "models.yaml").write_text(example.text)
        assert read_models_file(tmp_path / "models.yaml"), example.place


@pytest.mark.parametrize("example", ALL, ids=lambda example: example.place)
def test_other_examples_are_well_formed(example: Example) -> None:
    match example.language:
        case "json":
            for line in example.text.splitlines():
                json.loads(line)
        case "yaml":
            yaml.safe_load(example.text)
        case "toml":
            tomllib.loads(example.text)
        case other:
            assert other in ("sh", "python", "js", "mermaid"), example.place


def test_doctor_is_green_beside_a_fresh_site(stack: ServedStack, manage: Manage) -> None:
    done = manage("doctor")
    # A machine that is short of disk or busy may well have a warning; the settings have none.
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 fail" in done.stdout
    assert all("SECRET_KEY" not in line for line in done.stdout.splitlines() if line[:2] != "ok")
