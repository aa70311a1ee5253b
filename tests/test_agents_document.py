"""docs/agents.md: it says of every client that is run how it is connected."""

from __future__ import annotations

import json
import tomllib

import yaml

from tests.clients.clients import CLIENTS
from tests.clients.documented import documented, sections, variables_and_command

SITE = ("http://127.0.0.1:9", "the-key", "the-model")


def test_every_client_that_is_run_has_a_section_with_its_configuration() -> None:
    headings = [h.lower().replace(" ", "-") for h, blocks in sections().items() if blocks]
    names = [client.title.replace(" ", "-") for client in CLIENTS]
    assert [name for name in names if not any(h.startswith(name) for h in headings)] == []


def test_blocks_are_filled_in_and_no_name_is_left() -> None:
    codex = tomllib.loads(documented("Codex", *SITE))
    assert codex["model"] == "the-model"
    assert codex["model_providers"]["site"]["base_url"] == "http://127.0.0.1:9/v1"
    assert codex["model_providers"]["site"]["env_key"] == "SITE_KEY"
    models = json.loads(documented("opencode", *SITE))["provider"]["site"]["models"]
    assert models["the-model"]["limit"]["context"] == 32768
    [entry] = yaml.safe_load(documented("llm", *SITE))
    assert entry["api_base"] == "http://127.0.0.1:9/v1"


def test_blocks_of_a_shell_are_variables_and_a_command() -> None:
    env, command = variables_and_command(documented("Claude Code", *SITE))
    assert command == ["claude"]
    assert env == {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_AUTH_TOKEN": "the-key",
        "ANTHROPIC_MODEL": "the-model",
        "ANTHROPIC_SMALL_FAST_MODEL": "the-model",
    }
    assert variables_and_command(documented("aider", *SITE))[1] == [
        *("aider", "--model", "openai/the-model"),
    ]
