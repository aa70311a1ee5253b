"""What the tools of an agent cost: prompt tokens of Codex, alone and with 40 tools of MCP servers.

``python -m benchmarks.agent_tokens [FILE]``; without a file it is that of ``make serve``, SmolLM2.
The request is the one that Codex sent for its first turn (``tests/e2e/bodies``). The tools are
added as Codex sends them, a namespace for each server; the platform counts the prompt of the
model's own template at ``/v1/responses/input_tokens``.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figures import add_write_option, keep
from benchmarks.processes import ROOT, end_on_sigterm
from benchmarks.real_weights import model_file
from benchmarks.targets import ServedFile, platform

RECORDED = ROOT / "tests" / "e2e" / "bodies" / "codex_0.169.json"
SERVERS, TOOLS_EACH = 4, 10
CONTEXT = 32_768
_COUNTED = ("input", "tools", "tool_choice", "parallel_tool_calls", "reasoning")
_TIMEOUT_S = 120


def namespaces() -> Iterator[dict[str, Any]]:
    """Yield the tools of MCP servers: each with two required parameters and an optional one."""
    for server in range(SERVERS):
        tools = [
            {
                "type": "function",
                "name": f"search_records_{number}",
                "description": "Searches the records of a project. Returns at most 50 of them, the "
                "newest first, with their titles and addresses.",
                "strict": False,
                "parameters": {
                    "type": "object",
                    "properties": {
                        "project": {"type": "string", "description": "The name of the project"},
                        "query": {"type": "string", "description": "Words that must occur"},
                        "limit": {"type": "integer", "description": "How many records to return"},
                    },
                    "required": ["project", "query"],
                },
            }
            for number in range(TOOLS_EACH)
        ]
        name = f"mcp__server_{server}"
        description = f"Tools in the {name} namespace."
        yield {"type": "namespace", "name": name, "description": description, "tools": tools}


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file")
    add_write_option(parser)
    options = parser.parse_args()
    file = model_file(parser, options.file)
    recorded = json.loads(RECORDED.read_text())
    body = {name: recorded[name] for name in _COUNTED if name in recorded}
    without = {**body, "tools": []}
    added = {**body, "tools": [*body["tools"], *namespaces()]}
    tokens = {}
    with platform(ServedFile(file.stem, file, 1, None, CONTEXT)) as at:
        headers = {"Authorization": f"Bearer {at.key}"}
        with httpx.Client(headers=headers, timeout=_TIMEOUT_S) as http:
            for name, asked in (("no tools", without), ("Codex", body), ("with MCP", added)):
                answer = http.post(
                    f"{at.url}/responses/input_tokens", json={**asked, "model": at.model}
                )
                tokens[name] = int(answer.raise_for_status().json()["input_tokens"])
    size = len(json.dumps(list(namespaces())))
    print(f"{file.stem}: Codex without tools {tokens['no tools']:,} tokens")
    print(f"{file.stem}: Codex {tokens['Codex']:,} tokens")
    print(
        f"{file.stem}: Codex with {SERVERS * TOOLS_EACH} MCP tools ({size:,} bytes) "
        f"{tokens['with MCP']:,} tokens"
    )
    if options.write:
        keep(f"agent_tokens/{file.stem}", {"mcp_tools": SERVERS * TOOLS_EACH, **tokens})


if __name__ == "__main__":
    main()
