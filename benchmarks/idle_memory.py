"""Memory of an idle ``make serve REAL_MODEL=0``: PSS of each process but PostgreSQL's.

``python -m benchmarks.idle_memory``. Shared pages are counted once. The site has answered once.
"""

import argparse
import sys

from benchmarks.figures import add_write_option, keep
from benchmarks.parts import memory_mib, settle
from benchmarks.processes import end_on_sigterm
from benchmarks.run import warm_up
from benchmarks.targets import platform_with
from inference_site.catalogue.catalogue import DEMO_FILE

MUST_MIB = 500
"""With OpenTelemetry and the packages of the tests, which some libraries import."""


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    add_write_option(parser)
    options = parser.parse_args()
    shipped = {"DEMO_MODEL": "true", "REAL_MODEL": "0", "MODELS_FILE": ""}
    with platform_with({"demo": {"file": str(DEMO_FILE)}}, shipped) as endpoint:
        warm_up(endpoint)
        settle(endpoint)
        parts = {part: mib for part, mib in memory_mib(endpoint).items() if part != "postgres"}
    total = sum(parts.values())
    for part, mib in [*sorted(parts.items()), ("total", total)]:
        print(f"{part:<10}{mib:8,.1f} MiB")
    if options.write:
        keep("idle_memory", {"mib": {part: round(mib, 1) for part, mib in parts.items()}})
    if total > MUST_MIB:
        sys.exit(f"missed: more than {MUST_MIB} MiB")


if __name__ == "__main__":
    main()
