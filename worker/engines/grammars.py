"""Grammars of clients: each is tried in a process of its own before an engine is given it.

Engines compile a grammar, and step through it, in the thread that serves everybody. A grammar that
ends that thread ends the worker, and one that is slow stops all answers.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from select import select
from typing import Any

import orjson

from inference_site.domain.errors import GenerationFailed, InvalidRequest
from inference_site.domain.request import Constraint

_ROOT = Path(__file__).resolve().parent.parent.parent
_PATIENCE_S = 30
"""For a trial that gets no processor time: its own limit is one of such time."""
_TRIALS_KEPT = 256
_TOO_COMPLEX = "it is too complex: it needs too much time or memory"


class _Trials:
    """The process of the trials; it is started anew when a grammar has ended it. Thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.end)

    def run(self, kind: str, source: str) -> tuple[str, str]:
        """Return what is wrong with a grammar, and its Lark form if it is GBNF.

        Raise GenerationFailed when there is no answer.
        """
        with self._lock:
            if self._process is None:
                self._process = _start()
            answer = self._ask(self._process, json.dumps([kind, source]).encode() + b"\n")
            if answer:
                error, lark = orjson.loads(answer)
                return error, lark
            self.end()
            self._process = _start()  # The next grammar need not wait for it.
        return _TOO_COMPLEX, ""

    def prepare(self) -> None:
        """Start the process, which takes a moment, before the first grammar."""
        with self._lock:
            self._process = self._process or _start()

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> bytes:
        """Return the answer; nothing when the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            if not select([process.stdout], [], [], _PATIENCE_S)[0]:
                self.end()
                raise GenerationFailed("The grammar could not be checked in time.")
            return process.stdout.readline()
        except BrokenPipeError:
            return b""

    def end(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "worker.engines.grammar_trial"],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


_trials = _Trials()
prepare_trials = _trials.prepare


@lru_cache(_TRIALS_KEPT)
def _tried(kind: str, source: str) -> tuple[str, str]:
    return _trials.run(kind, source)


def check_grammar(constraint: Constraint) -> None:
    """Raise InvalidRequest for a grammar that is wrong, or that would keep an engine too busy."""
    if constraint.kind == "json_object":
        return
    error, _ = _tried(constraint.kind, constraint.source)
    if error:
        raise InvalidRequest(f"Invalid grammar: {error.strip()}", constraint.param)


def is_known_schema(schema: str, param: str) -> bool:
    """Return whether llguidance knows all of a JSON schema.

    Raise InvalidRequest for one that would keep an engine too busy.
    """
    error, _ = _tried("json_schema", schema)
    if error == _TOO_COMPLEX:
        raise InvalidRequest(f"Invalid schema: {error}.", param)
    return not error


def gbnf_as_lark(constraint: Constraint) -> str:
    """Return a Lark grammar of the same texts. Raise InvalidRequest as ``check_grammar`` does."""
    check_grammar(constraint)
    return _tried(constraint.kind, constraint.source)[1]


def llguidance_grammar(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own form. Raise InvalidRequest for what it cannot be."""
    from llguidance import grammar_from

    check_grammar(constraint)
    match constraint.kind:
        case "json_object":
            return grammar_from("json_schema", '{"type": "object"}')
        case "gbnf":
            return grammar_from("lark", gbnf_as_lark(constraint))
        case kind:
            return grammar_from(kind, constraint.source)


def regex_as_lark(source: str) -> str:
    """Return a Lark grammar that matches what the expression matches."""
    escaped = source.replace("/", "\\/")
    return f"start: /{escaped}/"


def lark_or_schema(constraint: Constraint) -> str | dict[str, Any]:
    """Return the only part of a llguidance grammar: a Lark grammar, or a JSON schema.

    Raise InvalidRequest for a grammar of other or of several parts.
    """
    match orjson.loads(constraint.source).get("grammars"):
        case [{"lark_grammar": str(lark)}]:
            return lark
        case [{"json_schema": dict(schema)}]:
            return schema
        case _:
            raise InvalidRequest(
                "A llguidance grammar must be {'grammars': [{'lark_grammar': …}]} or "
                "{'grammars': [{'json_schema': …}]} here.",
                constraint.param,
            )
