"""The tool formats by name; what a chat template shows of a syntax, and a prompt of its place."""

from __future__ import annotations

import re

from worker.engines.chat.parser.channels import CHANNEL, REASONING_CHANNELS
from worker.engines.chat.parser.deepseek import DEEPSEEK
from worker.engines.chat.parser.json_formats import HERMES, LLAMA3_JSON, MISTRAL
from worker.engines.chat.parser.pythonic import PYTHONIC
from worker.engines.chat.parser.qwen3_coder import QWEN3_CODER
from worker.engines.chat.parser.syntax import Reasoning, Syntax

TOOL_FORMATS = {
    tool_format.name: tool_format
    for tool_format in (HERMES, MISTRAL, LLAMA3_JSON, PYTHONIC, QWEN3_CODER, DEEPSEEK)
}
HARMONY = "harmony"
"""A tool format too, but the whole output is in it."""

_TOOL_TRACES = (
    (("<function=", "<parameter="), QWEN3_CODER),
    (("<tool_call>",), HERMES),
    (("[TOOL_CALLS]",), MISTRAL),
    (("tool▁calls▁begin",), DEEPSEEK),
    (("<|tool_call_start|>",), PYTHONIC),
    (("<|python_tag|>",), LLAMA3_JSON),
    (('"parameters":', "<|eot_id|>"), LLAMA3_JSON),
)
_REASONING_TRACES = (
    ("</think>", Reasoning()),
    ("[/THINK]", Reasoning("[THINK]", "[/THINK]")),
    ("</seed:think>", Reasoning("<seed:think>", "</seed:think>")),
)

_TAG = re.compile(r"<[^\s<>]+>|\[/?[A-Z_]{2,}\]")
"""What looks like a tag of any format."""
_MAX_BEGUN = 256
"""Characters of reasoning that a prompt may begin with. More of it is a text *about* reasoning."""
_HARMONY_END = re.compile(r"<\|channel\|>\s*([\w-]+)[^<]*<\|message\|>([^<]*)\Z")
_NAMED_END = re.compile(rf"{re.escape(CHANNEL)}([A-Za-z0-9_-]+)([^<]*)\Z")


def syntax_of(template: str) -> Syntax:
    """Return the syntax that a chat template shows."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Syntax(channels="harmony")
    return Syntax(
        next((reasoning for trace, reasoning in _REASONING_TRACES if trace in template), None),
        next((found for all_, found in _TOOL_TRACES if all(t in template for t in all_)), None),
        "named" if CHANNEL in template else "tags",
    )


def ends_in_reasoning(prompt: str, syntax: Syntax) -> bool:
    """Return whether what follows this prompt is reasoning.

    It is when the last start tag comes after the last end tag, at most 256 characters before the
    end, with nothing after it that looks like a tag.
    """
    match syntax.channels:
        case "harmony":
            return _last_channel(_HARMONY_END, prompt)
        case "named":
            return _last_channel(_NAMED_END, prompt)
    if syntax.reasoning is None:
        return False
    tail = prompt[-_MAX_BEGUN - len(syntax.reasoning.start) :]
    start = tail.rfind(syntax.reasoning.start)
    if start < 0:
        return False
    after = tail[start + len(syntax.reasoning.start) :]
    return syntax.reasoning.end not in after and _TAG.search(after) is None


def _last_channel(pattern: re.Pattern[str], prompt: str) -> bool:
    tail = prompt[-2 * _MAX_BEGUN :]
    found = pattern.search(tail)
    return bool(found and found[1].lower() in REASONING_CHANNELS and len(found[2]) <= _MAX_BEGUN)
