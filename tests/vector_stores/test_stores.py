"""Vector stores through the official client: files, batches, states, search, filters, tenants."""

from __future__ import annotations

import io
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psycopg
import pytest
from django.db import connection

from inference_site.core.storage.postgresql import unpooled_connection
from inference_site.vector_stores.search import require_pgvector
from tests.e2e.keys import make_key
from tests.faults.freezing import frozen
from tests.vector_stores.conftest import FJORDS, INVOICES, TEA, ReadingSite
from tests.waiting import WAITING_FOR_LOCKS, wait_for_a_wait, wait_until


def found(site: ReadingSite, store: Any, query: Any, **options: Any) -> list[Any]:
    return site.client.vector_stores.search(store.id, query=query, **options).data


def test_files_are_indexed_and_found_by_meaning_and_words(site: ReadingSite) -> None:
    store = site.store(fjords_txt=FJORDS, tea_md=f"# Tea\n\n{TEA}", bills_txt=INVOICES)
    assert store.status == "completed"
    assert (store.file_counts.completed, store.file_counts.total) == (3, 3)
    assert store.usage_bytes > 3 * 192 * 4
    best = found(site, store, "QX-77")[0]
    assert best.filename == "bills.txt"
    assert best.content[0].text == INVOICES
    assert 0 < best.score <= 1
    assert {one.filename for one in found(site, store, "how long is the fjord?")} == {
        "fjords.txt",
        "tea.md",
        "bills.txt",
    }
    assert len(found(site, store, "fjord", max_num_results=1)) == 1
    page: Any = site.client.vector_stores.search(store.id, query=["fjord", "green tea"])
    assert page.search_query == ["fjord", "green tea"]


def test_chunks_of_an_earlier_model_with_other_dimensions_are_found_by_words(
    site: ReadingSite,
) -> None:
    """An operator may put another embedding model behind the name of the store's."""
    store = site.store(fjords_txt=FJORDS, tea_txt=TEA)
    site.stack.sql(
        "UPDATE vector_stores_chunk SET embedding = '{1,2,3}', dimensions = 3 WHERE text = %s "
        "AND store_id = (SELECT id FROM vector_stores_vectorstore WHERE public_id = %s) "
        "RETURNING id",
        TEA,
        store.id,
    )
    best = found(site, store, "Celsius")
    assert {one.filename for one in best} == {"fjords.txt", "tea.txt"}
    by_meaning = found(site, store, "Celsius", ranking_options={"ranker": "none"})
    assert [one.filename for one in by_meaning] == ["fjords.txt"]


def test_a_question_that_is_too_long_is_named(site: ReadingSite) -> None:
    store = site.store(tea_txt=TEA)
    with pytest.raises(openai.BadRequestError, match="your query resulted in") as caught:
        found(site, store, "tea " * 3000)
    assert (caught.value.param, caught.value.code) == ("query", "context_length_exceeded")


def test_ranking_options_choose_the_ranking_and_the_threshold(site: ReadingSite) -> None:
    store = site.store(fjords_txt=FJORDS, tea_txt=TEA)
    by_meaning = found(site, store, FJORDS, ranking_options={"ranker": "none"})
    assert by_meaning[0].filename == "fjords.txt"
    assert by_meaning[0].score == pytest.approx(1, abs=1e-3)
    assert by_meaning[1].score < by_meaning[0].score
    strict = {"ranker": "none", "score_threshold": 0.999}
    assert [one.filename for one in found(site, store, FJORDS, ranking_options=strict)] == [
        "fjords.txt"
    ]
    words: Any = {"hybrid_search": {"embedding_weight": 0, "text_weight": 1}}
    assert next(one.filename for one in found(site, store, "brewed", ranking_options=words)) == (
        "tea.txt"
    )
    only_meaning: Any = {"ranker": "none", **words}
    assert len(found(site, store, "brewed", ranking_options=only_meaning)) == 2
    nothing: Any = {"hybrid_search": {"embedding_weight": 0, "text_weight": 0}}
    with pytest.raises(openai.BadRequestError) as refused:
        found(site, store, "x", ranking_options=nothing)
    assert refused.value.param == "ranking_options.hybrid_search"


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"type": "eq", "key": "year", "value": 2024}, {"a.txt"}),
        ({"type": "ne", "key": "year", "value": 2024}, {"b.txt", "c.txt"}),
        ({"type": "gte", "key": "year", "value": 2024.5}, {"b.txt"}),
        ({"type": "lt", "key": "team", "value": "b"}, {"a.txt"}),
        ({"type": "in", "key": "team", "value": ["b", "x"]}, {"b.txt"}),
        ({"type": "nin", "key": "team", "value": ["b", "x"]}, {"a.txt", "c.txt"}),
        ({"type": "eq", "key": "draft", "value": True}, {"c.txt"}),
        (
            {"type": "or", "filters": [
                {"type": "eq", "key": "draft", "value": True},
                {"type": "and", "filters": [{"type": "gt", "key": "year", "value": 2000},
                                            {"type": "eq", "key": "team", "value": "a"}]},
            ]},
            {"a.txt", "c.txt"},
        ),
        ({"type": "and", "filters": []}, {"a.txt", "b.txt", "c.txt"}),
        ({"type": "or", "filters": []}, set()),
        ({"type": "eq", "key": "x' OR TRUE --", "value": "'; DROP TABLE x; --"}, set()),
    ],
)  # fmt: skip
def test_filters_let_through_files_by_their_attributes(
    site: ReadingSite, filters: Any, names: set[str]
) -> None:
    store = attributed(site)
    assert {one.filename for one in found(site, store, "text", filters=filters)} == names


