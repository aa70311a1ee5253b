"""Server-sent events, as far as OpenAI's streams have any: lines of ``data:``."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"

_IGNORED = (b":", b"event:", b"id:", b"retry:")
_SHOWN = 200
_LONGEST_LINE = 16 * 2**20


class NoEventStream(Exception):
    """A line is not part of an event stream."""


class EventLines:
    """Cuts bytes, which come in pieces cut anywhere, into the data of events.

    Each line of data is an event of its own: no server spreads a chunk over several.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of the events that are whole by now. Raise NoEventStream."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _LONGEST_LINE:
            raise NoEventStream(f"a line of more than {_LONGEST_LINE} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
            elif line and not line.isspace():
                yield from self._other(line)

    def end(self) -> Iterator[bytes]:
        """Yield the data of a last line that nothing ends. Raise NoEventStream."""
        yield from self.feed(b"\n")

    def _other(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"error:"):
            yield b'{"error":' + line[6:] + b"}"
        elif not line.startswith(_IGNORED):
            raise NoEventStream(repr(line[:_SHOWN].decode(errors="replace")))
