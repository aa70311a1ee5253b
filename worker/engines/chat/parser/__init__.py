"""From a model's text to content, reasoning and calls; see ``parser.py``."""

from worker.engines.chat.parser.formats import HARMONY, TOOL_FORMATS, ends_in_reasoning, syntax_of
from worker.engines.chat.parser.parser import OutputParser
from worker.engines.chat.parser.syntax import Reasoning, Syntax

__all__ = [
    "HARMONY",
    "TOOL_FORMATS",
    "OutputParser",
    "Reasoning",
    "Syntax",
    "ends_in_reasoning",
    "syntax_of",
]
