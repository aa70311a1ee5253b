"""Hooks: what they are shown, what becomes of what they return, and what it is when they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from pytest_django.fixtures import Settings

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import HookFailed
from worker.runtime.hooks import Chunk, HookContext, Hooks, check_hooks, hooks_for

CONTEXT = HookContext("chatcmpl-1", "chat.completion", "m")
CHUNKS: list[Chunk] = [
    TextDelta("a"),
    ReasoningDelta("b", 1),
    ToolCallDelta(0, "{}", id="call_0", name="look"),
]


def hooks(on_chunk: Any = None, on_done: Any = None) -> Hooks:
    return Hooks(CONTEXT, on_chunk, on_done)


def test_chunk_becomes_what_the_hook_returns() -> None:
    seen: list[tuple[HookContext, Chunk]] = []

    def shout(context: HookContext, chunk: Chunk) -> Chunk | None:
        seen.append((context, chunk))
        return None if isinstance(chunk, ToolCallDelta) else replace(chunk, text="A")

    passing = hooks(shout)
    assert [passing.filter(chunk) for chunk in CHUNKS] == [
        TextDelta("A"),
        ReasoningDelta("A", 1),
        None,
    ]
    assert seen == [(CONTEXT, chunk) for chunk in CHUNKS]


@pytest.mark.parametrize("delta", [Finish("stop"), Usage(1)])
def test_ends_and_usage_are_not_shown(delta: Finish | Usage) -> None:
    def never(context: HookContext, chunk: Chunk) -> Chunk:
        raise AssertionError

    assert hooks(never).filter(delta) is delta


def test_calls_that_are_left_are_numbered_anew_and_whole() -> None:
    def drop_looks(context: HookContext, chunk: Chunk) -> Chunk | None:
        return None if isinstance(chunk, ToolCallDelta) and chunk.name == "look" else chunk

    passing = hooks(drop_looks)
    deltas: list[Delta] = [
        ToolCallDelta(0, "", id="a", name="look"),
        ToolCallDelta(0, "{}"),
        ToolCallDelta(1, "", id="b", name="pick"),
        ToolCallDelta(1, "{}"),
        ToolCallDelta(0, "", id="c", name="pick", index=1),
        Finish("tool_calls"),
    ]
    assert [passed for delta in deltas if (passed := passing.filter(delta))] == [
        ToolCallDelta(0, "", id="b", name="pick"),
        ToolCallDelta(0, "{}"),
        ToolCallDelta(0, "", id="c", name="pick", index=1),
        Finish("tool_calls"),
    ]


def test_choice_that_has_lost_its_calls_has_stopped() -> None:
    passing = hooks(lambda *_: None)
    passing.filter(ToolCallDelta(0, "", id="a", name="look"))
    assert passing.filter(Finish("tool_calls", 0)) == Finish("stop", 0)
    assert passing.filter(Finish("length", 1)) == Finish("length", 1)


def test_done_gets_what_was_passed_on() -> None:
    shown: list[Sequence[Chunk]] = []

    def drop_reasoning(context: HookContext, chunk: Chunk) -> Chunk | None:
        return None if isinstance(chunk, ReasoningDelta) else chunk

    passing = hooks(drop_reasoning, lambda _, chunks: shown.append(chunks))
    for chunk in CHUNKS:
        passing.filter(chunk)
    passing.filter(Finish("stop"))
    passing.done()
    assert shown == [(CHUNKS[0], CHUNKS[2])]


def test_chunks_are_kept_only_for_somebody_to_see() -> None:
    passing = hooks(lambda _, chunk: chunk)
    passing.filter(CHUNKS[0])
    passing.done()
    assert passing._seen == []


class Unnamed:
    """A hook that is no plain function."""

    def __call__(self, context: HookContext, chunk: Any) -> Any:
        raise ValueError("boom")


def raising(context: HookContext, chunk: Any) -> Any:
    raise ValueError("boom")


@pytest.mark.parametrize("hook", [raising, Unnamed()])
def test_hook_that_raises_has_failed(hook: Callable[..., Any]) -> None:
    with pytest.raises(HookFailed, match="raised ValueError: boom"):
        hooks(hook).filter(CHUNKS[0])
    with pytest.raises(HookFailed, match="raised ValueError: boom"):
        hooks(on_done=hook).done()


@pytest.mark.parametrize("returned", ["text", Finish("stop"), Usage(1), [TextDelta("a")], True])
def test_what_is_no_chunk_is_a_failure(returned: Any) -> None:
    with pytest.raises(HookFailed, match="which is no chunk"):
        hooks(lambda *_: returned).filter(CHUNKS[0])


def test_site_without_hooks_has_none(settings: Settings) -> None:
    settings.ON_CHUNK = settings.ON_DONE = ""
    assert hooks_for(CONTEXT) is None
    check_hooks()


def test_hooks_are_found_by_their_dotted_paths(settings: Settings) -> None:
    settings.ON_CHUNK = "tests.hook_functions.on_chunk"
    settings.ON_DONE = ""
    found = hooks_for(replace(CONTEXT, model="hooked"))
    assert found is not None
    assert found.filter(TextDelta("a")) == TextDelta("A")
    check_hooks()


@pytest.mark.parametrize("path", ["nowhere.at_all", "os.no_such_function", "plain", "os.path"])
@pytest.mark.parametrize("name", ["ON_CHUNK", "ON_DONE"])
def test_path_that_leads_nowhere_is_told_with_the_setting(
    settings: Settings, name: str, path: str
) -> None:
    setattr(settings, name, path)
    with pytest.raises(ImproperlyConfigured, match=f"{name}: "):
        check_hooks()
