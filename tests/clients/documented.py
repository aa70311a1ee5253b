"""docs/agents.md as the clients are told of a site: the blocks of its sections, filled in."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agents.md"
_BLOCK = re.compile(r"(?m)^```\w+\n((?:.*\n)*?)```$")


def sections() -> dict[str, list[str]]:
    """Return the blocks below each heading."""
    parts = re.split(r"(?m)^###? (.+)$", PAGE.read_text(encoding="utf-8"))[1:]
    return {parts[n]: _BLOCK.findall(parts[n + 1]) for n in range(0, len(parts), 2)}


def documented(section: str, url: str, key: str, model: str) -> str:
    """Return the first block of a section for this site, key and model."""
    filled = {"URL": url, "KEY": key, "MODEL": model}
    text = sections()[section][0]
    return re.sub(r"\b(?:URL|KEY|MODEL)\b", lambda found: filled[found[0]], text)


def variables_and_command(shell: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a shell block sets, and the words of its command."""
    words = [word for word in shlex.split(shell) if word != "export"]
    is_set = re.compile(r"[A-Z_]+=").match
    env = dict(word.split("=", 1) for word in words if is_set(word))
    return env, [word for word in words if not is_set(word)]
