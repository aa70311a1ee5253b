"""What a model's output looks like: where its reasoning and its calls are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inference_site.domain.request import Tool
from worker.engines.chat.parser.output import Output
from worker.engines.chat.parser.source import Reading, Source


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tags of reasoning.

    ``header`` is a text that begins every reasoning and is left out. ``reenters``: reasoning may
    come again once there is content; otherwise its tags are text there. ``has_calls``: calls in the
    reasoning are calls; otherwise they are thoughts.
    """

    start: str = "<think>"
    end: str = "</think>"
    header: str = ""
    reenters: bool = False
    has_calls: bool = False


CallReader = Callable[[Source, Output, Sequence[Tool], str], Reading[bool]]
"""Reads the calls after a start, its last argument; empty for calls that have none.

It returns whether there were any. What it does not read is content.
"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    ``starts`` are the tags that begin them. ``tags`` are all others: wherever one of them stands
    without a meaning, it is left out. ``bare_start`` is how calls begin that have no tag; these are
    only looked for at the beginning of the content.
    """

    name: str
    read: CallReader
    starts: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    bare_start: str = ""


@dataclass(frozen=True, slots=True)
class Syntax:
    """What a model's output looks like.

    ``channels``: ``tags`` have one place for reasoning; ``named`` are ``<|channel>NAME``, of which
    some are reasoning; ``harmony`` are the messages of the format of this name, whose calls need no
    ``tool_format``.
    """

    reasoning: Reasoning | None = None
    tool_format: ToolFormat | None = None
    channels: str = "tags"

    @property
    def tags(self) -> tuple[str, ...]:
        """All texts that have a meaning; in some vocabularies they are special tokens.

        Those that end an answer are not among them.
        """
        match self.channels:
            case "harmony":
                return ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
            case "named":
                tags: tuple[str, ...] = ("<|channel>", "<channel|>")
            case _:
                tags = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        return tags + (
            (*self.tool_format.starts, *self.tool_format.tags) if self.tool_format else ()
        )

    @property
    def closing(self) -> str:
        """What ends a reasoning and begins the answer; empty if there is no reasoning."""
        match self.channels:
            case "harmony":
                return "<|end|><|start|>assistant<|channel|>final<|message|>"
            case "named":
                return "<channel|>"
            case _:
                return f"{self.reasoning.end}\n\n" if self.reasoning else ""
