"""The pages of the admin at size: 5 million generations, 1 million responses, 1 million refusals.

``python -m benchmarks.admin_pages``. PostgreSQL makes the rows itself: the responses of
``benchmarks.stored_responses``, a generation for each of them and others around, refused requests,
of ten projects with ten keys each, three models and 100,000 end users, over thirty days, and the
roll-ups of those thirty days. Then an operator logs in and asks for each page, one at a time.
"""

import argparse
import datetime as dt
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from urllib.parse import urlsplit

import httpx
import psycopg
from django.contrib.auth.hashers import make_password

from benchmarks.figures import add_write_option, keep
from benchmarks.generation_rows import insert_ended
from benchmarks.own_postgres import use
from benchmarks.processes import end_on_sigterm
from benchmarks.stored_responses import Timing, filled, timed

BOUND_MS = 300
_BATCH = 250_000
_PASSWORD = "only for this benchmark"  # noqa: S105  # The server is gone with it.

_KEYS = """
INSERT INTO accounts_apikey (project_id, name, prefix, scopes, allowed_models, created_at)
SELECT project.id, 'key ' || n, 'sk-bench', '{{inference}}', '{{}}', now()
FROM accounts_project project, generate_series(1, {keys}) n;
"""
# The first generations are those of the responses, with their ids. Few fail; none runs.
_GENERATIONS = insert_ended("""
SELECT CASE WHEN n <= {responses} THEN 'resp_' ELSE 'chatcmpl-' END || md5(n::text),
    CASE WHEN n <= {responses} THEN 'response' ELSE 'chat.completion' END,
    key.project_id, key.id, (ARRAY['scripted', 'large', 'rare'])
        [CASE WHEN n % 5000 = 0 THEN 3 WHEN n % 3 = 0 THEN 2 ELSE 1 END],
    'req_' || md5('r' || n), 0, true, false,
    CASE WHEN n % 2 = 0 THEN 'user ' || n % 100003 ELSE '' END, '{{}}',
    CASE WHEN n % 997 = 0 THEN 'failed' WHEN n % 101 = 0 THEN 'cancelled' ELSE 'completed' END,
    'host:1:abcdef', 1, t, t + interval '8 ms', t + interval '90 ms', t + interval '2 s',
    120, 40, 80, 5, 60, 1900, 0.0001, 0, 0, true, '', 'stop', ''
FROM generate_series({first}, {last}) n
JOIN keys key ON key.number = n % (SELECT count(*) FROM keys),
LATERAL (SELECT now() - interval '30 days' * (1 - n::float / {total}) AS t) times
""")
# One in three of nobody's key.
_REFUSALS = """
INSERT INTO request_log_refusal (created_at, project_id, api_key_id, method, path, model, status,
    error_code, request_id, duration_ms, count)
SELECT now() - interval '30 days' * (1 - n::float / {total}),
    CASE WHEN n % 3 > 0 THEN key.project_id END, CASE WHEN n % 3 > 0 THEN key.id END,
    'POST', '/v1/chat/completions', CASE WHEN n % 7 = 0 THEN 'large' ELSE '' END,
    (ARRAY[401, 429, 400])[1 + n % 3],
    CASE WHEN n % 9973 = 0 THEN 'rare_error'
         ELSE (ARRAY['invalid_api_key', 'rate_limit_exceeded', 'invalid_type'])[1 + n % 3] END,
    'req_' || md5('f' || n), 3, 1
FROM generate_series(1, {total}) n
JOIN keys key ON key.number = n % (SELECT count(*) FROM keys)
"""
_ROLLUPS = """
INSERT INTO usage_usagerollup (period, start, project_id, api_key_id, model, requests, completed,
    failed, cancelled, input_tokens, cached_tokens, output_tokens, reasoning_tokens, queue_ms,
    prefill_ms, decode_ms, cost)
SELECT period, start, key.project_id, key.id, model, 40, 38, 1, 1, 4800, 1600, 3200, 200, 320, 2400,
    76000, 0.004
FROM (VALUES ('minute', interval '1 minute', interval '2 days'),
             ('hour', interval '1 hour', interval '30 days'),
             ('day', interval '1 day', interval '365 days')) periods (period, step, back),
LATERAL generate_series(date_trunc(period, now() - back, 'UTC'), now(), step) start,
accounts_apikey key, (VALUES ('scripted'), ('large')) models (model)
WHERE period <> 'minute' OR key.id % 5 = 0
ON CONFLICT DO NOTHING
"""
_LATENCIES = """
(SELECT period, start, project_id, api_key_id, model, measure, bucket, 10 AS count
FROM usage_usagerollup, (VALUES ('ttft'), ('prefill'), ('speed'), ('queue')) measures (measure),
(VALUES (8), (11), (14), (16)) buckets (bucket)) AS made
"""


