"""Hostile documents, a worker that dies, and one project's mass of files beside another's one."""

from __future__ import annotations

import io
import json
import os
import signal
import zipfile
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone
from docx import Document

from inference_site.accounts.models import Project
from inference_site.core.transfer import VERSION, ExportEnd, ExportStart, Refused
from inference_site.files.models import StoredFile
from inference_site.vector_stores import transfer
from inference_site.vector_stores.models import VectorStore, VectorStoreFile
from tests.e2e.keys import make_key
from tests.vector_stores.conftest import FJORDS, TEA, ReadingSite
from tests.waiting import wait_until


def added(client: openai.OpenAI, store_id: str, name: str, content: bytes) -> str:
    """Add a file to a store; return its id."""
    file = client.files.create(file=(name, io.BytesIO(content)), purpose="assistants")
    client.vector_stores.files.create(store_id, file_id=file.id)
    return file.id


def ended(client: openai.OpenAI, store_id: str, file_id: str, timeout_s: float = 90) -> Any:
    """The file in the store, once its indexing has ended."""

    def state() -> Any:
        return client.vector_stores.files.retrieve(file_id, vector_store_id=store_id)

    wait_until(lambda: state().status != "in_progress", timeout_s)
    return state()


def docx(*paragraphs: str) -> bytes:
    document = Document()
    for text in paragraphs:
        document.add_paragraph(text)
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "Depth", "1,308 m"
    written = io.BytesIO()
    document.save(written)
    return written.getvalue()


def zip_bomb() -> bytes:
    """A DOCX whose text unpacks to 400 MB."""
    whole = io.BytesIO(docx("x"))
    bomb = io.BytesIO()
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as to:
        for part in source.infolist():
            content = source.read(part)
            if part.filename == "word/document.xml":
                content = content.replace(b">x<", b">" + b"x" * 210_000_000 + b"<")
            to.writestr(part, content)
    return bomb.getvalue()


def pdf(pages: int) -> bytes:
    """A PDF with empty pages."""
    kids = " ".join(f"{n + 3} 0 R" for n in range(pages))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>",
               f"<< /Type /Pages /Count {pages} /Kids [{kids}] >>"]  # fmt: skip
    objects += ["<< /Type /Page /Parent 2 0 R /MediaBox [0 0 10 10] >>"] * pages
    whole, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(whole))
        whole += f"{number} 0 obj\n{one}\nendobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    end += f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(whole)}\n%%EOF"
    return whole + end.encode()


def test_docx_and_html_are_read(site: ReadingSite) -> None:
    store = site.client.vector_stores.create()
    for name, content in (
        ("a.docx", docx("The fjord is deep.")),
        ("a.html", b"<!doctype html><title>T</title><p>The <b>fjord</b> is deep.</p>"),
        ("latin.txt", "Der Fjord ist tief, größer als die Städte.".encode("latin-1")),
    ):
        file_id = added(site.client, store.id, name, content)
        assert ended(site.client, store.id, file_id).status == "completed"
        page = site.client.vector_stores.files.content(file_id, vector_store_id=store.id)
        text = page.data[0].text or ""
        assert "jord is" in text, text
    read = site.client.vector_stores.search(store.id, query="1,308").data
    assert any("Depth\t1,308 m" in one.content[0].text for one in read)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bomb.docx", zip_bomb, "bytes unpacked"),
        ("long.pdf", lambda: pdf(5_000), "The PDF has 5000 pages; at most 2000 are read."),
        ("empty.pdf", lambda: pdf(3), "has no text"),
        ("lie.pdf", lambda: b"MZ\x00\x90" * 1000, "neither text nor"),
        ("lie.docx", lambda: pdf(2), "has no text"),
    ],
)
def test_hostile_document_fails_with_a_reason(
    site: ReadingSite, name: str, content: Any, message: str
) -> None:
    store = site.client.vector_stores.create()
    entry = ended(site.client, store.id, added(site.client, store.id, name, content()))
    assert (entry.status, entry.last_error.code) == ("failed", "unsupported_file")
    assert message in entry.last_error.message


def test_many_comments_do_not_stop_the_worker(site: ReadingSite) -> None:
    store = site.client.vector_stores.create()
    for name, content in (("a.txt", b"<!---->" * 580), ("b.txt", b" <!-- --> " * 400 + b"<html>")):
        entry = ended(site.client, store.id, added(site.client, store.id, name, content))
        assert entry.status in ("completed", "failed")


