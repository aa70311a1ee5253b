"""Hooks for tests/e2e/test_hooks.py: what they do is written in the chunks.

They act on the models whose names begin with ``hooked``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from inference_site.domain.deltas import ToolCallDelta
from worker.runtime.hooks import Chunk, HookContext


def on_chunk(context: HookContext, chunk: Chunk) -> Chunk | None:
    """Write in capitals; drop, raise or return nonsense where the text says so."""
    if not context.model.startswith("hooked"):
        return chunk
    if isinstance(chunk, ToolCallDelta):
        return None if chunk.call == 0 and context.model == "hooked-demo" else chunk
    match chunk.text:
        case "drop":
            return None
        case "raise" | "9":
            raise ValueError("a secret of the site")
        case "nonsense":
            return cast(Chunk, "no chunk")
    return replace(chunk, text=chunk.text.upper())


def on_done(context: HookContext, chunks: Sequence[Chunk]) -> None:
    """Note what was passed on in the file that ``HOOK_NOTES`` names; raise where it says so."""
    if not context.model.startswith("hooked"):
        return
    texts = [chunk.text for chunk in chunks if not isinstance(chunk, ToolCallDelta)]
    if "RAISE LATE" in texts:
        raise ValueError("a secret of the site")
    note = {"id": context.generation_id, "kind": context.kind, "model": context.model}
    with Path(os.environ["HOOK_NOTES"]).open("a") as notes:
        notes.write(json.dumps({**note, "texts": texts}) + "\n")