def fill(
    database: psycopg.Connection, generations: int, responses: int, refusals: int, keys: int
) -> None:
    """Insert keys, generations, refusals and roll-ups beside the existing responses.

    Django must be set up, for the product's own statements.
    """
    from inference_site.runs.usage.models import add_sql, sums_sql

    database.autocommit = True
    database.execute(_KEYS.format(keys=keys).encode())
    database.execute(
        b"CREATE TEMP TABLE keys AS "
        b"SELECT id, project_id, row_number() OVER (ORDER BY id) - 1 AS number FROM accounts_apikey"
    )
    for first in range(1, generations + 1, _BATCH):
        started = time.perf_counter()
        last = min(generations, first + _BATCH - 1)
        statement = _GENERATIONS.format(
            first=first, last=last, total=generations, responses=responses
        )
        database.execute(statement.encode())
        print(f"{last:,} generations ({time.perf_counter() - started:.0f} s)", flush=True)
    database.execute(_REFUSALS.format(total=refusals).encode())
    database.execute(_ROLLUPS.encode())
    database.execute(add_sql(sums_sql(_LATENCIES)).encode())
    database.execute(b"ANALYZE usage_usagerollup; ANALYZE usage_latencyhistogram")
    for table in (b"generations_generation", b"request_log_refusal"):
        database.execute(b"VACUUM ANALYZE " + table)


class Operator:
    """A browser of the superuser, without the files of the pages."""

    def __init__(self, origin: str, database: psycopg.Connection) -> None:
        password = make_password(_PASSWORD)
        database.execute("UPDATE auth_user SET password = %s", [password])
        self._http = httpx.Client(base_url=origin, timeout=60)
        page = self._http.get("/admin/login/").text
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)
        assert token is not None
        form = {"username": "admin", "password": _PASSWORD, "csrfmiddlewaretoken": token.group(1)}
        answer = self._http.post("/admin/login/?next=/admin/", data=form)
        assert answer.status_code == 302, answer.text

    def get(self, path: str) -> str:
        """Return a page. Raise httpx.HTTPStatusError for an error status."""
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer.text


