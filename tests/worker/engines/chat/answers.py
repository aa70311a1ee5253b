"""What a parser's deltas add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from inference_site.core.domain.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from inference_site.core.domain.request import Tool
from worker.engines.chat.parser.formats import TOOL_FORMATS
from worker.engines.chat.parser.output import Reasoning, Syntax
from worker.engines.chat.parser.parser import OutputParser

TOOLS = (
    Tool("f", None, {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}),
    Tool("g", "Goes.", {}),
)
THINK = Syntax(Reasoning())
SYNTAXES = {
    **{name: Syntax(Reasoning(), found) for name, found in TOOL_FORMATS.items()},
    "harmony": Syntax(channels="harmony"),
    "named": Syntax(tool_format=TOOL_FORMATS["hermes"], channels="named"),
}


@dataclass
class Answer:
    """One choice as a whole; ``order`` tells what came after what."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    order: str = ""


def add_up(deltas: Iterable[Delta]) -> Answer:
    """Return the answer that these deltas make."""
    answer = Answer()
    for delta in deltas:
        match delta:
            case TextDelta(text):
                answer.text += text
                kind = "t"
            case ReasoningDelta(text):
                answer.reasoning += text
                kind = "r"
            case ToolCallDelta(call, arguments, id, name):
                kind = str(call)
                if name is not None:
                    assert id is not None
                    assert call == len(answer.calls)
                    answer.calls.append((name, ""))
                name_, before = answer.calls[call]
                answer.calls[call] = (name_, before + arguments)
            case _:
                raise AssertionError(delta)
        if not answer.order.endswith(kind):
            answer.order += kind
    return answer


def parse(
    syntax: Syntax | str,
    pieces: str | Sequence[str],
    tools: Sequence[Tool] = TOOLS,
    in_reasoning: bool = False,
    parallel: bool = True,
) -> Answer:
    """Return what becomes of an answer; of a text, whether it comes whole or by characters."""
    if isinstance(pieces, str):
        whole, letters = (
            parse(syntax, cut, tools, in_reasoning, parallel) for cut in ([pieces], list(pieces))
        )
        assert whole == letters
        return whole
    found = SYNTAXES[syntax] if isinstance(syntax, str) else syntax
    parser = OutputParser(found, tools, in_reasoning=in_reasoning, parallel=parallel)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return add_up([*deltas, *parser.finish()])
