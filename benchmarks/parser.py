"""The cost of the parser of chat answers: microseconds a token, by tool format.

``python -m benchmarks.parser``. An answer with reasoning, text and a call comes in pieces of four
characters, which is a token or less. The reference is a loop that wraps the same pieces in deltas
and does nothing else, timed in turn with each format; the fastest of several rounds counts.
"""

import argparse
import sys
from collections.abc import Callable
from time import perf_counter

from benchmarks.figures import add_write_option, keep
from inference_site.core.domain.deltas import TextDelta
from inference_site.core.domain.request import Tool
from worker.engines.chat.parser.formats import HARMONY, TOOL_FORMATS
from worker.engines.chat.parser.output import Reasoning, Syntax
from worker.engines.chat.parser.parser import OutputParser

BUDGET_US = 10.0
PIECE = 4
TOOLS = (Tool("look_up", None, {"properties": {"text": {"type": "string"}}}),)
PROSE = "The quick brown fox, which is <fast>, jumps over the [lazy] dog.\n" * 60
VALUE = "a long argument, with {brackets} and so on; " * 40
OBJECT = f'{{"text": "{VALUE}"}}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "look_up", "arguments": {OBJECT}}}\n</tool_call>',
    "mistral": f"[TOOL_CALLS]look_up[ARGS]{OBJECT}",
    "llama3_json": f'<|python_tag|>{{"name": "look_up", "parameters": {OBJECT}}}',
    "pythonic": f'<|tool_call_start|>[look_up(text="{VALUE}")]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=text>\n"
    f"{VALUE}\n</parameter>\n</function>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>"
    f"{OBJECT}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


def answers() -> dict[str, tuple[Syntax, str]]:
    """Return a syntax and an answer in it for each format."""
    found = {
        name: (Syntax(Reasoning(), TOOL_FORMATS[name]), f"<think>{PROSE}</think>\n{PROSE}{call}")
        for name, call in CALLS.items()
    }
    message = "<|start|>assistant<|channel|>"
    found[HARMONY] = (
        Syntax(channels=HARMONY),
        f"<|channel|>analysis<|message|>{PROSE}<|end|>{message}final<|message|>{PROSE}<|end|>"
        f"{message}commentary to=functions.look_up<|message|>{OBJECT}<|call|>",
    )
    return found


def parse(syntax: Syntax, pieces: list[str]) -> None:
    parser = OutputParser(syntax, TOOLS)
    for piece in pieces:
        parser.feed(piece)
    parser.finish()


def wrap(pieces: list[str]) -> None:
    """The reference: the same number of deltas, unparsed."""
    for piece in pieces:
        _ = [TextDelta(piece, 0)]


def us_per_piece(run: Callable[[], None], count: int) -> float:
    begun = perf_counter()
    run()
    return (perf_counter() - begun) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    add_write_option(parser)
    options = parser.parse_args()
    figures = {}
    print(f"{'format':12} {'parser':>8} {'loop':>8}   µs a token")
    for name, (syntax, text) in answers().items():
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        parsed, wrapped = [], []
        for _ in range(options.rounds):
            parsed.append(us_per_piece(lambda s=syntax, p=pieces: parse(s, p), len(pieces)))  # type: ignore[misc]  # Bound now, because it is a loop.
            wrapped.append(us_per_piece(lambda p=pieces: wrap(p), len(pieces)))  # type: ignore[misc]  # As above.
        figures[name] = {"parser_us": min(parsed), "loop_us": min(wrapped)}
        print(f"{name:12} {min(parsed):8.2f} {min(wrapped):8.2f}")
    worst = max(one["parser_us"] for one in figures.values())
    print(f"{'worst':12} {worst:8.2f}            budget {BUDGET_US:.0f}")
    if options.write:
        keep("parser", figures)
    sys.exit(worst > BUDGET_US)


if __name__ == "__main__":
    main()
