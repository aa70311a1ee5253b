"""Choices that are alike: one is computed, and repeated."""

from __future__ import annotations

from dataclasses import replace

from inference_site.domain.deltas import Delta, PromptDelta, PromptProgress, Usage
from worker.engines.base import Sink


class RepeatingSink:
    """Feeds each delta of a prompt's only answer as that of all its choices.

    Usage is passed on as it is: it counts what was computed.
    """

    def __init__(self, sink: Sink, choices: int) -> None:
        self._sink, self._choices = sink, choices

    @property
    def cancelled(self) -> bool:
        """Whether nothing more is wanted."""
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        """Take the next delta."""
        if isinstance(delta, Usage | PromptProgress | PromptDelta):
            self._sink.feed(delta)
            return
        first = delta.index * self._choices
        for index in range(first, first + self._choices):
            self._sink.feed(replace(delta, index=index))
