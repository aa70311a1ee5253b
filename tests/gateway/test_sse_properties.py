"""Server-sent events: however frames come and however the bytes are cut, the same events arrive."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from inference_site.gateway.delivery import SseSink
from inference_site.runs.streams.batches import Batch, Ending
from worker.engines.openai_upstream.chunks import EventLines

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["\n", "\r\n", "data: ", "\n\ndata: [DONE]\n\n", "\u2028", "\x00", ": ping", "\\n"]
)
_DONE = b"[DONE]"


def _pieces(whole: Any, places: list[int]) -> list[Any]:
    """What comes between these places; some of the pieces are empty."""
    marks = sorted(place % (len(whole) + 1) for place in places)
    return [whole[start:end] for start, end in pairwise([0, *marks, len(whole)])]


async def _sent(batches: list[list[bytes]]) -> list[bytes]:
    """The bodies of the messages that a client gets for these batches, the last with an ending."""
    messages: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    sink, first = SseSink(send, [], 0.0), 0
    for number, frames in enumerate(batches):
        ending = Ending((), 200, b"") if number == len(batches) - 1 else None
        await sink.write([Batch(first, frames, ending)] if frames or ending else [], ending)
        first += len(frames)
    assert [message["type"] for message in messages[1:]] == ["http.response.body"] * (
        len(messages) - 1
    )
    assert [message["more_body"] for message in messages[1:]].index(False) == len(messages) - 2
    return [message["body"] for message in messages[1:]]


@given(
    texts=st.lists(_TEXT, max_size=8),
    between_batches=st.lists(st.integers(min_value=0), max_size=6),
    between_reads=st.lists(st.integers(min_value=0), max_size=12),
)
def test_a_client_reads_the_events_that_were_written(
    texts: list[str], between_batches: list[int], between_reads: list[int]
) -> None:
    written = [orjson.dumps({"text": text}) for text in texts] + [_DONE]
    frames = [b"data: " + event + b"\n\n" for event in written]
    bodies = asyncio.run(_sent(_pieces(frames, between_batches)))
    assert [body for body in bodies if body not in (b"", b": ping\n\n")] == frames
    reader, read = EventLines(), list[bytes]()
    for piece in _pieces(b"".join(bodies), between_reads):
        read += reader.feed(piece)
    assert read == written
