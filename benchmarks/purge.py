"""A purge beside interactive clients: ``python -m benchmarks.purge --rows 1000000``.

PostgreSQL fills the tables of one project: two fifths of the rows are generations, one fifth each
are stored chat completions, items of responses, and responses with refused requests. Clients send
short requests to a scripted engine, first with nothing beside, then while the site deletes all of
these rows, because the project gets a retention of thirty days. The deletion is done by the
product's own periodic job, from its first deleted row to its last.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import asdict, dataclass

import httpx
import psycopg

from benchmarks.figures import add_write_option, keep
from benchmarks.generation_rows import insert_ended
from benchmarks.load import percentile
from benchmarks.processes import end_on_sigterm
from benchmarks.targets import Endpoint, platform_with

_MODEL = "scripted"
_OLD = "now() - interval '60 days' + n * interval '1 s' / 100"
_PROJECT = "(SELECT min(project_id) FROM accounts_apikey)"
_KEY = "(SELECT min(id) FROM accounts_apikey)"
_TEXT = "repeat(md5(n::text) || ' ', 10)"
_GENERATIONS = insert_ended(
    f"""
SELECT 'chatcmpl-old' || n, 'chat.completion', {_PROJECT}, {_KEY}, '{_MODEL}', 'req_' || n, 0,
    true, false, '', '{{}}', 'completed', 'host:1:abcdef', 1, t, t, t, t, 120, 40, 80, 5, 60, 1900,
    0.0001, 0, 0, true, '', 'stop', ''
FROM generate_series(1, %(rows)s::int) n, LATERAL (SELECT {_OLD}) times (t)
"""  # noqa: S608  # Constants, here and below.
)
_COMPLETIONS = f"""
INSERT INTO completions_storedcompletion
    (public_id, project_id, model, metadata, messages, completion, created_at)
SELECT 'chatcmpl-kept' || n, {_PROJECT}, '{_MODEL}', '{{}}',
    jsonb_build_array(jsonb_build_object('role', 'user', 'content', {_TEXT})),
    jsonb_build_object('choices', '[]'::jsonb, 'text', {_TEXT}), {_OLD}
FROM generate_series(1, %(rows)s::int) n
"""  # noqa: S608
_RESPONSES = f"""
WITH responses AS (
    INSERT INTO responses_api_storedresponse
        (public_id, project_id, model, status, background, metadata, request, incomplete_reason,
         created_at)
    SELECT 'resp_old' || n, {_PROJECT}, '{_MODEL}', 'completed', false, '{{}}', '{{}}', '', {_OLD}
    FROM generate_series(1, %(rows)s::int) n RETURNING id, project_id
)
INSERT INTO responses_api_item (public_id, project_id, response_id, position, is_output, data)
SELECT 'msg_' || id || k, project_id, id, k, k = 1, jsonb_build_object(
    'type', 'message', 'role', 'user', 'content', repeat(md5(id::text) || ' ', 10)
)
FROM responses, generate_series(0, 1) k
"""  # noqa: S608
_REFUSALS = f"""
INSERT INTO request_log_refusal
    (created_at, project_id, method, path, model, status, error_code, request_id, duration_ms,
     count)
SELECT {_OLD}, {_PROJECT}, 'POST', '/v1/chat/completions', '{_MODEL}', 429, 'rate_limit_exceeded',
    'req_' || n, 1, 1
FROM generate_series(1, %(rows)s::int) n
"""  # noqa: S608
_LEFT = """
SELECT (SELECT count(*) FROM generations_generation WHERE public_id LIKE 'chatcmpl-old%'),
    (SELECT count(*) FROM completions_storedcompletion WHERE public_id LIKE 'chatcmpl-kept%'),
    (SELECT count(*) FROM responses_api_item WHERE public_id LIKE 'msg\\_%'),
    (SELECT count(*) FROM responses_api_storedresponse WHERE public_id LIKE 'resp_old%'),
    (SELECT count(*) FROM request_log_refusal WHERE created_at < now() - interval '30 days')
