"""The cost of a response's events: microseconds an event, without engine and network.

``python -m benchmarks.response_events``, with the settings of the site in the environment. An
item of one delta is nearly nothing but the events that begin and end it. The fastest of several
rounds counts.
"""

import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import django

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)

BUDGET_US = 10.0
ROUNDS = 2000
DELTAS, ITEMS = 200, 20
FIELDS = {
    "id": "resp_" + "0" * 32, "object": "response", "created_at": 1, "completed_at": None,
    "status": "in_progress", "background": False, "error": None, "incomplete_details": None,
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "model": "m",
    "output": [], "parallel_tool_calls": True, "previous_response_id": None,
    "prompt_cache_key": None, "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None, "service_tier": "default", "store": True, "temperature": 1.0,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
    "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "truncation": "disabled",
    "usage": None, "metadata": {},
}  # fmt: skip


def assembler() -> Any:
    """Return a new assembler of the events of one response."""
    from responses_api.assembler import ResponseAssembler, ResponseAssembly

    return ResponseAssembler(ResponseAssembly(FIELDS))


def cost_us(deltas: Sequence[Delta]) -> tuple[float, int]:
    """Return the microseconds per event, and the number of events of these deltas."""
    best = float("inf")
    for _ in range(ROUNDS):
        made = assembler()
        made.begin()
        started = perf_counter()
        events = sum(len(made.feed(delta)) for delta in deltas)
        best = min(best, perf_counter() - started)
    return best / events * 1e6, events


def whole_cost_us(deltas: Sequence[Delta]) -> tuple[float, int]:
    """Return the same for a whole response, with its opening, its end and its object."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = perf_counter()
        made = assembler()
        events = len(made.begin()) + sum(len(made.feed(delta)) for delta in deltas)
        events += len(made.complete().frames)
        best = min(best, perf_counter() - started)
    return best / events * 1e6, events


def measured() -> dict[str, tuple[float, int]]:
    """Return the cost of each kind of stream, by its name."""
    top = tuple(TokenLogprob(f"t{n}", -float(n), b"abc") for n in range(5))
    probable = TextDelta("word", logprobs=(TokenLogprob("word", -0.5, b"word", top),))
    call = ToolCallDelta(0, "{}", id="call_0", name="look_up")
    return {
        "deltas": cost_us([TextDelta("a word, ")] * DELTAS),
        "deltas with log probabilities": cost_us([probable] * DELTAS),
        "messages and reasoning in turn": cost_us([TextDelta("a"), ReasoningDelta("b")] * ITEMS),
        "calls": cost_us([call] * ITEMS),
        "a short response": whole_cost_us([TextDelta("Hello"), TextDelta("."), Finish("stop")]),
    }


def main() -> int:
    """Print a line each; return 1 when one is over the budget."""
    django.setup()
    is_good = True
    for name, (microseconds, events) in measured().items():
        is_good &= microseconds <= BUDGET_US
        print(f"{name:32} {microseconds:6.2f} us an event ({events} events)")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
