"""Whether usage adds up: what clients are told, the rows, the roll-ups and the budgets."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from tests.faults.matrix.ledger import Ledger
from tests.served_stack import ServedStack

_SET_BUDGETS = """
INSERT INTO accounts_budget (project_id, api_key_id, unit, every, amount, created_at)
SELECT key.project_id, CASE WHEN of_key THEN key.id END, unit, 'month', 1000000000, now()
FROM accounts_apikey key, unnest(ARRAY['tokens', 'cost']) unit, unnest(ARRAY[true, false]) of_key
"""
_ROWS = """
SELECT count(*), sum(input_tokens + output_tokens), sum(cost) FROM generations_generation
WHERE is_accounted
"""
_ROLL_UPS = """
SELECT sum(requests), sum(input_tokens + output_tokens), sum(cost) FROM usage_usagerollup
WHERE period = '%s'
"""
_BUDGETS = """
SELECT sum(spent), sum(reserved) FROM accounts_budgetspend spend JOIN accounts_budget budget
ON budget.id = spend.budget_id WHERE unit = '%s' GROUP BY budget.id
"""
_LEFT = "SELECT count(*) FROM generations_generation WHERE NOT is_accounted"


@dataclass(frozen=True)
class Totals:
    """What was used, by the rows; ``told`` are the tokens that clients were told at an end."""

    generations: int = 0
    tokens: int = 0
    told: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.generations + other.generations,
            self.tokens + other.tokens,
            self.told + other.told,
        )


def set_budgets(stack: ServedStack) -> None:
    """Give the project and its key budgets of tokens and of money that nobody will exceed."""
    stack.sql(_SET_BUDGETS)


def add_up(stack: ServedStack, ledger: Ledger) -> tuple[Totals, list[str]]:
    """Account what has ended; return the totals, and what does not add up."""
    try:
        said = stack.manage("usage", "--check").strip()
        wrong = [] if "add up" in said else [said]
    except subprocess.CalledProcessError as exc:
        wrong = [f"usage --check: {exc.stdout} {exc.stderr}"]
    [(count, tokens, cost)] = stack.sql(_ROWS)
    if left := stack.sql(_LEFT)[0][0]:
        wrong.append(f"{left} generations are not accounted")
    for period in ("minute", "hour", "day"):
        found = stack.sql(_ROLL_UPS % period)[0]
        if found != (count, tokens, cost):
            wrong.append(f"roll-ups by {period}: {found}, rows: {count, tokens, cost}")
    for unit, used in (("tokens", tokens), ("cost", cost)):
        for spent, reserved in stack.sql(_BUDGETS % unit):
            if (spent, reserved) != (used, 0):
                wrong.append(f"budget of {unit}: {spent} and {reserved} reserved, used: {used}")
    told = sum(_tokens(request.usage) for request in ledger.requests if request.usage)
    return Totals(count, tokens, told), wrong


def _tokens(usage: dict[str, int]) -> int:
    return usage["total_tokens"]
