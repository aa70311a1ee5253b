"""Accounting and limits: accounted rows a second, and the waits of a limited request.

``python -m benchmarks.accounting --rows 200000``. The rows end over thirty days, by ten keys and
three models; beat accounts them while the platform runs. Then one client asks for chat completions
of one word, in turns without limits and with all of them.
"""

import argparse
import time
from statistics import median

import httpx
import psycopg

from benchmarks.figures import add_write_option, keep
from benchmarks.generation_rows import insert_ended
from benchmarks.processes import end_on_sigterm
from benchmarks.targets import Endpoint, platform_with

SCRIPTED = {"engine": "scripted", "slots": 4, "context_length": 10_000}
_ROUNDS, _REQUESTS = 10, 50

_FILL = insert_ended("""
SELECT 'bench-' || n, 'chat', n %% 3, n %% 10, 'm' || n %% 3, '', 0, true, false, '', '{}',
    'completed', 'w', 1, t, t + interval '1 ms', t + interval '9 ms' * (1 + n %% 50),
    t + interval '1 s', 100, 10, 50,
    5, 8, 990, 0.001, 0, 0, false, '', 'stop', ''
FROM generate_series(1, %s) n, LATERAL (SELECT now() - interval '30 days' * random() AS t) times
""")
_LIMITS = """
UPDATE accounts_project SET requests_per_minute = 1000000, tokens_per_minute = 100000000,
    concurrent_runs = 1000;
UPDATE accounts_apikey SET requests_per_minute = 1000000, tokens_per_minute = 100000000,
    concurrent_runs = 1000;
INSERT INTO accounts_budget (project_id, unit, every, amount, created_at)
    SELECT id, unit, 'day', 1000000000, now()
    FROM accounts_project, (VALUES ('tokens'), ('cost')) units (unit)
"""
_NO_LIMITS = """
UPDATE accounts_project SET requests_per_minute = NULL, tokens_per_minute = NULL,
    concurrent_runs = NULL;
UPDATE accounts_apikey SET requests_per_minute = NULL, tokens_per_minute = NULL,
    concurrent_runs = NULL;
DELETE FROM accounts_budgetspend;
DELETE FROM accounts_budget
"""
_CACHE_S = 5.5
"""How long a web process remembers a key."""


def account_all(database: psycopg.Connection, rows: int) -> float:
    """Insert ended generations; return how many of them beat accounts per second."""
    database.execute(_FILL, [rows])
    started = time.perf_counter()
    waiting = (
        b"SELECT 1 FROM generations_generation"
        b" WHERE NOT is_accounted AND status = 'completed' LIMIT 1"
    )
    while database.execute(waiting).fetchone() is not None:
        time.sleep(0.1)
    return rows / (time.perf_counter() - started)


def asked(http: httpx.Client) -> float:
    """Ask once; return the milliseconds."""
    messages = [{"role": "user", "content": '[{"text": "ok"}]'}]
    body = {"model": "scripted", "messages": messages, "max_tokens": 5}
    started = time.perf_counter()
    http.post("/chat/completions", json=body).raise_for_status()
    return (time.perf_counter() - started) * 1000


def compare(endpoint: Endpoint, database: psycopg.Connection) -> tuple[float, float]:
    """Return the median milliseconds of a request without limits and with all of them."""
    waits: dict[str, list[float]] = {_NO_LIMITS: [], _LIMITS: []}
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    with httpx.Client(base_url=endpoint.url, headers=headers, timeout=60) as http:
        for _ in range(_ROUNDS):
            for limits, found in waits.items():
                for statement in limits.split(";"):
                    database.execute(statement.encode())
                time.sleep(_CACHE_S)
                asked(http)
                found += [asked(http) for _ in range(_REQUESTS)]
    return median(waits[_NO_LIMITS]), median(waits[_LIMITS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    with (
        platform_with({"scripted": SCRIPTED}) as endpoint,
        psycopg.connect(endpoint.database_url, autocommit=True) as database,
    ):
        accounted = account_all(database, options.rows)
        print(f"accounted: {accounted:,.0f} generations/s")
        free_ms, limited_ms = compare(endpoint, database)
    print(
        f"a request: {free_ms:.2f} ms; limited, with two budgets: {limited_ms:.2f} ms "
        f"({limited_ms / free_ms:.2f} ×)"
    )
    if options.write:
        figures = {"per_s": accounted, "free_ms": free_ms, "limited_ms": limited_ms}
        keep("accounting", {"generations": options.rows, **figures})


if __name__ == "__main__":
    main()
