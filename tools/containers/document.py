"""The commands of docs/deployment.md, which the checks run as an operator would."""

from __future__ import annotations

import re

from tools.containers.stack import ROOT, need


def commands(heading: str, number: int = 0) -> str:
    """Return a block of shell commands under a heading. Raise Failed if there is none."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks: list[str] = re.findall(r"(?ms)^```sh\n(.*?)^```$", section)
    need(len(blocks) > number, f"docs/deployment.md: {heading} has {len(blocks)} blocks")
    return blocks[number]
