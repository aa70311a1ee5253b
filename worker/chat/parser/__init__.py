"""From a model's text to content, reasoning and calls; see ``parser.py``."""

from worker.chat.parser.formats import HARMONY, TOOL_FORMATS, syntax_of
from worker.chat.parser.parser import OutputParser
from worker.chat.parser.start import ends_in_reasoning
from worker.chat.parser.syntax import Reasoning, Syntax

__all__ = [
    "HARMONY",
    "TOOL_FORMATS",
    "OutputParser",
    "Reasoning",
    "Syntax",
    "ends_in_reasoning",
    "syntax_of",
]
