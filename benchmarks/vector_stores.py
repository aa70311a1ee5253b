"""Vector stores: ``python -m benchmarks.vector_stores``.

``search``: a store of many chunks, whose vectors lie in clusters, as those of texts do, and whose
texts have words of a Zipf distribution. The times are those of the search, the question's embedding
aside; recall is that of the ten nearest against all distances. ``index``: PDFs are indexed while
one client asks a chat model again and again; its times to first token are compared with those
before.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import tempfile
import time
import zlib
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import psycopg

from benchmarks.own_postgres import own_postgres, use
from benchmarks.targets import Endpoint, platform_with
from inference_site.catalogue.catalogue import DEMO_FILE

Vectors = npt.NDArray[np.float32]
_WORDS = [f"word{number:05d}" for number in range(20_000)]
_DIMENSIONS, _CLUSTERS, _SPREAD = 384, 500, 0.6
_WORDS_A_CHUNK = 120
_FILES = 100
_LIMIT = 10


def _vectors(rng: np.random.Generator, centers: Vectors, count: int) -> Vectors:
    """Return unit vectors, each near one of the centers."""
    chosen = centers[rng.integers(len(centers), size=count)]
    noise = rng.standard_normal((count, _DIMENSIONS)) / np.sqrt(_DIMENSIONS) * _SPREAD
    vectors = chosen + noise
    found: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return found


def _text(rng: random.Random, words: int) -> str:
    ranks = (min(len(_WORDS) - 1, int(rng.paretovariate(0.6)) - 1) for _ in range(words))
    return " ".join(_WORDS[rank] for rank in ranks)


def _fill(url: str, vectors: Vectors) -> None:
    """Insert a project, a store, its files and its chunks."""
    from inference_site.vector_stores.search import create_index, require_pgvector

    rng = random.Random(1)
    with psycopg.connect(url) as database:
        run = database.execute
        (project,) = run(
            "INSERT INTO accounts_project (name, is_active, created_at) "
            "VALUES ('bench', true, now()) RETURNING id"
        ).fetchone()  # type: ignore[misc]
        (key,) = run(
            "INSERT INTO accounts_apikey (project_id, name, prefix, scopes, allowed_models, "
            "created_at) VALUES (%s, 'k', '', '{}', '{}', now()) RETURNING id",
            [project],
        ).fetchone()  # type: ignore[misc]
    from inference_site.files.models import FileState, StoredFile
    from inference_site.vector_stores.models import (
        IndexingStatus,
        VectorStore,
        VectorStoreFile,
    )

    require_pgvector()
    store = VectorStore.objects.create(
        public_id="vs_bench", project_id=project, embedding_model="none", language="english"
    )
    each = len(vectors) // _FILES
    with psycopg.connect(url) as database, database.cursor() as cursor:
        for number in range(_FILES):
            file = StoredFile.objects.create(
                public_id=f"file-{number}", project_id=project, filename=f"{number}.txt",
                purpose="assistants", size_bytes=1, state=FileState.READY,
            )  # fmt: skip
            entry = VectorStoreFile.objects.create(
                store=store, file=file, project_id=project, api_key_id=key, chunk_size=800,
                chunk_overlap=400, status=IndexingStatus.COMPLETED, chunk_count=each,
            )  # fmt: skip
            rows = [
                (store.pk, entry.pk, at, text := _text(rng, _WORDS_A_CHUNK), text,
                 f"{{{','.join(map(str, vector))}}}", _DIMENSIONS)
                for at, vector in enumerate(vectors[number * each : (number + 1) * each])
            ]  # fmt: skip
            cursor.executemany(
                "INSERT INTO vector_stores_chunk (store_id, file_id, position, text, words, "
                "embedding, dimensions) VALUES (%s, %s, %s, %s, to_tsvector('english', %s), "
                "%s::real[], %s)",
                rows,
            )
        database.commit()
    began = time.monotonic()
    create_index(_DIMENSIONS)
    print(f"index of {len(vectors):,} vectors: {time.monotonic() - began:.0f} s")
    with psycopg.connect(url, autocommit=True) as database:
        database.execute("VACUUM ANALYZE")


def measure_search(chunks: int, questions: int) -> None:
    """Print the times of searches and their recall."""
    rng, words = np.random.default_rng(2), random.Random(3)
    centers = rng.standard_normal((_CLUSTERS, _DIMENSIONS)) / np.sqrt(_DIMENSIONS)
    vectors = _vectors(rng, centers, chunks)
    asked = _vectors(rng, centers, questions)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        own_postgres(Path(folder) / "postgres") as (_, url),
    ):
        use(url)
        from inference_site.vector_stores import search as search_module
        from inference_site.vector_stores.models import VectorStore
        from inference_site.vector_stores.search import Ranking, search

        _fill(url, vectors)
        stores = list(VectorStore.objects.all())
        texts = [_text(words, 8) for _ in asked]

        def timed(ranking: Any) -> tuple[list[float], list[set[str]]]:
            times, found = [], []
            for text, vector in zip(texts, asked, strict=True):
                began = time.monotonic()
                some = search(
                    stores, text, array("f", vector.tolist()), limit=_LIMIT, ranking=ranking
                )
                times.append(1000 * (time.monotonic() - began))
                found.append({one.text for one in some})
            return times, found

        by_meaning = Ranking(text_weight=0)
        timed(by_meaning)  # Warms up.
        nearest, found = timed(by_meaning)
        hybrid, _ = timed(Ranking())
        search_module._EXACT_CHUNKS = chunks  # The reference.
        exact, wanted = timed(by_meaning)
    recall = statistics.mean(len(a & b) / _LIMIT for a, b in zip(found, wanted, strict=True))
    print(f"\n| search in {chunks:,} chunks of {_DIMENSIONS} dimensions | p50 ms | p99 ms |")
    print("|---|---|---|")
    for name, times in (("by meaning", nearest), ("hybrid", hybrid), ("all distances", exact)):
        p99 = statistics.quantiles(times, n=100)[98]
        print(f"| {name} | {statistics.median(times):.1f} | {p99:.1f} |")
    print(f"\nrecall@{_LIMIT}: {recall:.3f}")


def _pdf(pages: int, words_a_page: int, seed: int) -> bytes:
    """Return a PDF whose pages have about ``words_a_page`` words each."""
    rng = random.Random(seed)
    words = [w for w in (DEMO_FILE.parents[2] / "docs/operations.md").read_text().split()
             if w.isalpha()]  # fmt: skip
    objects = [b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for _ in range(pages):
        lines = (" ".join(rng.choices(words, k=12)) for _ in range(words_a_page // 12))
        shown = b" ".join(f"({line}) Tj T*".encode("latin-1", "replace") for line in lines)
        drawn = zlib.compress(b"BT /F1 10 Tf 50 780 Td 12 TL " + shown + b" ET")
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream"
                       % (len(drawn), drawn))  # fmt: skip
        objects.append(b"<< /Type /Page /Parent %d 0 R /MediaBox [0 0 595 842] /Contents %d 0 R "
                       b"/Resources << /Font << /F1 1 0 R >> >> >>"
                       % (2 * pages + 2, len(objects)))  # fmt: skip
        kids.append(b"%d 0 R" % len(objects))
    objects.append(b"<< /Type /Pages /Count %d /Kids [%s] >>" % (pages, b" ".join(kids)))
    objects.append(b"<< /Type /Catalog /Pages %d 0 R >>" % len(objects))
    whole, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(whole))
        whole += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return whole + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer << /Size %d /Root %d 0 R >>\nstartxref\n%d\n"
        b"%%%%EOF" % (len(objects) + 1, table, len(objects) + 1, len(objects), len(whole))
    )


def _first_tokens(http: httpx.Client, count: int, pause_s: float) -> Iterator[float]:
    """Yield the times to first token, in ms, of chats one after the other, with a pause between."""
    for number in range(count):
        time.sleep(pause_s)
        began = time.monotonic()
        asked = [{"role": "user", "content": f"What is the capital of Japan? {number}"}]
        body = {"model": "demo", "stream": True, "max_tokens": 16, "messages": asked}
        body["enable_thinking"] = False
        with http.stream("POST", "/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    yield 1000 * (time.monotonic() - began)
                    break


def measure_indexing(options: argparse.Namespace) -> None:
    """Print how many pages are indexed a second, and what that costs a client beside it."""
    documents, pages, words = options.documents, options.pages, options.words
    demo = {"file": str(DEMO_FILE), "slots": 4}
    models = {"demo": demo, "demo-embedding": {**demo, "embedding": "mean", "slots": 2}}
    with platform_with(models) as endpoint, _client(endpoint) as http:
        alone = list(_first_tokens(http, 100, options.pause_s))
        measured, of_model = _tokens_a_second(http)
        ids = []
        for number in range(documents):
            upload = {"file": (f"{number}.pdf", io.BytesIO(_pdf(pages, words, number)))}
            made = http.post("/files", data={"purpose": "assistants"}, files=upload)
            ids.append(made.json()["id"])
        store = http.post("/vector_stores", json={"name": "bench"}).json()
        began = time.monotonic()
        chunks = {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": options.overlap}
        strategy = {"type": "static", "static": chunks}
        batch = {"file_ids": ids, "chunking_strategy": strategy}
        http.post(f"/vector_stores/{store['id']}/file_batches", json=batch)
        beside: list[float] = []
        while (counts := _counts(http, store["id"]))["in_progress"]:
            beside += _first_tokens(http, 5, options.pause_s)
        took = time.monotonic() - began
        assert counts["completed"] == documents, counts
        began = time.monotonic()
        again = http.post("/vector_stores", json={"name": "bench"}).json()
        http.post(f"/vector_stores/{again['id']}/file_batches", json=batch)
        while _counts(http, again["id"])["in_progress"]:
            time.sleep(0.2)
        quiet = time.monotonic() - began
        embedded = (_embedded_tokens(http) - measured) // 2
    print(f"| {documents} PDFs of {pages} pages of {words} words, {embedded:,} tokens | |")
    print("|---|---|")
    print(f"| the model alone, two clients: tokens/s | {of_model:,.0f} |")
    for name, seconds in (("nothing beside it", quiet), ("one client beside it", took)):
        rate, tokens = documents * pages / seconds, embedded / seconds
        print(f"| {name}: pages/s | {rate:.1f} |")
        print(f"| {name}: tokens/s | {tokens:,.0f} ({tokens / of_model:.0%}) |")
    quantiles = [statistics.quantiles(times, n=100) for times in (alone, beside)]
    for name, q in zip(("alone", "beside the indexing"), quantiles, strict=True):
        print(f"| first token {name}: p50 / p99 ms | {q[49]:.0f} / {q[98]:.0f} |")
    print(f"| p99 beside / alone | {quantiles[1][98] / quantiles[0][98]:.2f} |")


def _tokens_a_second(http: httpx.Client) -> tuple[int, float]:
    """Embed texts as long as chunks for two clients; return how many tokens, and the rate."""
    text = " ".join(random.Random(4).choices(_WORDS, k=400))[:3_200]

    def embed(number: int) -> int:
        body = {"model": "demo-embedding", "input": [f"{number}{n} {text}" for n in range(8)]}
        answer = http.post("/embeddings", json=body).json()
        return int(answer["usage"]["prompt_tokens"])

    with ThreadPoolExecutor(2) as clients:
        began = time.monotonic()
        tokens = sum(clients.map(embed, range(6)))
        return tokens, tokens / (time.monotonic() - began)


def _embedded_tokens(http: httpx.Client) -> int:
    """Return the tokens that were embedded so far, once they are accounted."""
    time.sleep(5)
    usage = http.get("/usage", params={"group_by": "model"}).json()
    groups = [group for bucket in usage["data"] for group in bucket["results"]]
    return sum(g["input_tokens"] for g in groups if g["model"] == "demo-embedding")


def _client(endpoint: Endpoint) -> httpx.Client:
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    return httpx.Client(base_url=endpoint.url, headers=headers, timeout=120)


def _counts(http: httpx.Client, store_id: str) -> dict[str, int]:
    counts: dict[str, int] = http.get(f"/vector_stores/{store_id}").json()["file_counts"]
    return counts


def main() -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser("benchmarks.vector_stores", description=__doc__)
    parser.add_argument("what", choices=("search", "index"))
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--words", type=int, default=400, help="on a page")
    parser.add_argument("--pause-s", type=float, default=0, help="between a client's chats")
    parser.add_argument("--overlap", type=int, default=400, help="tokens that chunks share")
    options = parser.parse_args()
    if options.what == "search":
        measure_search(options.chunks, options.questions)
    else:
        measure_indexing(options)


if __name__ == "__main__":
    main()
