"""``python -m tests.faults.matrix``: the whole matrix. Writes docs/reliability.md."""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import os
import random
import shutil
import time
from pathlib import Path

from tests.faults.matrix.checker import Violation, violations
from tests.faults.matrix.faults import FAULTS, ON_SMALL_DISKS, WITH_A_CLOCK
from tests.faults.matrix.ledger import Ledger
from tests.faults.matrix.report import PAGE, page
from tests.faults.matrix.run import run
from tests.faults.matrix.surroundings import can_mount, has_clock, own_clock, small_disks
from tests.faults.matrix.usage import Totals, add_up, set_budgets
from tests.faults.soak.page import section_of
from tests.served_stack import served_stack

MODEL = """
  crowd:
    engine: scripted
    slots: 64
    context_length: 5000
    price: {input: 2, cached: 1, output: 10}
"""


def main() -> int:
    """Return 1 when a promise was broken."""
    options = _options()
    ledger, broken, totals = Ledger(), list[Violation](), Totals()
    deadline = time.monotonic() + 60 * options.minutes
    for faults, around in ((WITH_A_CLOCK, own_clock), (FAULTS | ON_SMALL_DISKS, small_disks)):
        kinds = [fault for fault in options.only if fault in faults]
        # One of each kind, in any order, then one of each again.
        chosen = [f for _ in range(options.times) for f in random.sample(kinds, len(kinds))]
        if not chosen:
            continue
        needs_nothing = FAULTS.keys() >= set(chosen)
        with served_stack(MODEL, *(() if needs_nothing else (around,))) as stack:
            set_budgets(stack)
            left_s = deadline - time.monotonic()
            injecting = run(stack, chosen, options.clients, model="crowd", at_most_s=left_s)
            found = asyncio.run(injecting)
            broken += violations(stack, found)
            used, wrong = add_up(stack, found)
            if options.logs:
                shutil.copytree(stack.data_dir / "log", options.logs, dirs_exist_ok=True)
                shutil.copy(stack.output, options.logs)
        broken += [Violation("usage adds up", detail) for detail in wrong]
        totals += used
        ledger.add(found)
    _report(ledger, broken, totals, options)
    return bool(broken)


def _options() -> argparse.Namespace:
    possible = FAULTS | (ON_SMALL_DISKS if can_mount() else {})
    possible |= WITH_A_CLOCK if has_clock() else {}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=8, help="how often each fault comes")
    parser.add_argument("--clients", type=int, default=28)
    parser.add_argument("--minutes", type=float, default=60, help="after which no fault comes")
    parser.add_argument("--only", nargs="*", choices=possible, default=list(possible))
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    parser.add_argument("--logs", type=Path, help="where to keep the logs of the stack")
    return parser.parse_args()


def _report(
    ledger: Ledger, broken: list[Violation], totals: Totals, options: argparse.Namespace
) -> None:
    text = page(
        ledger,
        broken,
        totals,
        clients=options.clients,
        date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        cores=os.cpu_count(),
        load=os.getloadavg()[-1],
    )
    if options.write:
        PAGE.write_text(text + section_of(PAGE.read_text()))
    print(text)
    for violation in broken:
        print(f"{violation.promise}: {violation.detail} (at {violation.began_at:.0f})")
    for injection in ledger.injections:
        print(f"{injection.at:.0f}: {injection.fault}, back after {injection.back_after_s:.1f} s")


if __name__ == "__main__":
    raise SystemExit(main())
