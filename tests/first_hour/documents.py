"""The examples of README and docs, as they are read: fenced blocks with a language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"(?m)(?:^<!-- not run: (.+) -->\n)?^```(\w+)\n((?:.*\n)*?)```$")


@dataclass(frozen=True, slots=True)
class Example:
    """A block; ``reason`` says why it is not run, if it is not."""

    place: str
    language: str
    text: str
    reason: str


def examples(path: Path) -> Iterator[Example]:
    """Yield the blocks of a document, in order."""
    text = path.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(2)) + 1
        place = f"{path.relative_to(ROOT)}:{line}"
        yield Example(place, found[2], found[3], found[1] or "")


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a block, each in one piece; those of a shell that belong together, too.

    A line that sets a variable belongs to all that follow.
    """
    lines = text.replace("\\\n", " ").splitlines()
    if any(re.match(r"\w+=", line) for line in lines):
        yield "\n".join(lines)
        return
    yield from (line for line in lines if line and not line.startswith("#"))