"""
_RETAIN = f"""
UPDATE accounts_project SET generations_days = 30, completions_days = 30, responses_days = 30,
    refusals_days = 30 WHERE id = {_PROJECT}
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Purge:
    """Rows a second, and the times of a request in milliseconds without and beside the purge."""

    old_rows: int
    seconds: float
    rows_per_s: float
    alone_p50_ms: float
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    requests: int


def fill(database: psycopg.Connection, rows: int) -> int:
    """Insert about this number of old rows; return how many."""
    fifth = rows // 5
    parts = (
        (_GENERATIONS, 2 * fifth),
        (_COMPLETIONS, fifth),
        (_RESPONSES, fifth // 2),
        (_REFUSALS, fifth // 2),
    )
    for statement, count in parts:
        database.execute(statement.encode(), {"rows": count})
    database.execute(b"VACUUM ANALYZE")
    return sum(left(database))


def left(database: psycopg.Connection) -> tuple[int, ...]:
    """Return how many old rows each table has."""
    found = database.execute(_LEFT.encode()).fetchone()
    assert found is not None
    return found


class Clients:
    """Clients that send requests at a fixed pace, each the next when the last has ended."""

    def __init__(self, endpoint: Endpoint, clients: int, pause_s: float) -> None:
        self._endpoint, self._pause_s = endpoint, pause_s
        self._over = threading.Event()
        self.waits: list[float] = []
        self._threads = [threading.Thread(target=self._send, args=(n,)) for n in range(clients)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def percentile(self, percent: float) -> float:
        """Return a percentile of the times of all requests, in milliseconds."""
        return round(percentile(sorted(self.waits), percent), 1)

    def _send(self, number: int) -> None:
        said = json.dumps([{"sleep_ms": 20}, {"text": f"n {number}"}])
        body = {"model": _MODEL, "messages": [{"role": "user", "content": said}]}
        headers = {"Authorization": f"Bearer {self._endpoint.key}"}
        with httpx.Client(base_url=self._endpoint.url, headers=headers, timeout=60) as http:
            while not self._over.wait(self._pause_s):
                began = time.monotonic()
                http.post("/chat/completions", json=body).raise_for_status()
                self.waits.append(1000 * (time.monotonic() - began))


def measure(endpoint: Endpoint, options: argparse.Namespace) -> Purge:
    """Fill, then time the requests without and beside the purge."""
    with psycopg.connect(endpoint.database_url, autocommit=True) as database:
        total = fill(database, options.rows)
        with Clients(endpoint, options.clients, options.pause_s):
            time.sleep(5)  # Warms up.
        with Clients(endpoint, options.clients, options.pause_s) as alone:
            time.sleep(options.alone_s)
        database.execute(_RETAIN.encode())
        while sum(left(database)) == total:
            time.sleep(0.1)
        began = time.monotonic()
        with Clients(endpoint, options.clients, options.pause_s) as beside:
            while sum(left(database)):
                time.sleep(max(0.2, 2 * options.rows / 1_000_000))  # It counts all rows.
            took_s = time.monotonic() - began
    return Purge(
        old_rows=total,
        seconds=round(took_s, 1),
        rows_per_s=round(total / took_s),
        alone_p50_ms=alone.percentile(50),
        alone_p99_ms=alone.percentile(99),
        beside_p50_ms=beside.percentile(50),
        beside_p99_ms=beside.percentile(99),
        requests=len(beside.waits),
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser("benchmarks.purge", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause-s", type=float, default=0.05, help="between a client's requests")
    parser.add_argument("--alone-s", type=float, default=60)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    entry = {"engine": "scripted", "slots": 8, "context_length": 4_096}
    with platform_with({_MODEL: entry}, {}) as endpoint:
        purge = measure(endpoint, options)
    print("| rows | rows/s | requests | alone p50 / p99, ms | beside p50 / p99, ms | p99 ratio |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {purge.old_rows:,} | {purge.rows_per_s:,} | {purge.requests:,} "
        f"| {purge.alone_p50_ms:.1f} / {purge.alone_p99_ms:.1f} "
        f"| {purge.beside_p50_ms:.1f} / {purge.beside_p99_ms:.1f} "
        f"| {purge.beside_p99_ms / purge.alone_p99_ms:.2f} |"
    )
    if options.write:
        keep("purge", asdict(purge))


if __name__ == "__main__":
    main()
