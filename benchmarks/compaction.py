"""The cost of compaction over a long conversation: ``python -m benchmarks.compaction``.

One conversation of responses, each with ``context_management``; the demo model answers. A response
that was compacted has the tokens and the time of its summary in its own figures, so the cost of a
summary is what such a response has more than the response after it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import openai

from benchmarks.figures import add_write_option, keep
from benchmarks.targets import platform_with
from inference_site.catalogue.catalogue import DEMO_FILE

_MODEL = "demo"
_WORDS = [
    "harbour",
    "lantern",
    "river",
    "winter",
    "copper",
    "violin",
    "meadow",
    "thunder",
    "basket",
    "feather",
]


@dataclass(frozen=True)
class Turn:
    """One response: its tokens, the seconds until it ended, and whether it was compacted."""

    input: int
    output: int
    seconds: float
    is_compacted: bool


def _question(number: int, words: int) -> str:
    return f"Note {number}: " + " ".join(_WORDS[(number * 7 + n) % 10] for n in range(words))


def _talk(client: openai.OpenAI, turns: int, words: int, threshold: int, most: int) -> list[Turn]:
    last, done = None, list[Turn]()
    for number in range(turns):
        began = time.monotonic()
        made = client.responses.create(
            model=_MODEL,
            input=_question(number, words),
            previous_response_id=last,
            temperature=0,
            max_output_tokens=most,
            context_management=[{"type": "compaction", "compact_threshold": threshold}],
        )
        assert made.usage is not None
        is_compacted = any(item.type == "compaction" for item in made.output)
        seconds = time.monotonic() - began
        done.append(Turn(made.usage.input_tokens, made.usage.output_tokens, seconds, is_compacted))
        last = made.id
    return done


def figures_of(turns: list[Turn]) -> dict[str, Any]:
    """Return what all turns cost, and what part of it compaction has."""
    pairs = [(a, b) for a, b in pairwise(turns) if a.is_compacted]
    spent = [a.seconds - b.seconds for a, b in pairs]
    costs = {
        "tokens read": (sum(t.input for t in turns), sum(a.input - b.input for a, b in pairs)),
        "tokens written": (
            sum(t.output for t in turns),
            sum(max(a.output - b.output, 0) for a, b in pairs),
        ),
        "seconds": (sum(t.seconds for t in turns), sum(spent)),
    }
    return {
        "turns": len(turns),
        "compactions": len(pairs),
        "longest_prompt": max(t.input for t in turns),
        "turn_ms": statistics.median(t.seconds for t in turns if not t.is_compacted) * 1000,
        "summary_ms": statistics.median(spent) * 1000 if spent else 0.0,
        "rows": [
            {"cost": cost, "all": total, "compaction": part, "share": part / total}
            for cost, (total, part) in costs.items()
        ],
    }


def _show(found: dict[str, Any], threshold: int) -> None:
    print(f"| {found['turns']} turns, threshold {threshold} | all | compaction | share |")
    print("|---|---|---|---|")
    for row in found["rows"]:
        numbers = f"{row['all']:,.0f} | {row['compaction']:,.0f} | {row['share']:.1%}"
        print(f"| {row['cost']} | {numbers} |")
    print(
        f"\n{found['compactions']} compactions, one in "
        f"{found['turns'] / max(found['compactions'], 1):.0f} turns; "
        f"longest prompt with a summary {found['longest_prompt']:,} tokens; "
        f"a turn without one takes {found['turn_ms']:.0f} ms (median), the summary "
        f"{found['summary_ms']:.0f} ms."
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("benchmarks.compaction", description=__doc__)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--words", type=int, default=40, help="of each message of the user")
    parser.add_argument("--tokens", type=int, default=32, help="the most of each answer")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threshold", type=int, default=2000)
    add_write_option(parser)
    options = parser.parse_args()
    entry = {
        "file": str(DEMO_FILE),
        "slots": 1,
        "threads": 1,
        "context_length": options.context,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with platform_with({_MODEL: entry}, {}) as endpoint:
        client = openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
        turns = _talk(client, options.turns, options.words, options.threshold, options.tokens)
    found = figures_of(turns)
    _show(found, options.threshold)
    if options.write:
        keep("compaction", {"threshold": options.threshold, **found})


if __name__ == "__main__":
    main()
