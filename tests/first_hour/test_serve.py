"""From nothing to a served model, and what is said on the way."""

from __future__ import annotations

import datetime as dt
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from tests.served_stack import ROOT, ServedStack
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(400)  # The first test starts a whole site.


def answers(stack: ServedStack, model: str) -> bool:
    """Whether a completion of the model comes; what it says means nothing."""
    done = stack.client().completions.create(model=model, prompt="Once", max_tokens=5)
    return done.usage is not None and done.usage.completion_tokens > 0


def test_a_model_of_a_hub_is_fetched_and_served(stack: ServedStack) -> None:
    assert answers(stack, "tiny.q4_k_m")
    file = stack.data_dir / "models" / "org" / "repo" / "tiny.Q4_K_M.gguf"
    assert file.read_bytes() == DEMO_FILE.read_bytes()
    assert [model.id for model in stack.client().models.list()][:1] == ["demo"]


def test_the_end_of_a_start_is_one_block(stack: ServedStack) -> None:
    _, block = stack.text().split("\n\n", 1)
    shown = ["/admin/   user: admin   password: ", "/v1 ", f"key: {stack.key}", "/docs", "curl "]
    assert all(part in block for part in shown), block
    assert '"model": "tiny.q4_k_m"' in block
    assert "\033" not in block, "there is colour only on a terminal"


def test_the_site_answers_only_when_the_first_key_is_there(stack: ServedStack) -> None:
    log = (stack.data_dir / "log" / "web.log").read_text()
    found = re.search(r"^(\S+ \S+) INFO daphne.cli: Starting server", log, re.MULTILINE)
    assert found, log
    answers_from = dt.datetime.fromisoformat(found[1]).replace(tzinfo=dt.UTC).timestamp()
    assert (stack.data_dir / "api_key").stat().st_mtime < answers_from


def test_a_file_that_is_put_into_the_folder_is_served_without_a_restart(
    stack: ServedStack,
) -> None:
    part = stack.data_dir / "models" / "dropped.part"
    part.write_bytes(DEMO_FILE.read_bytes())
    part.rename(part.with_name("Dropped.gguf"))

    with stack.http() as http:

        def is_loaded() -> bool:
            assert http.get("/health/ready").status_code == 200
            models = http.get("/v1/models").json()["data"]
            return any(one["id"] == "dropped" and one["status"] == "loaded" for one in models)

        wait_until(is_loaded, 300)
    assert answers(stack, "dropped")


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"WEB_PROCESSES": "65"}, "At most 64 processes for --web."),
        ({"WORKER_PROCESSES": "65"}, "At most 64 processes for --workers."),
        ({"DATA_DIR": "/dev/null/data"}, "DATA_DIR cannot be made: "),
    ],
)
def test_what_serve_cannot_do_is_told_in_one_line(
    tmp_path: Path, env: dict[str, str], told: str
) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "serve", "--port", "1"],
        cwd=ROOT,
        env={**os.environ, "DATA_DIR": str(tmp_path / "data"), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_data_directory_that_cannot_be_used_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "log").touch()  # In place of a folder.
    done = subprocess.run(
        [sys.executable, "manage.py", "serve", "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "DATA_DIR": str(tmp_path), "REAL_MODEL": "false"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    told = f"CommandError: DATA_DIR cannot be used: [Errno 17] File exists: '{tmp_path}/log'."
    assert done.stderr.splitlines() == [told]


def test_model_files_that_are_missing_or_broken_are_told_at_once(tmp_path: Path) -> None:
    entries = ", ".join(f"{name}: {{file: {name}.gguf}}" for name in ("gone", "short", "other"))
    (tmp_path / "models.yaml").write_text(f"models: {{{entries}}}")
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    (tmp_path / "other.gguf").write_bytes(b"<html>")
    env = {"DATA_DIR": str(tmp_path / "data"), "MODELS_FILE": str(tmp_path / "models.yaml")}
    done = subprocess.run(
        [sys.executable, "manage.py", "serve", "--port", "1"],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    cannot = "the model {0} cannot be served: {1}/{0}.gguf"
    faults = {
        "gone": " does not exist",
        "short": ": it is cut short",
        "other": ": it is not a GGUF",
    }
    told = done.stderr.splitlines()
    assert len(told) == len(faults)
    for line, (name, fault) in zip(told, faults.items(), strict=True):
        assert cannot.format(name, tmp_path) + fault in line
    assert not (tmp_path / "data").exists()