_attributed: dict[int, Any] = {}


def attributed(site: ReadingSite) -> Any:
    """A store whose files have attributes; made once."""
    if id(site) not in _attributed:
        store = site.client.vector_stores.create()
        files: Any = {
            "a.txt": {"year": 2024, "team": "a"},
            "b.txt": {"year": 2025, "team": "b"},
            "c.txt": {"draft": True},
        }
        site.client.vector_stores.file_batches.create_and_poll(
            store.id,
            files=[
                {"file_id": site.file(name, f"The text of {name}"), "attributes": attributes}
                for name, attributes in files.items()
            ],
            poll_interval_ms=100,
        )  # fmt: skip
        _attributed[id(site)] = store
    return _attributed[id(site)]


def test_attributes_can_be_replaced(site: ReadingSite) -> None:
    store = site.store(a_txt=TEA)
    [entry] = site.client.vector_stores.files.list(store.id).data
    changed = site.client.vector_stores.files.update(
        entry.id, vector_store_id=store.id, attributes={"kind": "drink\0"}
    )
    assert changed.attributes == {"kind": "drink\ufffd"}
    drinks = {"type": "eq", "key": "kind", "value": "drink\ufffd"}
    assert [one.file_id for one in found(site, store, "tea", filters=drinks)] == [entry.id]


def test_long_file_has_overlapping_chunks_that_can_be_read(site: ReadingSite) -> None:
    sentences = [f"Sentence {number} speaks of number {number * 7}." for number in range(400)]
    file_id = site.file("long.txt", " ".join(sentences))
    store = site.client.vector_stores.create()
    strategy: Any = {
        "type": "static",
        "static": {"max_chunk_size_tokens": 200, "chunk_overlap_tokens": 50},
    }
    entry = site.client.vector_stores.files.create_and_poll(
        file_id, vector_store_id=store.id, chunking_strategy=strategy, poll_interval_ms=100
    )
    assert entry.status == "completed"
    assert entry.to_dict()["chunking_strategy"] == strategy
    texts = [
        part.text or "" for part in site.client.vector_stores.files.content(
            file_id, vector_store_id=store.id
        ).data
    ]  # fmt: skip
    assert len(texts) > 15
    assert all(len(text) <= 800 for text in texts)
    assert texts[0].startswith("Sentence 0 ")
    assert texts[-1].endswith("2793.")
    repeated = [s for s in sentences if sum(s in text for text in texts) > 1]
    assert len(repeated) > 50
    words: Any = {"hybrid_search": {"embedding_weight": 0, "text_weight": 1}}
    [best, *_] = found(site, store, "Sentence 399 speaks of number 2793", ranking_options=words)
    assert "2793" in best.content[0].text


_EMBEDDINGS = """SELECT status, count(*) FROM generations_generation
WHERE kind = 'vector_store.embedding' AND api_key_id = %s GROUP BY status"""