def pages(
    database: psycopg.Connection, generations: int, responses: int, refusals: int
) -> Iterator[tuple[str, Callable[[int], str]]]:
    """Yield each page's name, and its address for the n-th request."""
    ((project, key),) = database.execute(
        b"SELECT project_id, id FROM accounts_apikey ORDER BY id DESC LIMIT 1"
    ).fetchall()
    log, list_ = "/admin/generations/generation/", "/admin/responses_api/storedresponse/"

    def place(number: int, total: int) -> int:
        return 1 + number * 7_919_777 % total

    for range_ in ("1h", "24h", "7d", "30d"):
        yield f"home, {range_}", lambda _, r=range_: f"/admin/?range={r}"  # type: ignore[misc]
    yield "home, custom, 7 days", lambda _: f"/admin/?{_custom_week()}"
    yield "home, 30d, one project", lambda _: f"/admin/?range=30d&project={project}&by=api_key_id"
    yield "queue", lambda _: "/admin/queue/"
    yield "models and workers", lambda _: "/admin/fleet/"
    requests = "/admin/requests/"
    yield "request log", lambda _: requests
    yield (
        "request log, from any place",
        lambda n: f"{requests}?before={place(n, generations)}-{place(n, refusals)}",
    )
    for name, chosen in {
        "of a project": f"project={project}",
        "of a key": f"project={project}&key={key}",
        "failed": "status=failed",
        "refused": "status=refused",
        "429": "status=429",
        "a rare error": "error=rare_error",
        "a rare model": "model=rare",
        "what nothing fits": f"model=rare&error=none&project={project}",
        "of the last hour": "since=1h",
        "longest first": "sort=-duration",
        "longest first, failed": "sort=-duration&status=failed",
        "slower than 60 s": "slower=60",
        "of an end user": "user=user+77",
        "of an end user, longest first": "user=user+77&sort=-duration",
        "running": "status=unfinished",
        "by a word of 2 %": "q=subject7",
        "by a word that all have": "q=the",
    }.items():
        yield f"request log, {name}", lambda _, c=chosen: f"{requests}?{c}"  # type: ignore[misc]
    yield "generations", lambda _: log
    yield "generations, from any place", lambda n: f"{log}?before={place(n, generations)}"
    yield "generations, failed", lambda _: f"{log}?status__exact=failed"
    yield "generations, a rare model", lambda _: f"{log}?model=rare"
    yield "generations of a project", lambda _: f"{log}?project__id__exact={project}"
    yield "generations of a key", lambda _: f"{log}?project__id__exact={project}&api_key={key}"
    both = f"{log}?model=rare&status__exact=failed&project__id__exact={project}"
    yield "generations, filters that nothing fits", lambda _: both
    yield "generations of the last hour", lambda _: f"{log}?since=1h"
    yield "generations, failed, of 7 days", lambda _: f"{log}?since=7d&status__exact=failed"
    yield "a generation", lambda n: f"{log}{place(n, generations)}/change/"
    yield "responses", lambda _: list_
    yield "responses, from any place", lambda n: f"{list_}?before={place(n, responses)}"
    yield "responses of a project", lambda _: f"{list_}?project__id__exact={project}"
    yield "responses, failed", lambda _: f"{list_}?status=failed"
    yield "responses of a key", lambda _: f"{list_}?project__id__exact={project}&api_key={key}"
    yield "responses of 24 hours", lambda _: f"{list_}?since=24h"
    yield "responses by metadata", lambda n: f"{list_}?q=topic%3Dt{n % 50}"
    yield "responses by id", lambda n: f"{list_}?q={_response_id(database, place(n, responses))}"
    words = {
        "that nothing has": "nowhere",
        "that all items have": "the",
        "of 70 %, the newest": "recent",
        "of 30 %, the oldest": "bygone",
        "of 2 %": "subject7",
        "of 2 %, in a project": f"subject7&project__id__exact={project}",
    }
    for name, word in words.items():
        yield f"responses by a word {name}", lambda _, w=word: f"{list_}?q={w}"  # type: ignore[misc]
    yield (
        "a response at the end of 100 turns",
        (lambda n: f"{list_}{place(n, responses) // 100 * 100 + 99}/change/"),
    )
    for name in ("responses_api/conversation", "completions/storedcompletion", "admin/logentry"):
        yield name.partition("/")[2], lambda _, n=name: f"/admin/{n}/"  # type: ignore[misc]
    for name in ("project", "apikey", "budget"):
        yield name, lambda _, n=name: f"/admin/accounts/{n}/"  # type: ignore[misc]


def _custom_week() -> str:
    """Return a custom range of hours, the kind of bucket with the most rows."""
    now = dt.datetime.now(dt.UTC)
    start = now - dt.timedelta(days=6, hours=22)
    return f"range=custom&from={start:%Y-%m-%dT%H:%M}&to={now:%Y-%m-%dT%H:%M}"


def _response_id(database: psycopg.Connection, pk: int) -> str:
    found = database.execute(
        "SELECT public_id FROM responses_api_storedresponse WHERE id = %s", [pk]
    ).fetchone()
    assert found is not None
    return str(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=5_000_000)
    parser.add_argument("--responses", type=int, default=1_000_000)
    parser.add_argument("--refusals", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=10, help="of each project")
    parser.add_argument("--times", type=int, default=15, help="looks at each page")
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    size = {name: vars(options)[name] for name in ("generations", "responses", "refusals")}
    use("")
    with filled(options.responses) as (endpoint, database):
        fill(database, **size, keys=options.keys)
        parts = urlsplit(endpoint.url)
        operator = Operator(f"{parts.scheme}://{parts.netloc}", database)
        print("| page | p50 ms | slowest ms | |\n| --- | --- | --- | --- |")
        rows = []
        for name, address in pages(database, *size.values()):
            operator.get(address(0))  # The first reads from the disk.
            timing = timed(name, lambda n, a=address: operator.get(a(n)), options.times)  # type: ignore[misc]
            note = "" if timing.p99_ms < BOUND_MS else f"above {BOUND_MS} ms"
            rows.append(Timing(timing.name, timing.p50_ms, timing.p99_ms, note))
            print(rows[-1].line(), flush=True)
    if options.write:
        keep("admin_pages", {**size, "times": options.times, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
