"""The outgoing frames of one generation: what is taken, and again until it is acknowledged."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from inference_site.runs.streams.batches import Batch, Ending
from worker.runtime.publisher import StopReason, Stream

END = Ending((b"usage", b"done"), 200, b"{}", finish_reason="stop")


class CountingShard:
    """Counts the wake-ups of a stream."""

    def __init__(self) -> None:
        self.wakes = 0
        self.sent_bytes = 0
        self.is_due = False

    def wake(self) -> None:
        self.wakes += 1


def new_stream(shard: CountingShard | None = None) -> Stream:
    return Stream("g", cast(Any, shard or CountingShard()))


def test_an_end_without_frames_is_a_batch() -> None:
    stream = new_stream()
    stream.close(Ending((), 200, b"{}"))
    batch = stream.take()
    assert batch is not None
    assert (batch.next, batch.ending is not None) == (0, True)


def test_what_is_large_goes_out_in_parts_one_soon_after_the_other() -> None:
    shard = CountingShard()
    stream, large = new_stream(shard), [b"x" * 100_000] * 5
    stream.append(large)
    stream.close(Ending([b"y" * 1_000_000, b"done"], 200, b"{}"))
    batches, before = list[Batch](), shard.wakes
    while not batches or batches[-1].ending is None:
        batch = stream.take()
        assert batch is not None
        batches.append(batch)
        stream.acknowledge()
    assert [len(batch.frames) for batch in batches] == [2, 2, 1, 1, 1]
    assert [batch.first for batch in batches] == [0, 2, 4, 5, 6]
    assert shard.wakes == before + 4


def test_a_failure_that_comes_first_goes_out_at_once() -> None:
    stream = new_stream()
    stream.close(Ending([b"y" * 1_000_000, b"done"], 400, b"{}", is_early=True))
    batch = stream.take()
    assert batch is not None
    assert (len(batch.frames), batch.ending is not None) == (2, True)


def test_the_first_frames_those_at_the_time_of_a_tick_and_the_end_wake_the_publisher() -> None:
    shard = CountingShard()
    stream = new_stream(shard)
    stream.append([b"0"])
    assert shard.wakes == 1
    stream.append([b"1"])
    assert shard.wakes == 1
    shard.is_due = True
    stream.append([b"2"])
    assert shard.wakes == 2
    stream.close(END)
    assert shard.wakes == 3


def test_the_first_reason_to_stop_counts() -> None:
    stream = new_stream()
    assert not stream.cancelled
    stream.stop(StopReason.REQUESTED)
    stream.stop(StopReason.SHUTDOWN)
    assert stream.cancelled
    assert stream.stop_reason is StopReason.REQUESTED


@given(st.lists(st.sampled_from(["append", "take", "acknowledge"]), max_size=40))
def test_no_order_of_calls_loses_repeats_or_reorders_a_frame(calls: list[str]) -> None:
    """Whoever writes each batch that was taken, once, has every frame once and the end last."""
    stream, log, appended = new_stream(), dict[int, Batch](), list[bytes]()

    def take() -> Batch | None:
        if (batch := stream.take()) is not None:
            assert log.setdefault(batch.first, batch) is batch
        return batch

    for call in calls:
        if call == "append":
            frame = b"%d" % len(appended)
            appended.append(frame)
            stream.append([frame])
        elif call == "take":
            take()
        elif take() is not None:
            stream.acknowledge()
    stream.close(END)
    while (batch := take()) is not None and batch.ending is None:
        stream.acknowledge()
    batches = list(log.values())
    assert [f for batch in batches for f in batch.frames] == [*appended, b"usage", b"done"]
    assert [batch.ending for batch in batches if batch.ending] == [END]
    assert [batch.next for batch in batches[:-1]] == [batch.first for batch in batches[1:]]


def test_what_was_sent_is_sent_again_from_the_first_frame() -> None:
    stream = new_stream()
    stream.start_at(2, (b"text",), (b"0", b"1"))
    for frame in (b"2", b"3"):
        stream.append([frame])
        stream.take()
        stream.acknowledge()
    stream.append([b"4"])
    stream.take()
    stream.append([b"5"])
    assert stream.can_resend
    stream.send_again()
    assert not stream.can_resend
    batch = stream.take()
    assert batch is not None
    assert (batch.first, list(batch.frames)) == (0, [b"0", b"1", b"2", b"3", b"4", b"5"])
    assert not stream.texts
    stream.close(END)
    stream.acknowledge()
    assert stream.can_resend
    stream.take()
    stream.send_again()
    batch = stream.take()
    assert batch is not None
    assert (batch.first, len(batch.frames), batch.ending) == (0, 8, END)


def test_frames_that_are_too_many_or_unknown_are_not_sent_again() -> None:
    unknown, large, among_many = new_stream(), new_stream(), new_stream()
    unknown.start_at(2)
    large.append([b"x" * (3 * 1024 * 1024)])
    among_many._shard.sent_bytes = 40 * 1024 * 1024
    for stream in (unknown, large, among_many):
        stream.append([b"0"])
        while stream.take() is not None:
            stream.acknowledge()
        assert not stream.can_resend
