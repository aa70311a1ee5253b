"""Many stored responses: fill PostgreSQL, then measure the waits of readers and writers.

``python -m benchmarks.stored_responses --responses 1000000``. The rows are made by PostgreSQL
itself, in chains of a hundred turns, five items a turn, for ten projects; a few chains are deeper.
Every item has a word of its own, one of fifty subjects, the word "the", and "bygone" or "recent".
Then the running platform is asked over HTTP, one request at a time.
"""

import argparse
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import httpx
import psycopg

from benchmarks.figures import add_write_option, keep
from benchmarks.load import percentile
from benchmarks.processes import end_on_sigterm
from benchmarks.targets import Endpoint, platform_with

ITEMS, CHAIN = 5, 100
DEPTHS = (10, 100, 1000)
SCRIPTED = {"engine": "scripted", "slots": 4, "context_length": 1_000_000}

_FILL = """
INSERT INTO accounts_project (name, is_active, created_at)
    SELECT 'bench ' || n, true, now() FROM generate_series(1, 9) n ON CONFLICT DO NOTHING;
ALTER TABLE responses_api_storedresponse DISABLE TRIGGER ALL;
ALTER TABLE responses_api_item DISABLE TRIGGER ALL;
INSERT INTO responses_api_storedresponse
    (id, public_id, project_id, model, status, background, previous_id, metadata, request, usage,
     incomplete_reason, created_at, completed_at)
SELECT n, 'resp_' || md5(n::text), (SELECT min(id) FROM accounts_project) + (n / {chain}) %% 10,
       'scripted', 'completed', false, CASE WHEN n > 1 AND n %% {chain} > 0 THEN n - 1 END,
       jsonb_build_object('topic', 't' || n %% 50), '{{"model": "scripted"}}',
       '{{"input_tokens": 100, "input_tokens_details": {{"cached_tokens": 0,
          "cache_write_tokens": 0}}, "output_tokens": 20, "output_tokens_details":
          {{"reasoning_tokens": 0}}, "total_tokens": 120}}',
       '', now() - (({total} - n) || ' seconds')::interval, now()
FROM generate_series({first}, {last}) n;
INSERT INTO responses_api_item (public_id, project_id, response_id, position, is_output, data)
SELECT 'msg_' || md5(n || '.' || k), (SELECT min(id) FROM accounts_project) + (n / {chain}) %% 10,
       n, k, k = {items} - 1,
       jsonb_build_object('type', 'message', 'status', 'completed',
           'role', CASE WHEN k = {items} - 1 THEN 'assistant' ELSE 'user' END,
           'content', jsonb_build_array(jsonb_build_object(
               'type', CASE WHEN k = {items} - 1 THEN 'output_text' ELSE 'input_text' END,
               'text', repeat(md5(n || '.' || k) || ' ', 5) || 'the subject' || n %% 50
                       || CASE WHEN n < {total} * 0.3 THEN ' bygone' ELSE ' recent' END,
               'annotations', '[]'::jsonb, 'logprobs', '[]'::jsonb)))
FROM generate_series({first}, {last}) n, generate_series(0, {items} - 1) k;
ALTER TABLE responses_api_storedresponse ENABLE TRIGGER ALL;
ALTER TABLE responses_api_item ENABLE TRIGGER ALL;
"""
_SIZES = """
SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c
WHERE c.relname IN ('responses_api_storedresponse', 'responses_api_item')
"""
_BATCH = 100_000


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one type of request, in milliseconds."""

    name: str
    p50_ms: float
    p99_ms: float
    note: str = ""

    def line(self) -> str:
        return f"| {self.name} | {self.p50_ms:.1f} | {self.p99_ms:.1f} | {self.note} |"


def fill(database: psycopg.Connection, total: int) -> None:
    """Insert the rows, with ids from 1; the index of words is built after the last one."""
    found = database.execute(b"SELECT pg_get_indexdef('item_words'::regclass)").fetchone()
    assert found is not None
    database.execute(b"DROP INDEX item_words")
    for first in range(0, total, _BATCH):
        last = min(total, first + _BATCH) - 1
        started = time.perf_counter()
        statement = _FILL.format(
            first=first + 1, last=last + 1, total=total, chain=CHAIN, items=ITEMS
        ).replace("%%", "%")
        database.execute(statement.encode())
        database.commit()
        print(f"{last + 1:,} responses ({time.perf_counter() - started:.0f} s)", flush=True)
    for table in ("storedresponse", "item"):
        name = f"responses_api_{table}"
        database.execute(
            f"SELECT setval(pg_get_serial_sequence('{name}', 'id'), "  # noqa: S608  # Fixed names.
            f"(SELECT max(id) FROM {name}))".encode()
        )
    database.commit()
    started = time.perf_counter()
    database.execute(b"SET maintenance_work_mem = '512MB'")
    database.execute(str(found[0]).encode())
    database.commit()
    print(f"words are indexed ({time.perf_counter() - started:.0f} s)", flush=True)
    database.autocommit = True
    database.execute(b"VACUUM ANALYZE")
    database.execute(b"CHECKPOINT")  # Its writes would go on while requests are measured.


def timed(name: str, ask: Callable[[int], object], times: int, note: str = "") -> Timing:
    """Run ``ask`` ``times`` times in sequence, and time it."""
    waits = []
    for number in range(times):
        started = time.perf_counter()
        ask(number)
        waits.append((time.perf_counter() - started) * 1000)
    waits.sort()
    return Timing(name, percentile(waits, 50), percentile(waits, 99), note)


class Asker:
    """Asks the platform as the first project."""

    def __init__(self, endpoint: Endpoint, ids: Sequence[str]) -> None:
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        self._http = httpx.Client(base_url=endpoint.url, headers=headers, timeout=60)
        self._ids = ids

    def an_id(self, number: int) -> str:
        """Return one of the project's responses, scattered over all of them."""
        return self._ids[number * 7919 % len(self._ids)]

    def get(self, path: str, **query: str) -> httpx.Response:
        response = self._http.get(path, params=query)
        response.raise_for_status()
        return response

    def find(self, words: str, **query: str) -> str:
        """Search; return the number of results, or the code of the error, as text."""
        response = self._http.get("/responses", params={"q": words, **query})
        if response.status_code == 400:
            return str(response.json()["error"]["code"])
        response.raise_for_status()
        return f"{len(response.json()['data'])} found"

    def create(self, **fields: object) -> str:
        """Create a response of one word; return its id."""
        body = {"model": "scripted", "input": '[{"text": "ok"}]', **fields}
        response = self._http.post("/responses", json=body)
        response.raise_for_status()
        return str(response.json()["id"])

    def chat(self) -> None:
        """Send the same request to chat completions, which store nothing."""
        body = {
            "model": "scripted",
            "messages": [{"role": "user", "content": '[{"text": "ok"}]'}],
        }
        self._http.post("/chat/completions", json=body).raise_for_status()

    def delete(self, response_id: str) -> None:
        self._http.delete(f"/responses/{response_id}").raise_for_status()


