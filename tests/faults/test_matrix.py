"""A short form of the matrix: a few faults under a few clients, and every promise holds."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.matrix.checker import violations
from tests.faults.matrix.clients import KINDS
from tests.faults.matrix.run import run
from tests.faults.matrix.usage import add_up
from tests.served_stack import ServedStack

FAULTS = ("worker killed", "Redis emptied", "PostgreSQL killed", "web process killed")


@pytest.mark.timeout(300)
def test_every_promise_holds_through_a_few_faults(stack: ServedStack) -> None:
    ledger = asyncio.run(run(stack, FAULTS, clients=len(KINDS), pause_s=1.0))
    answered = {request.client for request in ledger.requests if request.outcome != "error"}
    assert answered == KINDS.keys()
    assert violations(stack, ledger) == []
    assert add_up(stack, ledger)[1] == []
