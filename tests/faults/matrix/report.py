"""docs/reliability.md: what each kind of fault did to the requests it met."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

from tests.faults.matrix.checker import Violation
from tests.faults.matrix.ledger import Injection, Ledger
from tests.faults.matrix.usage import Totals

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reliability.md"
PROMISES = {
    "accepted means ended": "A request that was accepted ends exactly once, in one generation.",
    "one truth": "A stored response and its generation agree on how it ended.",
    "told means stored": "The answer that a client received is stored, with the same usage.",
    "the text is exact": "An answer that is reported as complete has every word once.",
    "usage adds up": "The usage that a client received is the accounted usage, and roll-ups "
    "and budgets add up to it.",
    "an error means no answer": "A request that was answered with an error has no second, "
    "successful run.",
    "a key means one run": "Requests with one `Idempotency-Key` are completed at most once.",
    "streams and answers are whole": "A stream has every number once and an end; an error has a "
    "code; a response in the background ends for the client that polls it.",
    "a conversation is free": "A conversation takes its next turn once nothing runs on it.",
}
_HEAD = """# Reliability

What the product promises when a part of it dies, and what happened when parts died.
`make faults` runs this and writes the page: a stack of `manage.py serve` under {clients} clients of
ten kinds (chat completions in one piece, streamed, abandoned, and repeated under one idempotency
key; responses in one piece, streamed, and as turns of a conversation; background responses that are
polled, cancelled, and read by a client that reconnects). The model is the scripted one: it answers
numbered words, so a lost or repeated word is detected.

Last run: {date}, {injections} faults in {minutes:.0f} minutes, {requests} requests.
The clients share the {cores} cores with the stack; the load average was {load:.0f}.

"""
_FAULTS = """
## Faults

A request is in flight when its fault is injected. A prober sends a short request
every half second with a time limit of 3 s. "Back after" is the time from the fault until the first
success after the last failure; 0 without a failure. A process is frozen, or a disk full, for 5 s;
beat is frozen, or a second beat runs, for 15 s. "Cut" is a connection that ended before its answer;
its client has to send the request again.

| fault | times | in flight | answered | got an error | cut | back after: median / worst, s |
|---|---|---|---|---|---|---|
"""


_USAGE = """
## Usage

The {generations:,} generations of the run used {tokens:,} tokens, by their rows; clients received
{told:,} of these at the end of an answer, the others belong to cut, abandoned or failed answers.
The promise on usage covers each answer against its row, and the sums of all rows against the
roll-ups by minute, hour and day, and against budgets of tokens and of money, of the project and of
its key, of which nothing may be reserved any more.
"""


def page(ledger: Ledger, broken: list[Violation], totals: Totals, **facts: object) -> str:
    """Return the page. ``facts`` are the date, the clients, the cores and their load average."""
    began = min(request.began_at for request in ledger.requests)
    ended = max(request.ended_at for request in ledger.requests)
    head = _HEAD.format(
        injections=len(ledger.injections),
        requests=f"{len(ledger.requests):,}",
        minutes=(ended - began) / 60,
        **facts,
    )
    used = _USAGE.format(generations=totals.generations, tokens=totals.tokens, told=totals.told)
    return head + _promises(broken) + _FAULTS + _faults(ledger) + used + _errors(ledger)


def _promises(broken: list[Violation]) -> str:
    counts = Counter(violation.promise for violation in broken)
    lines = [f"| {text} | {counts[name] or 'none'} |" for name, text in PROMISES.items()]
    return "\n".join(["## Promises\n", "| promise | broken |", "|---|---|", *lines, ""])


def _faults(ledger: Ledger) -> str:
    by_fault: dict[str, list[Injection]] = defaultdict(list)
    for injection in ledger.injections:
        by_fault[injection.fault].append(injection)
    return "\n".join(_line(fault, found) for fault, found in by_fault.items()) + "\n"


def _line(fault: str, injections: list[Injection]) -> str:
    met = [request for injection in injections for request in injection.in_flight]
    outcomes = Counter(request.outcome for request in met)
    back = [injection.back_after_s for injection in injections]
    answered = outcomes["ok"] + outcomes["left"]
    return (
        f"| {fault} | {len(injections)} | {len(met)} | {answered} | {outcomes['error']} "
        f"| {outcomes['cut']} | {median(back):.1f} / {max(back):.1f} |"
    )


def _errors(ledger: Ledger) -> str:
    told = Counter(request.told for request in ledger.requests if request.outcome == "error")
    lines = [f"| `{code}` | {count} |" for code, count in told.most_common()]
    return "\n".join(
        ["\n## Errors that clients got\n", "| error | times |", "|---|---|", *lines, ""]
    )
