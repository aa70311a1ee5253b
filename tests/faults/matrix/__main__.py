"""``python -m tests.faults.matrix``: the whole matrix. Writes docs/reliability.md."""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import os
import random

from tests.faults.matrix.checker import violations
from tests.faults.matrix.faults import FAULTS
from tests.faults.matrix.report import PAGE, page
from tests.faults.matrix.run import run
from tests.faults.soak.page import section_of
from tests.served_stack import served_stack

MODEL = """
  crowd:
    engine: scripted
    slots: 64
    context_length: 5000
"""


def main() -> int:
    """Return 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=11, help="how often each fault comes")
    parser.add_argument("--clients", type=int, default=28)
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    faults = options.only * options.times
    random.shuffle(faults)
    with served_stack(MODEL) as stack:
        ledger = asyncio.run(run(stack, faults, options.clients, model="crowd"))
        broken = violations(stack, ledger)
    text = page(
        ledger,
        broken,
        clients=options.clients,
        date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        cores=os.cpu_count(),
    )
    if options.write:
        PAGE.write_text(text + section_of(PAGE.read_text()))
    print(text)
    for violation in broken:
        print(f"{violation.promise}: {violation.detail}")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
