"""``python -m tests.faults.soak``: the whole soak. Writes its part of docs/reliability.md."""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import time

from tests.faults.matrix.__main__ import MODEL
from tests.faults.matrix.checker import violations
from tests.faults.matrix.clients import KINDS, Client, ask_until
from tests.faults.matrix.ledger import Ledger
from tests.faults.soak.page import PAGE, PLOT, plot, section, with_section
from tests.faults.soak.sampling import Samples
from tests.served_stack import ServedStack, served_stack

_EVERY_S = 10.0


async def soak(
    stack: ServedStack, clients: int, minutes: float, every_s: float = _EVERY_S
) -> tuple[Samples, Ledger]:
    """Keep so many clients at work for so long; return what the processes held."""
    ledger, stopped, samples = Ledger(), asyncio.Event(), Samples()
    kinds = list(KINDS)
    people = [Client(stack.url, stack.key, ledger, "crowd") for _ in range(clients)]
    asking = [
        asyncio.create_task(ask_until(stopped, client, kinds[number % len(kinds)]))
        for number, client in enumerate(people)
    ]
    deadline = time.monotonic() + minutes * 60
    while time.monotonic() < deadline:
        await asyncio.to_thread(samples.take, stack)
        await asyncio.sleep(every_s)
    stopped.set()
    await asyncio.gather(*asking)
    for client in people:
        await client.http.aclose()
    return samples, ledger


def main() -> int:
    """Return 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=5.0, help="minutes that no slope counts")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    with served_stack(MODEL) as stack:
        samples, ledger = asyncio.run(soak(stack, options.clients, options.minutes))
        broken = violations(stack, ledger)
        text = section(
            samples,
            options.warm_up,
            clients=options.clients,
            requests=len(ledger.requests),
            broken=len(broken) or "none",
            date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        )
        print(text, flush=True)
        if options.write:  # Before the stack ends, so that nothing that goes wrong then loses it.
            PAGE.write_text(with_section(PAGE.read_text(), text))
            PLOT.write_text(plot(samples))
    for violation in broken:
        print(f"{violation.promise}: {violation.detail}")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
