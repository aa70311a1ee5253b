"""Claims: generations a second that many workers take from one queue.

``python -m benchmarks.claims``: so many processes, each with a connection of its own, claim what
waits for one model until nothing does, with the worker's own ``Generation.objects.claim``. What
waits is of one project or of many, and beside it nothing runs, or thousands do. PostgreSQL's
processor time is that of all its processes.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing.synchronize import Barrier
from pathlib import Path

import psycopg

from benchmarks.figures import add_write_option, keep
from benchmarks.own_postgres import own_postgres, processor_s, use
from benchmarks.processes import end_on_sigterm

MODEL = "queued"
_PATIENCE_S = 600
_FILL = """
INSERT INTO generations_generation (public_id, kind, project_id, api_key_id, model, request_id,
    service_class, streamed, background, end_user, ignored_params, status, worker,
    preferred_worker, attempt, created_at, input_tokens, cached_tokens, output_tokens,
    reasoning_tokens, prefill_ms, decode_ms, cost, reserved_tokens, reserved_cost, is_accounted,
    finish_reason, error_code)
SELECT %(status)s || n, 'chat.completion', 1 + n %% %(projects)s, 1 + n %% %(projects)s, %(model)s,
    'req_' || n, 0, true, false, '', '{}', %(status)s, '', '', 0,
    now() - interval '1 ms' * (%(rows)s - n), 0, 0, 0, 0, 0, 0, 0, 0, 0, false, '', ''
FROM generate_series(1, %(rows)s) n
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One emptied queue. Times are milliseconds for each claim."""

    claimers: int
    waiting: int
    projects: int
    running: int
    claims_per_s: float
    postgres_ms: float
    claimers_ms: float
    missed: int
    twice: int


Result = tuple[list[str], float, float, float]


def claim_all(number: int) -> Result:
    """Claim until nothing waits; return the ids, the times of start and end, and CPU seconds."""
    from inference_site.runs.models import Generation

    claimed: list[str] = []
    began, cpu = time.monotonic(), time.process_time()
    while (claim := Generation.objects.claim(MODEL, f"w{number}")) is not None:
        claimed.append(claim.public_id)
    return claimed, began, time.monotonic(), time.process_time() - cpu


def be_claimer(
    number: int, url: str, rounds: int, start: Barrier, results: "multiprocessing.Queue[Result]"
) -> None:
    """Empty this number of queues, each once all claimers are ready."""
    use(url)
    for _ in range(rounds):
        claim_all(number)  # Nothing waits yet: it connects, and has PostgreSQL plan.
        start.wait(_PATIENCE_S)  # They are ready.
        start.wait(_PATIENCE_S)  # The queue is filled.
        results.put(claim_all(number))


def claimed_by(
    claimers: int, url: str, queues: Sequence[tuple[int, int, int]], database: psycopg.Connection
) -> Iterator[Row]:
    """Empty these queues with this number of processes (waiting, projects, running)."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(claimers + 1)
    results: multiprocessing.Queue[Result] = context.Queue()
    given = (url, len(queues), start, results)
    processes = [
        context.Process(target=be_claimer, args=(number, *given), daemon=True)
        for number in range(claimers)
    ]
    for process in processes:
        process.start()
    for queue in queues:
        start.wait(_PATIENCE_S)
        fill(database, *queue)
        before = processor_s(database)
        start.wait(_PATIENCE_S)
        found = [results.get(timeout=_PATIENCE_S) for _ in processes]
        yield summarise(claimers, queue, found, processor_s(database) - before)
        database.execute(b"TRUNCATE generations_generation")
    for process in processes:
        process.join(_PATIENCE_S)


def fill(database: psycopg.Connection, waiting: int, projects: int, running: int) -> None:
    for status, rows in (("running", running), ("queued", waiting)):
        given = {"status": status, "rows": rows, "projects": projects, "model": MODEL}
        psycopg.ClientCursor(database).execute(_FILL, given)
    database.execute(b"ANALYZE generations_generation")


def summarise(
    claimers: int, queue: tuple[int, int, int], found: Sequence[Result], postgres_s: float
) -> Row:
    """Count the claims of each row."""
    taken = Counter(id_ for ids, _, _, _ in found for id_ in ids)
    claims = sum(taken.values())
    seconds = max(end for _, _, end, _ in found) - min(began for _, began, _, _ in found)
    return Row(
        claimers,
        *queue,
        round(claims / seconds, 1),
        round(postgres_s * 1000 / claims, 3),
        round(sum(cpu for *_, cpu in found) * 1000 / claims, 3),
        missed=queue[0] - len(taken),
        twice=claims - len(taken),
    )


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| claimers | waiting | of projects | running | claims/s | PostgreSQL ms a claim | "
        "claimers ms a claim | missed | claimed twice |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(str(value) for value in asdict(row).values())} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claimers", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--waiting", type=int, default=5000)
    parser.add_argument("--projects", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--running", type=int, nargs="+", default=[0, 5000])
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    queues = list(product([options.waiting], options.projects, options.running))
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="claims-") as folder,
        own_postgres(Path(folder)) as (_, url),
        psycopg.connect(url, autocommit=True) as database,
    ):
        for claimers in options.claimers:
            for row in claimed_by(claimers, url, queues, database):
                rows.append(row)
                print(row, flush=True)
    print(table(rows))
    if options.write:
        keep("claims", {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