def measure(asker: Asker, database: psycopg.Connection) -> Iterator[Timing]:
    """Yield the timings."""
    yield timed("GET a response", lambda n: asker.get(f"/responses/{asker.an_id(n)}"), 500)
    yield timed(
        "list, at any place",
        lambda n: asker.get("/responses", after=asker.an_id(n), limit="20"),
        100,
    )
    yield timed(
        "list by metadata",
        lambda n: asker.get("/responses", **{"metadata[topic]": f"t{n % 50}", "limit": "20"}),
        20,
    )
    yield from _searches(asker, database)
    yield timed("chat completion", lambda _: asker.chat(), 200, "keeps nothing")
    yield timed("create a response", lambda _: asker.create(), 200, "stored")
    created = [asker.create() for _ in range(100)]
    yield timed("delete", lambda n: asker.delete(created[n]), 100)
    yield from _depths(asker, database)


def _searches(asker: Asker, database: psycopg.Connection) -> Iterator[Timing]:
    """Search for words of every frequency."""
    own = [
        hashlib.md5(b"%d.1" % (chain * 10 * CHAIN + 1)).hexdigest()  # noqa: S324  # A word, no secret.
        for chain in range(1, 21)
    ]
    old = database.execute(
        b"SELECT extract(epoch FROM created_at)::bigint FROM responses_api_storedresponse "
        b"WHERE id = (SELECT max(id) / 4 FROM responses_api_storedresponse)"
    ).fetchone()
    assert old is not None
    searches: list[tuple[str, Callable[[int], str], dict[str, str]]] = [
        ("no hit", lambda n: f"nowhere{n}", {}),
        ("one hit", lambda n: own[n % len(own)], {}),
        ("a word of 2 %", lambda n: f"subject{n % 50}", {}),
        ("a word of all", lambda _: "the", {}),
        ("an old word of 2 %", lambda n: f"bygone subject{n % 50}", {}),
        ("a word of all that is old", lambda _: "bygone", {}),
        ("the same, created before", lambda _: "bygone", {"created_before": str(old[0])}),
    ]
    for name, words, query in searches:
        yield timed(
            f"search: {name}",
            lambda n, words=words, query=query: asker.find(words(n), **query),  # type: ignore[misc]
            20,
            asker.find(words(0), **query),
        )


