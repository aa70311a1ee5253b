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
    ("content", "told"),
    [
        (None, "the model own cannot be served: {folder}/own.gguf does not exist"),
        (b"GGUF", "the model own cannot be served: {folder}/own.gguf: it is cut short"),
        (b"<html>", "the model own cannot be served: {folder}/own.gguf: it is not a GGUF file"),
    ],
)
def test_a_model_file_that_is_missing_or_broken_is_told_at_once(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    (tmp_path / "models.yaml").write_text("models: {own: {file: own.gguf}}")
    if content is not None:
        (tmp_path / "own.gguf").write_bytes(content)
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
    assert told.format(folder=tmp_path) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "data").exists()
