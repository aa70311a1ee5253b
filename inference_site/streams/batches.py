"""The value that ends a stream.

Long texts that the frames and the document of one generation have in common, kept once.

The events of a response repeat its instructions and tools. The first entry of the event log has
these texts; in documents and frames a reference stands for each: data without references is stored
as it is, other data as a list of pieces and of the numbers of texts.

Batches of frames: what the entries of an event log hold, and how they are encoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import msgpack


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a stream: its last frames, and the response to a client that does not stream.

    With ``is_early``, ``status`` and ``body`` also answer a streaming client, because the stream
    contains only a failure. ``error_code`` is empty unless the generation failed, ``finish_reason``
    unless it completed. ``retry_after_s`` is the ``Retry-After`` of a 429, 503 or 504. With
    ``begins_log`` the log was empty when a stream was ended in place of its worker: what a reader
    has was in a log that is lost.
    """

    frames: Sequence[bytes]
    status: int
    body: bytes
    finish_reason: str = ""
    error_code: str = ""
    is_early: bool = False
    retry_after_s: int | None = None
    begins_log: bool = False


Stored = bytes | list[bytes | int]
_LONG = 4096
"""Bytes of a text from which on it is stored once."""


class TextsUnknown(Exception):
    """The data refers to texts that are not at hand."""