def _depths(asker: Asker, database: psycopg.Connection) -> Iterator[Timing]:
    """Grow one chain, and measure reading and growing it at each depth."""
    last, depth = asker.create(), 1
    for wanted in DEPTHS:
        while depth < wanted:
            last, depth = asker.create(previous_response_id=last), depth + 1
        here = last
        before = _bytes(database)
        turns = [asker.create(previous_response_id=here) for _ in range(50)]
        grown = (_bytes(database) - before) / len(turns)
        yield timed(
            f"history at depth {wanted:,}",
            lambda _, id_=here: asker.get(f"/responses/{id_}/input_items"),  # type: ignore[misc]
            20,
            f"{grown:,.0f} bytes a turn",
        )
        yield timed(
            f"history at depth {wanted:,}, oldest first",
            lambda _, id_=here: asker.get(  # type: ignore[misc]
                f"/responses/{id_}/input_items", order="asc"
            ),
            20,
        )
        yield timed(
            f"create at depth {wanted:,}",
            lambda _, id_=here: asker.create(previous_response_id=id_),  # type: ignore[misc]
            20,
        )


def _bytes(database: psycopg.Connection) -> int:
    found = database.execute(_SIZES).fetchone()
    assert found is not None
    return int(found[0])


@contextmanager
def filled(total: int) -> Iterator[tuple[Endpoint, psycopg.Connection]]:
    """Run the platform on a database of this size."""
    with (
        platform_with({"scripted": SCRIPTED}) as endpoint,
        psycopg.connect(endpoint.database_url) as database,
    ):
        fill(database, total)
        yield endpoint, database


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=1_000_000)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    with filled(options.responses) as (endpoint, database):
        size = _bytes(database)
        print(f"{options.responses:,} responses, {size / 2**30:.2f} GiB on disk\n")
        rows = database.execute(
            b"SELECT public_id FROM responses_api_storedresponse "
            b"WHERE project_id = (SELECT min(id) FROM accounts_project) LIMIT 50000"
        ).fetchall()
        asker = Asker(endpoint, [row[0] for row in rows])
        print("| request | p50 ms | p99 ms | |\n| --- | --- | --- | --- |")
        timings = []
        for timing in measure(asker, database):
            timings.append(asdict(timing))
            print(timing.line(), flush=True)
    if options.write:
        figures = {"responses": options.responses, "gib": size / 2**30}
        keep("stored_responses", {**figures, "rows": timings})


if __name__ == "__main__":
    main()
