"""Hooks for tests/e2e/test_hooks.py, whose chunks say what they do, and for tests/faults.

The first act on the models whose names begin with ``hooked``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from inference_site.core.domain.deltas import ToolCallDelta
from worker.runtime.hooks import Chunk, HookContext
from worker.runtime.process import current_runtime
from worker.runtime.wake_up_consumer import WakeUpConsumer


def on_chunk(context: HookContext, chunk: Chunk) -> Chunk | None:
    """Write in capitals; drop, raise or return nonsense where the text says so.

    While a test has a file ``slow``, two models say less than 20 tokens a second.
    """
    if not context.model.startswith("hooked"):
        if context.model in ("demo", "second") and Path(os.environ["DATA_DIR"], "slow").exists():
            time.sleep(0.05)
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


def freeze(context: HookContext, chunk: Chunk) -> Chunk:
    """Stand still, once, after a test has written a file; all that is read waits for its hooks.

    Another file has the consumer of the wake-ups stand still.
    """
    if context.model == "demo" and _is_asked("freeze"):
        time.sleep(600)
    if context.model == "scripted" and _is_asked("freeze-consumer"):
        _freeze_consumer()
    return chunk


def _is_asked(name: str) -> bool:
    file = Path(os.environ["DATA_DIR"], name)
    exists = file.exists()
    file.unlink(missing_ok=True)
    return exists


def _freeze_consumer() -> None:
    """Have a callback on the event loop of Celery's consumer not return."""
    reopen = WakeUpConsumer._reopen

    def stand_still(_: WakeUpConsumer) -> None:
        WakeUpConsumer._reopen = reopen  # type: ignore[method-assign]  # Once is enough.
        time.sleep(600)

    WakeUpConsumer._reopen = stand_still  # type: ignore[method-assign, assignment]
    current_runtime().on_change()
