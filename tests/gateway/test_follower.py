"""One reader's place in one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from inference_site.gateway.follower import Follower
from inference_site.runs.streams.batches import Batch, Ending

END = Ending((), 200, b"{}", finish_reason="stop")
LOST = Ending((), 503, b"{}", error_code="stream_lost")


def batch(first: int, count: int, ending: Ending | None = None) -> Batch:
    """Return a batch whose frames are their own numbers."""
    return Batch(first, [b"%d" % n for n in range(first, first + count)], ending)


def taken(follower: Follower) -> list[bytes]:
    return [frame for part in follower.take() for frame in part.frames]


def test_nothing_follows_the_ending() -> None:
    """The log is read once more before a stream is given up: its end may have come meanwhile."""
    follower = Follower("g")
    follower.offer(batch(0, 2, END))
    assert follower.offer(batch(0, 2, END))
    assert follower.offer(batch(2, 1, LOST))
    assert [part.ending for part in follower.take()] == [END]


def test_hearing_anything_counts_even_what_is_known() -> None:
    follower = Follower("g")
    follower.offer(batch(0, 1))
    follower.received_at = 0.0
    follower.offer(batch(5, 1))
    assert follower.received_at == 0.0
    follower.offer(batch(0, 1))
    assert follower.received_at > 0.0


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=30))
def test_whatever_arrives_no_frame_is_lost_doubled_or_out_of_order(
    offers: Sequence[tuple[int, int]],
) -> None:
    follower = Follower("g")
    for first, count in offers:
        accepted = follower.offer(batch(first, count))
        assert accepted or first > follower.next_number
    follower.offer(batch(0, 20, END))
    parts = follower.take()
    assert [f for part in parts for f in part.frames] == [b"%d" % n for n in range(20)]
    assert parts[-1].ending is END


async def waited_s(follower: Follower, timeout_s: float) -> float:
    started = time.monotonic()
    await follower.wait(timeout_s)
    return time.monotonic() - started


def test_waiting_ends_with_what_has_come_already() -> None:
    follower = Follower("g")
    follower.offer(batch(0, 1))
    assert asyncio.run(waited_s(follower, 60)) < 50


def test_waiting_ends_with_an_offer_or_a_wake() -> None:
    async def scenario() -> None:
        for end in (lambda f: f.offer(batch(0, 1)), Follower.wake):
            follower = Follower("g")
            asyncio.get_running_loop().call_later(0.01, end, follower)
            assert await waited_s(follower, 60) < 50

    asyncio.run(scenario())


def test_waiting_ends_after_the_timeout_and_again() -> None:
    async def scenario() -> None:
        follower = Follower("g")
        assert 0.01 <= await waited_s(follower, 0.02) < 50
        assert 0.01 <= await waited_s(follower, 0.02) < 50

    asyncio.run(scenario())


def test_what_is_refused_wakes_nobody() -> None:
    async def scenario() -> None:
        follower = Follower("g")
        asyncio.get_running_loop().call_later(0.01, follower.offer, batch(5, 1))
        assert await waited_s(follower, 0.1) >= 0.09

    asyncio.run(scenario())


def test_what_is_not_read_is_held_up_to_a_bound_and_read_on_later() -> None:
    follower = Follower("g")
    batches = [Batch(number, [bytes([number]) * 100_000]) for number in range(10)]
    assert all(follower.offer(batch) for batch in batches)
    held = follower.take()
    assert len(held) == 3
    assert follower.is_behind
    assert follower.next_number == 3
    assert follower.offer(batches[9])  # Missing frames are no gap: whoever takes has them read.
    follower.is_behind = False
    assert all(follower.offer(batch) for batch in batches[:6])
    assert [batch.first for batch in follower.take()] == [3, 4, 5]
    assert not follower.is_behind


def test_an_ending_that_a_full_follower_does_not_take_is_read_later() -> None:
    follower = Follower("g")
    large, last = Batch(0, [b"x" * 300_000]), Batch(1, [], Ending((), 200, b""))
    assert follower.offer(large)
    assert follower.offer(last)
    assert [batch.ending for batch in follower.take()] == [None]
    assert follower.is_behind
    assert follower.offer(last)
    assert [batch.ending is None for batch in follower.take()] == [False]
