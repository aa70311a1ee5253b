"""Long texts are counted piece by piece, and no further than needed."""

from __future__ import annotations

import pytest

from inference_site.core.domain.errors import ContextLengthExceeded
from tests.sinks import RecordingSink
from worker.engines.prompt_length import is_short_enough

LONG = "a" * 200_000


class Counter:
    """A tokenizer with a token for each character; cancels the sink after some calls."""

    def __init__(self, sink: RecordingSink, cancels_after: int = 0) -> None:
        self._sink, self._cancels_after = sink, cancels_after
        self.pieces: list[str] = []

    def __call__(self, text: str) -> int:
        self.pieces.append(text)
        self._sink.cancelled |= len(self.pieces) == self._cancels_after
        return len(text)


def check(text: str, most: int, counter: Counter, sink: RecordingSink) -> bool:
    return is_short_enough(text, most, 1_000, counter, sink, "prompt")


def test_a_short_text_is_not_counted() -> None:
    counter = Counter(sink := RecordingSink())
    assert check(LONG[:8_192], 10, counter, sink)
    assert counter.pieces == []


def test_a_long_text_that_fits_is_counted_in_short_pieces() -> None:
    counter = Counter(sink := RecordingSink())
    assert check(LONG, len(LONG), counter, sink)
    assert "".join(counter.pieces) == LONG
    assert max(map(len, counter.pieces)) == 8_192


def test_counting_ends_once_the_text_has_too_many_tokens() -> None:
    counter = Counter(sink := RecordingSink())
    with pytest.raises(ContextLengthExceeded, match="an estimated") as caught:
        check(LONG, 40_000, counter, sink)
    assert len(counter.pieces) == 5
    assert caught.value.input_tokens == pytest.approx(len(LONG), rel=0.01)
    assert (caught.value.context_length, caught.value.param) == (1_000, "prompt")


def test_nothing_is_counted_for_a_client_that_has_left() -> None:
    counter = Counter(sink := RecordingSink(cancel_after=0))
    assert not check(LONG, len(LONG), counter, sink)
    assert not check("short", 10, counter, sink)
    assert counter.pieces == []


@pytest.mark.parametrize("calls", [1, 3, 7])
def test_counting_ends_when_the_client_leaves(calls: int) -> None:
    counter = Counter(sink := RecordingSink(), cancels_after=calls)
    assert not check(LONG, len(LONG), counter, sink)
    assert len(counter.pieces) == calls
