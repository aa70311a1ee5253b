"""A process that stands by: it has imported everything, and takes over when another has died.

The imports are most of the time that a process needs to start, seconds on a busy machine. A spare
has no connection and no thread that works; it waits for a line on its standard input, and ends with
its supervisor, which holds the other end.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

OPTION = "--standby"


def add_standby(parser: CommandParser) -> None:
    """Add the option to a command."""
    parser.add_argument(
        OPTION, action="store_true", help="import everything, then start only after a line of input"
    )


def stand_by_if_asked(options: Mapping[str, Any]) -> None:
    """Wait for the line if the option was given; exit if there will be none."""
    if options["standby"] and not sys.stdin.readline():
        sys.exit(0)
