"""Batches: consecutive frames of one stream, as the event log and the hints carry them.

Long texts that the frames and the request document of one generation have in common, such as the
instructions and tools that the events of a response repeat, are stored once: in the first entry of
the event log. Elsewhere a reference stands for such a text. Data without references is stored as it
is, other data as a list of pieces and of the numbers of texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack

LAST_ID = b"18446744073709551615-0"
"""The greatest id of an entry; the entry that ends a stream has it."""
FIELD = b"b"
TEXTS_FIELD = b"t"
"""In the first entry of a log: the texts that its frames refer to."""
_LONG_TEXT = 4096
"""Bytes from which on a text is stored once."""
_LOST_FRAMES = 1_000_000
"""More frames than any stream has."""

Shortened = bytes | list[bytes | int]
Entries = list[tuple[bytes, dict[bytes, bytes]]]


class SharedTextsMissing(Exception):
    """The data refers to texts that are not given."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a stream: its last frames, and the response to a client that does not stream.

    With ``is_early``, ``status`` and ``body`` also answer a streaming client, because the stream
    contains only a failure. ``error_code`` is empty unless the generation failed, ``finish_reason``
    unless it completed. ``retry_after_s`` is the ``Retry-After`` of a 429, 503 or 504. With
    ``begins_log`` the log was empty when a stream was ended in place of its worker: frames that a
    reader has were in a log that is lost. ``media_type`` is that of a body that is not JSON.
    """

    frames: Sequence[bytes]
    status: int
    body: bytes
    finish_reason: str = ""
    error_code: str = ""
    is_early: bool = False
    retry_after_s: int | None = None
    begins_log: bool = False
    media_type: str = ""


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
        """Encode the batch for the log and the channel layer, with references to ``texts``."""
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
        """Decode the result of ``pack``. Raise SharedTextsMissing if it needs texts."""
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
class StoredStream:
    """A finished stream that can be rebuilt from the database, of about ``size_bytes``.

    ``make`` reads the database and returns the stream as one batch.
    """

    size_bytes: int
    make: Callable[[], Batch]


@dataclass(frozen=True, slots=True)
class Sent:
    """The frames that a stream has sent, all of them, and the number of the next.

    ``frames`` is empty when Redis has lost some of them.
    """

    frames: Sequence[bytes] = ()
    next: int = 0

    def beyond(self) -> Sent:
        """Return where to continue when frames are lost.

        No reader expects these numbers next, so all readers learn of the loss.
        """
        return Sent(next=self.next + _LOST_FRAMES)


def is_renumbered(number: int, expected: int) -> bool:
    """Whether a stream that continues at this number lost frames in between (``Sent.beyond``)."""
    return number // _LOST_FRAMES > expected // _LOST_FRAMES


def frames_of(batches: Iterable[Batch]) -> list[bytes]:
    """Return the frames of consecutive batches."""
    return [frame for batch in batches for frame in batch.frames]


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


def is_whole(batches: Sequence[Batch]) -> bool:
    """Whether a log has all frames from the first on; an empty log counts as whole."""
    firsts = itertools.accumulate((len(batch.frames) for batch in batches), initial=0)
    return all(batch.first == n for batch, n in zip(batches, firsts, strict=False))


def sent_so_far(batches: Sequence[Batch]) -> Sent:
    """Return the frames that a stream has sent, from the entries of its log."""
    frames = tuple(frames_of(batches)) if is_whole(batches) else ()
    return Sent(frames, batches[-1].next if batches else 0)


def decode_entries(entries: Entries, texts: Sequence[bytes] = ()) -> list[Batch]:
    """Return the batches of entries of a log. Raise SharedTextsMissing without their texts.

    ``texts`` are not needed if the first entry of the log is among the entries.
    """
    texts = texts or texts_of(entries)
    return [Batch.unpack(entry[FIELD], texts) for _, entry in entries]


def decode_log(entries: Entries) -> list[Batch]:
    """Return the batches of a whole log; none if the entry with the shared texts is lost."""
    try:
        return decode_entries(entries)
    except SharedTextsMissing:
        return []


def decode_hint(payload: bytes) -> Batch | None:
    """Return the batch of a hint; None if it says only that the log has more."""
    try:
        return Batch.unpack(payload) if payload else None
    except SharedTextsMissing:
        return None


def texts_of(entries: Any) -> tuple[bytes, ...]:
    """Return the shared texts of a log, from its first entry."""
    packed = entries[0][1].get(TEXTS_FIELD) if entries else None
    return tuple(msgpack.unpackb(packed)) if packed else ()


def frame_span(head: bytes) -> tuple[int, int]:
    """Return the numbers of the first frame of a batch and of the frame after the batch.

    ``head`` is the beginning of its payload.
    """
    unpacker = msgpack.Unpacker()
    unpacker.feed(head)
    unpacker.read_array_header()
    first: int = unpacker.unpack()
    return first, first + unpacker.read_array_header()


def long_texts(texts: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the texts that are long enough to be stored once, the longest first."""
    return tuple(sorted({text for text in texts if len(text) >= _LONG_TEXT}, key=len, reverse=True))


def shorten(data: bytes, texts: Sequence[bytes]) -> Shortened:
    """Return the data with references in place of the texts."""
    pieces: list[bytes | int] = [data]
    for number, text in enumerate(texts):
        if len(text) > len(data):
            continue
        split: list[bytes | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                split.append(piece)
                continue
            first, *others = piece.split(text)
            split.append(first)
            for other in others:
                split += (number, other)
        pieces = split
    return data if len(pieces) == 1 else pieces


def restore(stored: Shortened, texts: Sequence[bytes]) -> bytes:
    """Return the data that was shortened with these texts. Raise SharedTextsMissing for none."""
    if isinstance(stored, bytes):
        return stored
    if not texts:
        raise SharedTextsMissing
    return b"".join(piece if isinstance(piece, bytes) else texts[piece] for piece in stored)
