"""Parses a model's text into content, reasoning and calls; ``worker.engines`` imports it."""

from worker.engines.chat.parser.formats import HARMONY, TOOL_FORMATS, ends_in_reasoning, syntax_of
from worker.engines.chat.parser.output import Reasoning, Syntax
from worker.engines.chat.parser.parser import OutputParser

__all__ = [
    "HARMONY",
    "TOOL_FORMATS",
    "OutputParser",
    "Reasoning",
    "Syntax",
    "ends_in_reasoning",
    "syntax_of",
]