def test_one_too_long_for_the_model_is_embedded_in_parts(site: ReadingSite) -> None:
    """The model refuses a text of each length once: refusals are failed requests of the model."""
    key = make_key(site.stack)
    own = replace(site, client=site.stack.client(key.secret))
    # Emoji have more tokens than a quarter of their characters: the model refuses fewer than 200.
    file_id = own.file("faces.txt", "😀😃😄😁" * 1_000)
    store = own.client.vector_stores.create()
    entry = own.client.vector_stores.files.create_and_poll(
        file_id, vector_store_id=store.id, poll_interval_ms=100
    )
    assert entry.status == "completed", entry.last_error
    counts = dict(site.stack.sql(_EMBEDDINGS, key.id))
    assert 0 < counts["failed"] <= 12 < counts["completed"]


def test_what_cannot_be_read_fails_with_a_reason(site: ReadingSite) -> None:
    store = site.store(
        noise_bin=b"\x00\x01\x02\xff" * 100, fake_pdf=b"%PDF-1.7 no", empty_txt=b" \n",
        fake_docx=b"PK\x03\x04 no archive", good_txt=TEA,
    )  # fmt: skip
    assert store.file_counts.failed == 4
    assert store.file_counts.completed == 1
    entries = site.client.vector_stores.files.list(store.id, filter="failed").data
    errors = {entry.last_error.code for entry in entries if entry.last_error}
    assert errors == {"unsupported_file"}
    messages = sorted(entry.last_error.message for entry in entries if entry.last_error)
    assert messages == [
        "The file has no text.",
        "The file is neither text nor a PDF, DOCX or HTML file.",
        "This is not a DOCX that can be read.",
        "This is not a PDF that can be read.",
    ]


def test_deleted_file_is_found_no_more(site: ReadingSite) -> None:
    store = site.store(fjords_txt=FJORDS, tea_txt=TEA, bills_txt=INVOICES)
    by_name = {one.filename: one.file_id for one in found(site, store, "text")}
    site.client.vector_stores.files.delete(by_name["tea.txt"], vector_store_id=store.id)
    site.client.files.delete(by_name["bills.txt"])
    assert [one.filename for one in found(site, store, "tea invoice fjord")] == ["fjords.txt"]
    assert site.client.vector_stores.retrieve(store.id).file_counts.total == 1
    assert site.client.files.retrieve(by_name["tea.txt"]).status == "processed"
    with pytest.raises(openai.NotFoundError):
        site.client.vector_stores.files.retrieve(by_name["tea.txt"], vector_store_id=store.id)


def test_file_that_is_in_the_store_already_stays(site: ReadingSite) -> None:
    store = site.store(tea_txt=TEA)
    [entry] = site.client.vector_stores.files.list(store.id).data
    again = site.client.vector_stores.files.create(store.id, file_id=entry.id)
    assert (again.id, again.status) == (entry.id, "completed")
    assert site.client.vector_stores.retrieve(store.id).file_counts.total == 1


def test_store_is_changed_listed_expires_and_is_deleted(site: ReadingSite) -> None:
    client = site.client
    client.vector_stores.create(name="older")
    store = client.vector_stores.create(
        name="shelf", metadata={"a": "b"}, expires_after={"anchor": "last_active_at", "days": 7}
    )
    assert store.expires_at == store.last_active_at + 7 * 86_400  # type: ignore[operator]
    changed = client.vector_stores.update(store.id, name="rack", expires_after=None)
    assert (changed.name, changed.metadata, changed.expires_at) == ("rack", {"a": "b"}, None)
    listed = client.vector_stores.list(limit=1)
    assert [one.id for one in listed.data] == [store.id]
    assert listed.has_more
    assert client.vector_stores.delete(store.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.retrieve(store.id)
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.search(store.id, query="x")


def test_a_file_that_has_expired_is_in_no_list(site: ReadingSite) -> None:
    """It was listed, while the request for it was a 404, until it was deleted."""
    files = site.client.vector_stores.files
    ids = [site.file(f"{number}.txt", TEA) for number in range(2)]
    store = site.client.vector_stores.create(name="old")
    batch = site.client.vector_stores.file_batches.create(store.id, file_ids=ids)
    site.stack.sql("UPDATE files_storedfile SET expires_at = now() WHERE public_id = %s", ids[0])
    with pytest.raises(openai.NotFoundError):
        files.retrieve(ids[0], vector_store_id=store.id)
    assert [one.id for one in files.list(store.id)] == ids[1:]
    of_batch = site.client.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id)
    assert [one.id for one in of_batch] == ids[1:]


