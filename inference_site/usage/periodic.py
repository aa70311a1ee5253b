"""What beat does for the usage log: accounting, and pruning of what is not kept.

Each run stops after a while, and the next one goes on.
"""

from __future__ import annotations

import time

from inference_site.generations.kinds import retentions
from inference_site.usage.pruning import prune
from inference_site.usage.settlement import settle

_LONGEST_S = 1.0


def account_ended() -> None:
    """Account what has ended, and correct the tokens that limits have counted."""
    until = time.monotonic() + _LONGEST_S
    while settle() and time.monotonic() < until:
        pass


def prune_old() -> None:
    """Delete some of what is older than it is kept for."""
    prune(time.monotonic() + _LONGEST_S)
    for app in retentions():
        app.prune(time.monotonic() + _LONGEST_S)
