"""Tool calls out of a stream, whatever the server makes of their pieces.

Servers send calls whole or in pieces, with or without an index and an id, repeat the name in every
piece, give every call the index 0, or send arguments as an object. What comes out is always the
same: a first piece with id and name, then pieces of the arguments, calls numbered from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from inference_site.domain.deltas import ToolCallDelta
from worker.engines.chat.forced_call import new_call_id


@dataclass(slots=True)
class _Call:
    """One call: ``number`` is set once its first piece, which needs the name, was passed on."""

    id: str | None = None
    name: str | None = None
    number: int | None = None
    arguments: list[str] = field(default_factory=list)

    def is_complete(self) -> bool:
        """Whether the arguments are JSON by now."""
        try:
            orjson.loads("".join(self.arguments))
        except orjson.JSONDecodeError:
            return False
        return True


class CallReader:
    """The calls of one choice. A fold over the ``tool_calls`` of its deltas."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._begun = 0

    @property
    def any(self) -> bool:
        """Whether there is a call."""
        return self._begun > 0

    def feed(self, pieces: list[dict[str, Any]]) -> list[ToolCallDelta]:
        """Take the pieces of one chunk. Raise TypeError or AttributeError for what is none."""
        return [delta for piece in pieces for delta in self._take(piece)]

    def finish(self) -> list[ToolCallDelta]:
        """Return what is missing at the end: arguments of calls that came without any."""
        empty = [c for c in self._calls if c.number is not None and not "".join(c.arguments)]
        return [self._delta(call, "{}") for call in empty]

    def _take(self, piece: dict[str, Any]) -> list[ToolCallDelta]:
        function = piece.get("function") or {}
        name, arguments = function.get("name") or None, function.get("arguments") or ""
        if not isinstance(arguments, str):
            arguments = orjson.dumps(arguments).decode()
        call = self._call(piece.get("index"), piece.get("id") or None, name)
        call.arguments.append(arguments)
        if call.number is not None:
            return [self._delta(call, arguments)] if arguments else []
        if call.name is None:
            return []
        call.number, self._begun = self._begun, self._begun + 1
        held = "".join(call.arguments)
        first = ToolCallDelta(call.number, "", call.id or new_call_id(), call.name, self._index)
        return [first, self._delta(call, held)] if held else [first]

    def _delta(self, call: _Call, arguments: str) -> ToolCallDelta:
        assert call.number is not None
        return ToolCallDelta(call.number, arguments, index=self._index)

    def _call(self, index: int | None, call_id: str | None, name: str | None) -> _Call:
        """Return the call that a piece belongs to, with what the piece says of it."""
        call = self._known(index, call_id, name)
        if call is None:
            call = _Call()
            self._calls.append(call)
            if index is not None:
                self._by_index[index] = call
        call.id = call.id or (call_id and str(call_id))
        call.name = call.name or (name and str(name))
        return call

    def _known(self, index: int | None, call_id: str | None, name: str | None) -> _Call | None:
        if index is not None:
            known = self._by_index.get(index)
        elif call_id is not None:
            known = next((call for call in self._calls if call.id == call_id), None)
            # A piece may be the first with the id of the call that is being read.
            if known is None and name is None and self._calls and self._calls[-1].id is None:
                known = self._calls[-1]
        else:
            known = self._calls[-1] if self._calls else None
        if known is None or not name or not known.arguments:
            return known
        is_other = call_id is not None and call_id != known.id
        repeats = name == known.name and not is_other and index is not None
        return None if not repeats and known.is_complete() else known