def long_texts(texts: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return those of the texts that are to be stored once, the longest first."""
    return tuple(sorted({text for text in texts if len(text) >= _LONG}, key=len, reverse=True))


def shorten(data: bytes, texts: Sequence[bytes]) -> Stored:
    """Return the data with references in place of the texts."""
    pieces: list[bytes | int] = [data]
    for number, text in enumerate(texts):
        if len(text) <= len(data):
            pieces = list(chain.from_iterable(_cut(piece, text, number) for piece in pieces))
    return data if len(pieces) == 1 else pieces


def _cut(piece: bytes | int, text: bytes, number: int) -> Iterator[bytes | int]:
    if isinstance(piece, int):
        yield piece
        return
    first, *others = piece.split(text)
    yield first
    for other in others:
        yield number
        yield other


def restore(stored: Stored, texts: Sequence[bytes]) -> bytes:
    """Return the data that was shortened with these texts. Raise TextsUnknown if there are none."""
    if isinstance(stored, bytes):
        return stored
    if not texts:
        raise TextsUnknown
    return b"".join(piece if isinstance(piece, bytes) else texts[piece] for piece in stored)


LAST_ID = b"18446744073709551615-0"
"""The greatest id of an entry, which that of an ending has."""
FIELD = b"b"
TEXTS_FIELD = b"t"
"""In the first entry of a log: the texts that its frames refer to (see ``shared_text``)."""
_LOST_FRAMES = 1_000_000
"""More frames than a stream can have had of which the log was lost."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Batch:
    """Consecutive frames of one stream; ``first`` is the number of the first frame.

    ``ending`` is set on the batch that ends the stream, after its frames.
    """

    first: int
    frames: Sequence[bytes]
    ending: Ending | None = None

    @property
    def next(self) -> int:
        """The number of the frame after this batch."""
        return self.first + len(self.frames)

    def pack(self, texts: Sequence[bytes] = ()) -> bytes:
        """Encode the batch for the log and the channel layer, referring to the log's texts."""
        end = self.ending
        tail = None
        if end is not None:
            tail = {f.name: getattr(end, f.name) for f in fields(end) if f.name != "frames"}
            tail["body"] = shorten(end.body, texts)
        frames = [shorten(frame, texts) for frame in self.frames] if texts else self.frames
        packed: bytes = msgpack.packb((self.first, frames, tail))
        return packed

    @classmethod
    def unpack(cls, payload: bytes, texts: Sequence[bytes] = ()) -> Batch:
        """Decode the result of ``pack``. Raise TextsUnknown if it refers to texts, and has none."""
        first, frames, tail = msgpack.unpackb(payload)
        frames = [restore(frame, texts) for frame in frames]
        if tail is None:
            return cls(first, frames)
        tail["body"] = restore(tail["body"], texts)
        # Another release may send fields that this one does not know.
        known = {f.name: tail[f.name] for f in fields(Ending) if f.name in tail}
        return cls(first, frames, Ending(frames=(), **known))

    @property
    def entry_id(self) -> bytes:
        """The id of this batch's entry in the log."""
        return LAST_ID if self.ending else b"%d-0" % self.next


@dataclass(frozen=True, slots=True)
class Remake:
    """A stream that can be made anew from what is stored, as a whole.

    It takes about ``size_bytes``; ``make`` reads the database.
    """

    size_bytes: int
    make: Callable[[], list[Batch]]


@dataclass(frozen=True, slots=True)
class Sent:
    """What a stream has sent: all of its frames, and the number of the next.

    ``frames`` is empty when some of them are lost with their Redis.
    """

    frames: Sequence[bytes] = ()
    next: int = 0

    def beyond(self) -> Sent:
        """Return where to go on when frames are lost: at numbers that no reader expects next, so
        that all of them are told of the loss."""
        return Sent(next=self.next + _LOST_FRAMES)


def is_beyond(number: int, expected: int) -> bool:
    """Whether a stream that continues at this number was renumbered after a loss of frames (see
    ``Sent.beyond``), for a reader who expects another number."""
    return number // _LOST_FRAMES > expected // _LOST_FRAMES


Entries = list[tuple[bytes, dict[bytes, bytes]]]


def frames_of(batches: Iterable[Batch]) -> list[bytes]:
    """Return the frames of consecutive batches."""
    return [frame for batch in batches for frame in batch.frames]


def batches_of(entries: Entries) -> list[Batch]:
    """Return the batches of a whole log; none if a part is lost that others refer to."""
    try:
        return decoded(entries)
    except TextsUnknown:
        return []


def texts_of(entries: Any) -> tuple[bytes, ...]:
    """Return the texts that the frames of a log refer to, by its first entry."""
    packed = entries[0][1].get(TEXTS_FIELD) if entries else None
    return tuple(msgpack.unpackb(packed)) if packed else ()


def span_of(head: bytes) -> tuple[int, int]:
    """Return the numbers of the first frame of a batch and of the frame after it, by the beginning
    of its payload."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(head)
    unpacker.read_array_header()
    first: int = unpacker.unpack()
    return first, first + unpacker.read_array_header()


def decoded(entries: Entries, texts: Sequence[bytes] = ()) -> list[Batch]:
    texts = texts or texts_of(entries)
    return [Batch.unpack(entry[FIELD], texts) for _, entry in entries]


def hinted(payload: bytes) -> Batch | None:
    """Return the batch of a hint; None if it says only that there is something in the log."""
    try:
        return Batch.unpack(payload) if payload else None
    except TextsUnknown:
        return None


def is_whole(batches: Sequence[Batch]) -> bool:
    """Whether a log has all frames from the first on; one that lost all of them looks whole."""
    return all(batch.first == n for batch, n in zip(batches, _firsts(batches), strict=False))


def _firsts(batches: Sequence[Batch]) -> Iterable[int]:
    return itertools.accumulate((len(batch.frames) for batch in batches), initial=0)


def sent_so_far(batches: Sequence[Batch]) -> Sent:
    """Return what a stream has sent, by its log."""
    frames = tuple(frames_of(batches)) if is_whole(batches) else ()
    return Sent(frames, batches[-1].next if batches else 0)


def trim(batches: Iterable[Batch], number: int) -> list[Batch]:
    """Drop the frames below this number; keep an ending even if no frame is left in its batch."""
    kept = []
    for batch in batches:
        if batch.first >= number and (batch.frames or batch.ending):
            kept.append(batch)
            continue
        frames = list(itertools.islice(batch.frames, max(0, number - batch.first), None))
        if frames or batch.ending:
            kept.append(Batch(max(number, batch.first), frames, batch.ending))
    return kept
