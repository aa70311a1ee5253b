"""Charts: what is drawn where, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_site.console.usage_page import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Series, chart


def text(value: float) -> str:
    return f"{value:g}"


def labels(count: int) -> list[str]:
    return [f"t{number}" for number in range(count)]


@given(
    values=st.lists(
        st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), min_size=1, max_size=70
    )
)
def test_stacked_bars_lie_within_the_plot_and_on_each_other(
    values: list[tuple[int, int]],
) -> None:
    series = [Series(str(n), [pair[n] for pair in values]) for n in (0, 1)]
    drawn = chart("c", "C", labels(len(values)), series, "bars", text)
    assert len(drawn.bars) == sum(bool(value) for pair in values for value in pair)
    for bar in drawn.bars:
        assert bar.x >= LEFT
        assert bar.x + bar.width <= WIDTH
        assert bar.y >= TOP - 0.1
        assert bar.y + bar.height <= HEIGHT - BOTTOM + 0.2
    for below, above in zip(drawn.bars, drawn.bars[1:], strict=False):
        if below.x == above.x:
            assert above.y + above.height == pytest.approx(below.y, abs=0.2)


def test_the_bars_of_a_series_are_one_path() -> None:
    series = [Series("a", [1.0, 2.0]), Series("b", [0.0, 2.0])]
    drawn = chart("c", "C", labels(2), series, "bars", text)
    assert [area.path.count("z") for area in drawn.areas] == [2, 1]


def test_the_table_has_every_value_and_escapes_labels() -> None:
    drawn = chart("c", "C", ["<b>"], [Series("a", [1.0]), Series("b", [2.0])], "bars", text)
    cells = '<td class="num">1</td><td class="num">2</td>'
    row = f'<tr><th scope="row">&lt;b&gt;</th>{cells}</tr>'
    assert drawn.table_rows == row


def test_the_axis_ends_at_a_round_number_above_the_highest_stack() -> None:
    series = [Series("a", [30.0, 1.0]), Series("b", [13.0, 0.0])]
    drawn = chart("c", "C", labels(2), series, "bars", text)
    assert [tick.text for tick in drawn.y_ticks] == ["0", "25", "50"]


def test_a_line_has_a_gap_where_nothing_was_measured() -> None:
    drawn = chart("c", "C", labels(4), [Series("p50", [1.0, 2.0, None, 3.0])], "lines", text)
    assert drawn.lines[0].path.count("M") == 2
    assert drawn.rows[2] == ("t2", ["—"])


def test_the_description_has_the_highest_values() -> None:
    series = [Series("in", [1.0, 7.0, 2.0]), Series("out", [0.0, 0.0, 0.0])]
    drawn = chart("c", "C", labels(3), series, "bars", text)
    assert drawn.description == "in: at most 7, at t1"


def test_an_empty_chart_says_so() -> None:
    drawn = chart("c", "C", labels(3), [Series("in", [0.0, 0.0, 0.0])], "bars", text)
    assert drawn.is_empty
    assert drawn.description == "No data in this time range."
    assert drawn.bars == []


def test_a_long_axis_has_few_labels() -> None:
    drawn = chart("c", "C", labels(168), [Series("in", [1.0] * 168)], "bars", text)
    assert 2 <= len(drawn.x_ticks) <= 6
