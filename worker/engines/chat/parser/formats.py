"""The tool formats by name, and the traces by which a chat template gives its syntax away."""

from __future__ import annotations

from worker.engines.chat.parser.channels import CHANNEL
from worker.engines.chat.parser.deepseek import DEEPSEEK
from worker.engines.chat.parser.hermes import HERMES
from worker.engines.chat.parser.llama3_json import LLAMA3_JSON
from worker.engines.chat.parser.mistral import MISTRAL
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


def syntax_of(template: str) -> Syntax:
    """Return the syntax that the traces in a chat template tell of."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Syntax(channels="harmony")
    return Syntax(
        next((reasoning for trace, reasoning in _REASONING_TRACES if trace in template), None),
        next((found for all_, found in _TOOL_TRACES if all(t in template for t in all_)), None),
        "named" if CHANNEL in template else "tags",
    )
