"""The stack of the tests of this folder, whose settings are changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from tests.served_stack import ROOT, ServedStack, served_stack

PROGRAM = ROOT / "tests" / "model_server.py"
MODELS = """
  apart: {{file: {demo}, slots: 2, threads: 1, context_length: 512}}
  cut: {{file: {cut}}}
  single: {{engine: scripted, slots: 1}}
  slow: {{engine: scripted, slots: 2, load_ms: 8000, aliases: [sluggish]}}
  brief: {{engine: scripted, slots: 2, keep_alive: 2}}
  broken: {{engine: scripted, load_fails: its weights are torn}}
  own:
    engine: command
    command: "{python} {program} {{port}} {{api_key}} {{file}} 4 512"
    file: {demo}
    flavor: llama_cpp
    slots: 4
    context_length: 512
    chat_template_kwargs: {{enable_thinking: false}}
  second: {{file: {demo}, slots: 2, context_length: 2048}}
"""
GRACE_S = 5


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    """A stack that loads models on demand, stops workers soon, and has a grace for clients.

    Its key may load models.
    """
    cut = tmp_path_factory.mktemp("weights") / "cut.gguf"
    cut.write_bytes(DEMO_FILE.read_bytes()[:100_000])
    with served_stack(
        MODELS.format(demo=DEMO_FILE, cut=cut, python=sys.executable, program=PROGRAM),
        START_MODELS="demo,scripted,single",
        ON_CHUNK="tests.hook_functions.on_chunk",
        LOAD_ON_DEMAND="true",
        DRAIN_TIMEOUT_S="1",
        DISCONNECT_GRACE_S=str(GRACE_S),
        AFFINITY_WAIT_MS="2000",  # A worker that is only slow is not passed over.
    ) as running:
        running.sql("UPDATE accounts_apikey SET scopes = '{inference,models:write}'")
        yield running