def test_lists_are_paged_in_both_directions(site: ReadingSite) -> None:
    client = site.stack.client(make_key(site.stack, "inference").secret)
    stores = [client.vector_stores.create(name=str(number)).id for number in range(5)]
    newest = stores[::-1]
    assert [one.id for one in client.vector_stores.list(limit=2)] == newest
    page = client.vector_stores.list(before=newest[4], limit=2)
    assert ([one.id for one in page.data], page.has_more) == (newest[2:4], True)
    page = client.vector_stores.list(before=newest[2], limit=2)
    assert ([one.id for one in page.data], page.has_more) == (newest[:2], False)
    page = client.vector_stores.list(before=stores[1], limit=5, order="asc")
    assert ([one.id for one in page.data], page.has_more) == (stores[:1], False)
    assert client.vector_stores.list(before=newest[0]).data == []
    files = [
        client.files.create(file=(f"{number}.txt", TEA.encode()), purpose="assistants").id
        for number in range(3)
    ]
    batch = client.vector_stores.file_batches.create(stores[0], file_ids=files)
    for entries in (
        client.vector_stores.files.list(stores[0], before=files[0], limit=1),
        client.vector_stores.file_batches.list_files(
            batch.id, vector_store_id=stores[0], before=files[0], limit=1
        ),
    ):
        assert ([one.id for one in entries.data], entries.has_more) == ([files[1]], True)
    for call in (
        lambda: client.vector_stores.list(before="vs_none"),
        lambda: client.vector_stores.files.list(stores[0], before="file-none"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            call()
        assert refused.value.param == "before"


def test_changes_at_the_same_moment_keep_each_other(site: ReadingSite) -> None:
    store = site.client.vector_stores.create(name="0", metadata={"n": "0"})
    with ThreadPoolExecutor(2) as threads:
        for number in map(str, range(1, 31)):
            renamed = threads.submit(site.client.vector_stores.update, store.id, name=number)
            tagged = threads.submit(
                site.client.vector_stores.update, store.id, metadata={"n": number}
            )
            assert (renamed.result().name, tagged.result().metadata) == (number, {"n": number})
            kept = site.client.vector_stores.retrieve(store.id)
            assert (kept.name, kept.metadata) == (number, {"n": number})


def test_what_is_deleted_at_the_same_moment_is_not_found(site: ReadingSite) -> None:
    """A file, and its place in a store, while it is added and its attributes are replaced."""
    requests: list[tuple[str, str, Any]]
    with ThreadPoolExecutor(4) as threads:
        for number in range(20):
            store, file = site.client.vector_stores.create(), site.file(f"{number}.txt", TEA)
            path = f"/v1/vector_stores/{store.id}/files"
            if number % 2:
                assert post(site, path, {"file_id": file}).status_code == 200
                requests = [
                    ("POST", f"{path}/{file}", {"attributes": {"kind": "drink"}}),
                    ("DELETE", f"{path}/{file}", None),
                ]
            else:
                requests = [
                    ("POST", f"/v1/vector_stores/{store.id}/file_batches", {"file_ids": [file]}),
                    ("DELETE", f"/v1/files/{file}", None),
                ]
            sent = [threads.submit(ask, site, *request) for request in [*requests, requests[0]]]
            statuses = [answer.result().status_code for answer in sent]
            assert set(statuses) <= {200, 400, 404}, (requests, statuses)
            assert statuses[1] == 200


def test_files_are_added_again_while_a_worker_adds_their_chunks(site: ReadingSite) -> None:
    """Each waited for a row of the other, until PostgreSQL ended one of the two."""
    store, file = site.client.vector_stores.create(), site.file("tea.txt", TEA)
    batches = site.client.vector_stores.file_batches
    batches.create_and_poll(store.id, file_ids=[file], poll_interval_ms=100)
    entry = (
        "FROM vector_stores_vectorstorefile entry JOIN vector_stores_vectorstore store "
        "ON store.id = entry.store_id WHERE store.public_id = %s"
    )
    with ThreadPoolExecutor(1) as threads:
        with psycopg.connect(site.stack.services["DATABASE_URL"]) as worker:
            worker.execute(f"SELECT {entry} FOR UPDATE OF entry", [store.id])
            added = threads.submit(batches.create, store.id, file_ids=[file])
            wait_until(lambda: site.stack.sql(WAITING_FOR_LOCKS) != [(0,)])
            worker.execute(
                "INSERT INTO vector_stores_chunk "
                "(store_id, file_id, position, text, words, embedding, dimensions) "
                f"SELECT store.id, entry.id, 9, '', '', '{{1}}', 1 {entry}",
                [store.id],
            )
        assert added.result().file_counts.total == 1


@pytest.mark.parametrize("change", ["add a file", "rename"])
def test_a_store_that_is_deleted_at_the_same_moment_is_not_changed(
    site: ReadingSite, change: str
) -> None:
    """A file was embedded for a store that nobody can search, and a request could be a 500."""
    stores = site.client.vector_stores
    store, file = stores.create(), site.file("tea.txt", TEA)
    of_store = "FROM vector_stores_vectorstore WHERE public_id = %s"
    deletions = (
        "UPDATE vector_stores_vectorstore SET is_deleted = true WHERE public_id = %s",
        f"DELETE {of_store}",
    )
    for deletion in deletions:
        with ThreadPoolExecutor(1) as threads:
            with psycopg.connect(site.stack.services["DATABASE_URL"]) as other:
                other.execute(f"SELECT {of_store} FOR UPDATE", [store.id])
                if change == "rename":
                    changed: Any = threads.submit(stores.update, store.id, name="rack")
                else:
                    changed = threads.submit(stores.files.create, store.id, file_id=file)
                wait_until(lambda: site.stack.sql(WAITING_FOR_LOCKS) != [(0,)])
                other.execute(deletion, [store.id])
            with pytest.raises(openai.NotFoundError, match="No such vector store"):
                changed.result()
        store = stores.create()


def test_batch_whose_files_are_taken_out_has_not_failed(site: ReadingSite) -> None:
    store, file = site.client.vector_stores.create(), site.file("tea.txt", TEA)
    batches = site.client.vector_stores.file_batches
    batch = batches.create_and_poll(store.id, file_ids=[file], poll_interval_ms=100)
    site.client.vector_stores.files.delete(file, vector_store_id=store.id)
    left = batches.retrieve(batch.id, vector_store_id=store.id)
    assert (batch.status, left.status, left.file_counts.total) == ("completed", "completed", 0)


def test_batch_is_cancelled(site: ReadingSite) -> None:
    store = site.client.vector_stores.create()
    ids = [site.file(f"{number}.txt", FJORDS * 50) for number in range(30)]
    batches = site.client.vector_stores.file_batches
    batch = batches.create(store.id, file_ids=ids)
    assert batch.file_counts.total == 30
    cancelled = batches.cancel(batch.id, vector_store_id=store.id)
    assert cancelled.status == "cancelled"
    assert cancelled.file_counts.in_progress == 0
    assert cancelled.file_counts.cancelled > 0
    files = batches.list_files(batch.id, vector_store_id=store.id, filter="cancelled", limit=100)
    assert len(files.data) == cancelled.file_counts.cancelled
    again = site.client.vector_stores.files.create_and_poll(
        files.data[0].id, vector_store_id=store.id, poll_interval_ms=100
    )
    assert again.status == "completed"


def test_a_cancelled_file_keeps_none_of_its_chunks(site: ReadingSite) -> None:
    """They counted in no quota, and could be read as the content of the file."""
    store, file = site.client.vector_stores.create(), site.file("tea.txt", TEA)
    batches = site.client.vector_stores.file_batches
    batch = batches.create_and_poll(store.id, file_ids=[file], poll_interval_ms=100)
    site.stack.sql(  # As if a worker had added some of its chunks, and would go on in a while.
        "UPDATE vector_stores_vectorstorefile SET status = 'in_progress', worked_by = '', "
        "worked_until = now() + interval '5 minutes' WHERE batch_id = "
        "(SELECT id FROM vector_stores_filebatch WHERE public_id = %s)",
        batch.id,
    )
    assert batches.cancel(batch.id, vector_store_id=store.id).file_counts.cancelled == 1
    assert site.client.vector_stores.files.content(file, vector_store_id=store.id).data == []


def test_other_projects_see_none_of_it(site: ReadingSite) -> None:
    store = site.store(tea_txt=TEA)
    [entry] = site.client.vector_stores.files.list(store.id).data
    other = site.stack.client(make_key(site.stack, "inference").secret)
    for call in (
        lambda: other.vector_stores.retrieve(store.id),
        lambda: other.vector_stores.search(store.id, query="tea"),
        lambda: other.vector_stores.files.list(store.id),
        lambda: other.vector_stores.delete(store.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert other.vector_stores.list().data == []
    mine = other.vector_stores.create()
    with pytest.raises(openai.BadRequestError) as refused:
        other.vector_stores.files.create(mine.id, file_id=entry.id)
    assert refused.value.param == "file_id"


def test_an_unknown_filter_is_refused_with_all_that_are_known(site: ReadingSite) -> None:
    store = site.client.vector_stores.create()
    known = "values are: 'eq', 'ne', 'gt', 'gte', 'lt', 'lte', 'in', 'nin', 'and', and 'or'."
    near: Any
    for near in ({"type": "near", "filters": []}, {"type": "near", "key": "k", "value": 1}):
        with pytest.raises(openai.BadRequestError, match=known) as caught:
            found(site, store, "x", filters=near)
        assert caught.value.param == "filters.type"


def test_invalid_requests_name_their_field(site: ReadingSite) -> None:
    store = site.client.vector_stores.create()
    deep: Any = {"type": "eq", "key": "k", "value": 1}
    for _ in range(40):
        deep = {"type": "and", "filters": [deep]}
    wide: Any = {"type": "or", "filters": [
        {"type": "and", "filters": [{"type": "eq", "key": "k", "value": n} for n in range(60)]}
        for _ in range(2)
    ]}  # fmt: skip
    for body, param in (
        ({"query": ""}, "query"),
        ({"query": "x", "max_num_results": 51}, "max_num_results"),
        ({"query": "x", "filters": {"type": "in", "key": "k", "value": 1}}, "filters"),
        ({"query": "x", "filters": {"type": "near", "key": "k", "value": 1}}, "filters.type"),
        ({"query": "x", "filters": wide}, "filters"),
        ({"query": "x", "filters": {"type": "eq", "key": "k", "value": "\0"}}, "filters.value"),
        (
            {"query": "x", "filters": {"type": "in", "key": "k", "value": ["a", "\0"]}},
            "filters.value[1]",
        ),
    ):
        answer = post(site, f"/v1/vector_stores/{store.id}/search", body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["param"].startswith(param), answer.text
    assert post(site, f"/v1/vector_stores/{store.id}/search",
                {"query": "x", "filters": deep}).status_code in (200, 400)  # fmt: skip
    for body, param in (
        ({"file_ids": ["file-none"]}, "file_ids[0]"),
        ({"embedding_model": "no-such"}, "embedding_model"),
        ({"embedding_model": "demo"}, "embedding_model"),
        ({"expires_after": {"anchor": "last_active_at", "days": 0}}, "expires_after.days"),
        (
            {"chunking_strategy": {"type": "static", "static": {
                "max_chunk_size_tokens": 200, "chunk_overlap_tokens": 150}}},
            "chunking_strategy.static",
        ),
    ):  # fmt: skip
        answer = post(site, "/v1/vector_stores", body)
        assert answer.status_code in (400, 404), body
        assert answer.json()["error"]["param"].startswith(param), answer.text
    large = site.file("large.txt", "x" * 2_000_001)
    with pytest.raises(openai.BadRequestError, match="2000000 bytes"):
        site.client.vector_stores.files.create(store.id, file_id=large)


def post(site: ReadingSite, path: str, body: Any) -> httpx.Response:
    return ask(site, "POST", path, body)


def ask(site: ReadingSite, method: str, path: str, body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {site.client.api_key}"}
    url = f"{site.stack.url}{path}"
    return httpx.request(method, url, json=body, headers=headers, timeout=60)


def test_usage_has_what_was_embedded(site: ReadingSite) -> None:
    client = site.stack.client(make_key(site.stack, "inference", "usage:read").secret)
    upload = ("a.txt", io.BytesIO(FJORDS.encode()))
    file = client.files.create(file=upload, purpose="assistants")
    store = client.vector_stores.create(file_ids=[file.id])
    deadline = time.monotonic() + 30
    while client.vector_stores.retrieve(store.id).status != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    client.vector_stores.search(store.id, query="fjord")
    deadline = time.monotonic() + 30
    while not (counted := counted_tokens(client)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert counted > 30


def counted_tokens(client: openai.OpenAI) -> int:
    """The input tokens of the embedding model in the usage of the key's project."""
    usage: Any = client.get("/usage?group_by=model", cast_to=object)
    groups = [group for bucket in usage["data"] for group in bucket["results"]]
    return sum(g["input_tokens"] for g in groups if g["model"] == "demo-embedding")


def test_a_store_moves_to_another_project_and_is_indexed_there(
    site: ReadingSite, tmp_path: Path
) -> None:
    stack = site.stack
    here, there = make_key(stack), make_key(stack)
    client, other = stack.client(here.secret), stack.client(there.secret)
    store = client.vector_stores.create(
        name="library",
        metadata={"shelf": "2"},
        expires_after={"anchor": "last_active_at", "days": 9},
    )
    strategy: Any = {
        "type": "static",
        "static": {"max_chunk_size_tokens": 200, "chunk_overlap_tokens": 20},
    }
    ids = []
    for name, text in (("fjords.txt", FJORDS.encode()), ("scan.pdf", b"%PDF-1.4 not really")):
        file = client.files.create(file=(name, io.BytesIO(text)), purpose="assistants")
        client.vector_stores.files.create_and_poll(
            file_id=file.id,
            vector_store_id=store.id,
            attributes={"year": 2024, "team": "a"},
            chunking_strategy=strategy,
            poll_interval_ms=100,
        )
        ids.append(file.id)
    before = [client.vector_stores.files.retrieve(one, vector_store_id=store.id) for one in ids]
    assert [one.status for one in before] == ["completed", "failed"]
    gone = client.vector_stores.create(name="deleted")
    client.vector_stores.delete(gone.id)
    names = {
        key.project_id: stack.sql("SELECT name FROM accounts_project WHERE id = %s", key.project_id)
        for key in (here, there)
    }
    folder = str(tmp_path / "export")
    report = stack.manage("export_project", names[here.project_id][0][0], folder)
    assert "1 × vector_store\n2 × vector_store_file\n" in report
    mine = "(SELECT id FROM vector_stores_vectorstore WHERE project_id = %s)"
    for table, column in (
        ("chunk", "store_id"),
        ("vectorstorefile", "store_id"),
        ("vectorstore", "id"),
    ):
        statement = f"DELETE FROM vector_stores_{table} WHERE {column} IN {mine}"  # noqa: S608
        stack.sql(statement, here.project_id)
    stack.sql("DELETE FROM files_storedfile WHERE project_id = %s", here.project_id)

    move = ("import_project", names[there.project_id][0][0], folder)
    assert "1 × vector_store\n2 × vector_store_file\n" in stack.manage(*move)
    assert "0 × vector_store_file, 2 known already" in stack.manage(*move)

    def files() -> list[Any]:
        return [other.vector_stores.files.retrieve(one, vector_store_id=store.id) for one in ids]

    wait_until(lambda: files()[0].status == "completed", timeout_s=60)
    assert [one.to_dict() for one in files()] == [one.to_dict() for one in before]
    moved = other.vector_stores.retrieve(store.id)
    assert (moved.name, moved.metadata) == ("library", {"shelf": "2"})
    assert moved.expires_after is not None
    assert moved.expires_after.days == 9
    [hit] = other.vector_stores.search(
        store.id, query="fjord", filters={"type": "eq", "key": "year", "value": 2024}
    )
    assert hit.content[0].text == FJORDS
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.retrieve(store.id)
    # A store that was deleted there is not filled again, as long as beat has not erased its row.
    with frozen(stack.pid_of("beat")):
        other.vector_stores.delete(store.id)
        assert "0 × vector_store, 1 known already" in stack.manage(*move)
        with pytest.raises(openai.NotFoundError):
            other.vector_stores.retrieve(store.id)


@pytest.mark.django_db(transaction=True)
def test_the_first_two_stores_may_come_at_the_same_moment() -> None:
    def second() -> None:
        try:
            require_pgvector()
        finally:
            connection.close()

    with connection.cursor() as cursor:
        cursor.execute("DROP EXTENSION IF EXISTS vector CASCADE")
    with ThreadPoolExecutor(1) as pool, unpooled_connection() as first:
        first.execute("CREATE EXTENSION vector")
        waiting = pool.submit(second)
        wait_for_a_wait()
        first.commit()
        waiting.result(60)
