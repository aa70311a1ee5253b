"""A batch while its processes are killed: each line is answered, once."""

from __future__ import annotations

from tests.faults.batch_kills import KilledBatch
from tests.served_stack import ServedStack

LINES, SLEEP_MS = 200, 800


def test_every_line_is_in_the_results_once_whatever_dies(stack: ServedStack) -> None:
    batch = KilledBatch(stack, LINES, SLEEP_MS)
    killed = list(batch.kill(("beat", "worker", "beat", "web", "redis")))
    assert killed == ["beat", "worker", "beat", "web", "redis"]
    batch.check(240)
