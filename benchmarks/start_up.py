"""How long ``manage.py serve`` takes until a token can be served.

``python -m benchmarks.start_up``. Each start has a data folder of its own. The first of them
reads the program from the disk, the others from memory.
"""

import argparse
import time

from benchmarks.figures import add_write_option, keep
from benchmarks.processes import end_on_sigterm
from benchmarks.targets import platform_with
from inference_site.catalogue.catalogue import DEMO_FILE


def start_s() -> float:
    """Start the platform once; return the seconds until it is ready."""
    started = time.perf_counter()
    with platform_with({"demo": {"file": str(DEMO_FILE)}}):
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    seconds = [start_s() for _ in range(options.times)]
    first, again = seconds[0], min(seconds)
    print(f"ready after {first:.1f} s the first time, {again:.1f} s at best")
    if options.write:
        keep("start_up", {"first_s": first, "again_s": again})


if __name__ == "__main__":
    main()
