"""Deadlines of ids, with a real Redis and its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import pytest

from inference_site.core.storage.redis import Deadlines, new_async_clients, site_client
from inference_site.runs.queue import new_id


@pytest.fixture
def deadlines() -> Iterator[Deadlines]:
    kept = Deadlines(new_id("deadlines-"))
    yield kept
    site_client().delete(kept.key)


def push_known(deadlines: Deadlines, after_s: Mapping[str, float]) -> None:
    async def main() -> None:
        client = new_async_clients()[0]
        try:
            await deadlines.push_many(client, after_s, "XX")
        finally:
            await client.aclose()

    asyncio.run(main())


def test_what_is_in_the_past_has_passed(deadlines: Deadlines) -> None:
    deadlines.push("past", -1)
    deadlines.push("future", 60)
    assert deadlines.passed() == ["past"]
    deadlines.forget(["past"])
    deadlines.forget([])
    assert deadlines.passed() == []
    assert site_client().zcard(deadlines.key) == 1


def test_the_later_time_counts_or_the_first_if_that_is_wanted(deadlines: Deadlines) -> None:
    deadlines.push("later", 60)
    deadlines.push("later", -1)
    deadlines.push("first", -1, "NX")
    deadlines.push("first", 60, "NX")
    assert deadlines.passed() == ["first"]


def test_only_what_has_a_deadline_gets_another(deadlines: Deadlines) -> None:
    deadlines.push("known", 60)
    push_known(deadlines, {"known": -1, "unknown": -1})
    push_known(deadlines, {})
    assert deadlines.passed() == ["known"]


def test_no_time_passes_while_the_clock_is_set_ahead(
    deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is pushed on again and again seems to be left when the clock jumps."""
    elapsed_s = [100.0]
    clock = SimpleNamespace(monotonic=lambda: elapsed_s[0])
    monkeypatch.setattr("inference_site.core.storage.redis.time", clock)
    deadlines.push("read", -1)
    assert deadlines.passed() == ["read"]
    elapsed_s[0] -= 3600  # As if the clock of Redis had gone an hour ahead of it.
    assert deadlines.passed() == []
    elapsed_s[0] += 2
    assert deadlines.passed() == []
    elapsed_s[0] += 2
    assert deadlines.passed() == ["read"]
