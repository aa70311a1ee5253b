"""``make clients``: runs real clients against a running site, and writes docs/clients.md.

Each client is installed from its registry into ``var/clients`` and told of the site by its own
configuration. One model is played by this process (``played_model.py``), so that agents make the
calls they are meant to make; the other is the small real model that ships with the product.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.clients.clients import CLIENTS, FOLDER, MODEL, SMALL, Client, Site, Steps
from tests.clients.played_model import CONTEXT_LENGTH, play
from tests.clients.recorded import Recorder
from tests.real_servers.servers import packaged_file
from tests.served_stack import ROOT, served_stack
from tests.upstream_server import UpstreamServer

PAGE = ROOT / "docs" / "clients.md"
SEEN = Path(__file__).with_name("seen.json")
_HEAD = """# Clients that were run

`make clients` installs these clients from their registries, tells each of a running site by its
own configuration ([connect your agent](agents.md)), and runs it unmodified. Two models answer: one
whose turns are written in the prompt, so that an agent makes the calls it is meant to make, and
SmolLM2 (135 million parameters). Agents are played because the small real models that a package
registry has cannot drive one; with `--agent-model FILE.gguf` Codex, Claude Code and opencode ask
that model too (step *answers*). This page is written by `python -m tests.clients --write`.

| client | version | speaks | what was done | date |
|---|---|---|---|---|
"""
_MODELS = """
  {model}:
    engine: openai_upstream
    base_url: {url}
    flavor: vllm
    capabilities: [chat, grammar, tools, vision]
    context_length: {context}
    slots: 8
  {small}:
    file: {file}
    slots: 2
    threads: 2
"""

_AGENT = "agent"
_AGENT_MODEL = """
  {name}:
    file: {file}
    context_length: 32768
    slots: 1
"""

Row = dict[str, Any]


def main() -> int:
    """Return 1 if a step of a client failed."""
    options = _options()
    file = packaged_file()
    if file is None:
        print("There are no weights: `make .venv/.real-model` installs some.")
        return 1
    server = UpstreamServer()
    server.models, server.answers = [MODEL], [play]
    found: dict[str, Row] = {}
    models = _MODELS.format(
        model=MODEL,
        small=SMALL,
        url=server.url,
        file=file.resolve(),
        context=CONTEXT_LENGTH,
    )
    agent = _AGENT if options.agent_model else ""
    if agent:
        models += _AGENT_MODEL.format(name=agent, file=options.agent_model.resolve(strict=True))
    with server.running(), served_stack(models, DEFAULT_MODEL=SMALL) as stack:
        site = Site(stack.url, stack.key, agent)
        for client in CLIENTS:
            if not options.only or client.name in options.only:
                found[client.name] = row = _row(client, site, is_recorded=options.write)
                print(f"{client.name} {row['version']}: {_done(row)}", flush=True)
    if options.write:
        _write(found)
    return int(any(error for row in found.values() for error in row["steps"].values()))


def _row(client: Client, site: Site, *, is_recorded: bool) -> Row:
    version, today = "", f"{datetime.now(UTC):%Y-%m-%d}"
    try:
        version = client.install()
        with tempfile.TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as name:
            folder = Path(name) / client.name
            folder.mkdir()
            if client.is_recorded and is_recorded:
                steps = _recorded(client, version, site, folder)
            else:
                steps = client.run(site, folder)
            steps = steps or {"it runs": "it has reported nothing"}
    except (OSError, subprocess.SubprocessError) as exc:
        said = getattr(exc, "output", "") or ""
        steps = {"it runs": f"{exc} {said[-300:]}".strip()}
    return {"version": version, "speaks": client.protocols, "steps": steps, "date": today}


def _recorded(client: Client, version: str, site: Site, folder: Path) -> Steps:
    """Run a client, and write what its first turns were asked with."""
    with Recorder(site.url).running() as recorder:
        steps = client.run(replace(site, url=recorder.url), folder)
    recorder.write(client.name, version, {str(folder): "/work", str(FOLDER): "/clients"})
    return steps


def _done(row: Row) -> str:
    return "; ".join(
        f"{step} {'✗ ' + ' '.join(error.split()) if error else '✓'}"
        for step, error in row["steps"].items()
    )


def _write(found: dict[str, Row]) -> None:
    """Put these results in place of earlier ones, and write the page."""
    earlier = json.loads(SEEN.read_text(encoding="utf-8")) if SEEN.exists() else {}
    merged = {**earlier, **found}
    rows = {client.name: merged[client.name] for client in CLIENTS if client.name in merged}
    SEEN.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(_HEAD + "".join(_lines(rows)), encoding="utf-8")


def _lines(rows: dict[str, Row]) -> Iterator[str]:
    titles = {client.name: client.title for client in CLIENTS}
    for name, row in rows.items():
        done = _done(row).replace("|", "\\|")
        cells = (titles[name], row["version"], row["speaks"], done, row["date"])
        yield f"| {' | '.join(cells)} |\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.clients", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[client.name for client in CLIENTS])
    written = "write docs/clients.md, and requests of agents into tests/e2e/bodies"
    parser.add_argument("--write", action="store_true", help=written)
    parser.add_argument("--agent-model", type=Path, help="a GGUF file that can drive agents")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
