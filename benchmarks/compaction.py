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

import openai

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("benchmarks.compaction", description=__doc__)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--words", type=int, default=40, help="of each message of the user")
    parser.add_argument("--tokens", type=int, default=32, help="the most of each answer")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threshold", type=int, default=2000)
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
    pairs = [(a, b) for a, b in pairwise(turns) if a.is_compacted]
    read = sum(a.input - b.input for a, b in pairs)
    written = sum(max(a.output - b.output, 0) for a, b in pairs)
    spent = sum(a.seconds - b.seconds for a, b in pairs)
    tokens_in, tokens_out = sum(t.input for t in turns), sum(t.output for t in turns)
    seconds = sum(t.seconds for t in turns)
    print(f"| {options.turns} turns, threshold {options.threshold} | all | compaction | share |")
    print("|---|---|---|---|")
    print(f"| tokens read | {tokens_in:,} | {read:,} | {read / tokens_in:.1%} |")
    print(f"| tokens written | {tokens_out:,} | {written:,} | {written / tokens_out:.1%} |")
    print(f"| seconds | {seconds:,.0f} | {spent:,.0f} | {spent / seconds:.1%} |")
    plain = statistics.median(t.seconds for t in turns if not t.is_compacted)
    print(
        f"\n{len(pairs)} compactions, one in {options.turns / max(len(pairs), 1):.0f} turns; "
        f"longest prompt with a summary {max(t.input for t in turns):,} tokens; "
        f"a turn without one takes {plain * 1000:.0f} ms (median), the summary "
        f"{statistics.median(a.seconds - b.seconds for a, b in pairs) * 1000:.0f} ms."
    )


if __name__ == "__main__":
    main()