def test_one_file_does_not_wait_for_those_of_another_project(site: ReadingSite) -> None:
    crowd = site.stack.client(make_key(site.stack, "inference").secret)
    store = crowd.vector_stores.create()
    uploads = [(f"{number}.txt", io.BytesIO((FJORDS * 40).encode())) for number in range(60)]
    ids = [crowd.files.create(file=one, purpose="assistants").id for one in uploads]
    crowd.vector_stores.file_batches.create(store.id, file_ids=ids)
    mine = site.client.vector_stores.create()
    entry = ended(site.client, mine.id, added(site.client, mine.id, "tea.txt", TEA.encode()))
    assert entry.status == "completed"
    assert crowd.vector_stores.retrieve(store.id).file_counts.in_progress > 20


def test_worker_that_dies_leaves_its_files_to_the_next(site: ReadingSite) -> None:
    store = site.client.vector_stores.create()
    ids = [added(site.client, store.id, f"{n}.txt", (FJORDS * 100).encode()) for n in range(6)]
    wait_until(
        lambda: site.stack.sql("SELECT count(*) FROM vector_stores_chunk WHERE store_id ="
                               " (SELECT id FROM vector_stores_vectorstore WHERE public_id = %s)",
                               store.id)[0][0] > 0,
        60,
    )  # fmt: skip
    os.kill(worker_of(site).pid, signal.SIGKILL)
    for file_id in ids:
        assert ended(site.client, store.id, file_id, 150).status == "completed"
    [[chunks]] = site.stack.sql(
        "SELECT count(*) FROM vector_stores_chunk chunk"
        " JOIN vector_stores_vectorstore store ON store.id = chunk.store_id"
        " WHERE store.public_id = %s",
        store.id,
    )
    [[counted]] = site.stack.sql(
        "SELECT sum(chunk_count) FROM vector_stores_vectorstorefile entry"
        " JOIN vector_stores_vectorstore store ON store.id = entry.store_id"
        " WHERE store.public_id = %s",
        store.id,
    )
    assert chunks == counted


def worker_of(site: ReadingSite) -> psutil.Process:
    assert site.stack.process is not None
    children = psutil.Process(site.stack.process.pid).children(recursive=True)
    return next(one for one in children if "worker" in one.cmdline()[1:4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store": "vs_of_other"}, "has no vector store vs_of_other"),
        ({"id": "file-of-other"}, "has no file file-of-other"),
        ({"chunk_size": 1}, "max_chunk_size_tokens"),
        ({"chunk_overlap": 700}, "at most half"),
        ({"attributes": {"a": {"b": 1}}}, "'attributes.a"),
        ({"status": "indexed"}, "'status'"),
    ],
)
@pytest.mark.django_db(transaction=True)
def test_a_changed_export_reaches_no_other_project_and_stops_no_worker(
    project: Project, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    other = Project.objects.create(name="other")
    for owner, name in ((project, "mine"), (other, "of_other")):
        StoredFile.objects.create(
            public_id=f"file-{name.replace('_', '-')}",
            project=owner,
            filename="a.txt",
            purpose="assistants",
            size_bytes=3,
        )
        VectorStore.objects.create(
            public_id=f"vs_{name}", project=owner, embedding_model="m", language="simple"
        )
    start = ExportStart(version=VERSION, project="x", exported_at=timezone.now())
    entry = {
        "kind": "vector_store_file",
        "id": "file-mine",
        "store": "vs_mine",
        "attributes": {},
        "chunk_size": 800,
        "chunk_overlap": 400,
        "status": "completed",
        "error_code": "",
        "error_message": "",
        "created_at": "2026-11-27T00:00:00Z",
    }
    end = ExportEnd(counts={"vector_store_file": 1})
    lines = [start.model_dump_json(), json.dumps(entry | changes), end.model_dump_json()]
    (tmp_path / "objects.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(CommandError, match=message):
        call_command("import_project", project.name, tmp_path)
    assert not VectorStoreFile.objects.exists()


def store_line(language: str) -> transfer.VectorStoreLine:
    return transfer.VectorStoreLine(
        id="vs_1",
        name="",
        description="",
        embedding_model="m",
        language=language,
        metadata={},
        expires_after_days=None,
        created_at=timezone.now(),
        last_active_at=timezone.now(),
        expires_at=None,
    )


@pytest.mark.django_db(transaction=True)
def test_a_store_of_an_unknown_language_is_not_imported(project: Project) -> None:
    line = store_line("klingon")
    with pytest.raises(Refused, match="no text search configuration klingon"):
        transfer.import_lines(project.pk, line.kind, [line], Path())
    assert not VectorStore.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_the_first_store_of_a_site_may_be_an_imported_one(project: Project) -> None:
    """Workers cannot index its files before the extension is there."""
    with connection.cursor() as cursor:
        cursor.execute("DROP EXTENSION IF EXISTS vector CASCADE")
        line = store_line("simple")
        assert transfer.import_lines(project.pk, line.kind, [line], Path()) == 1
        cursor.execute("SELECT to_regtype('halfvec')::text")
        assert cursor.fetchone() == ("halfvec",)
