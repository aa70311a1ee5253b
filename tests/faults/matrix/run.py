"""Runs the matrix: clients ask, faults come one after the other, a probe measures the outage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from tests.faults.matrix.clients import KINDS, Client, ask_until
from tests.faults.matrix.faults import ALL
from tests.faults.matrix.ledger import Injection, Ledger
from tests.served_stack import ServedStack

_CALM = 2
"""So many probes in a row must be answered before a fault counts as over."""
_PROBE_S = 0.5
_LONGEST_OUTAGE_S = 90.0


async def run(
    stack: ServedStack,
    faults: Sequence[str],
    clients: int,
    pause_s: float = 1.0,
    model: str = "scripted",
    at_most_s: float = 3600.0,
) -> Ledger:
    """Inject these faults, one after the other, under so many clients; return what happened.

    None is injected any more ``at_most_s`` after the beginning.
    ``pause_s`` is the time between the end of an outage and the next fault. With fewer slots of the
    ``model`` than clients, an outage seems longer than it is, because a probe waits for a slot.
    """
    ledger, stopped = Ledger(), asyncio.Event()
    kinds = list(KINDS)
    people = [Client(stack.url, stack.key, ledger, model) for _ in range(clients + 1)]
    prober, *others = people
    asking = [
        asyncio.create_task(ask_until(stopped, client, kinds[number % len(kinds)]))
        for number, client in enumerate(others)
    ]
    probing = asyncio.create_task(_probe(prober, ledger))
    await asyncio.sleep(pause_s)
    deadline = time.monotonic() + at_most_s
    for fault in faults:
        if time.monotonic() > deadline:
            break
        await _inject(stack, ledger, fault)
        await asyncio.sleep(pause_s)
    stopped.set()
    await asyncio.gather(*asking)
    probing.cancel()
    with suppress(asyncio.CancelledError):
        await probing
    for client in people:
        await client.http.aclose()
    return ledger


async def _inject(stack: ServedStack, ledger: Ledger, fault: str) -> None:
    """Inject one fault and wait until probes are answered again."""
    injection = Injection(fault, time.monotonic(), ledger.in_flight())
    ledger.injections.append(injection)
    await asyncio.to_thread(ALL[fault], stack)
    deadline = injection.at + _LONGEST_OUTAGE_S
    while time.monotonic() < deadline:
        await asyncio.sleep(_PROBE_S)
        last = [is_ok for began, _, is_ok in ledger.probes if began > injection.at][-_CALM:]
        if len(last) == _CALM and all(last):
            break
    injection.back_after_s = ledger.back_after(injection.at)


async def _probe(client: Client, ledger: Ledger) -> None:
    while True:
        began = time.monotonic()
        is_ok = await client.probe()
        ledger.probes.append((began, time.monotonic(), is_ok))
        await asyncio.sleep(_PROBE_S)
