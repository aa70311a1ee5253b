"""Files and uploads, with the official client."""

from __future__ import annotations

import base64
import hashlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psycopg
import pytest

from inference_site.files.models import _QUOTA_LOCK
from tests.e2e.conftest import MAX_FILE_BYTES
from tests.e2e.keys import make_key
from tests.images import encoded
from tests.served_stack import ServedStack
from tests.upstream_server import UpstreamServer
from tests.waiting import WAITING_FOR_LOCKS, wait_until

HOUR = {"anchor": "created_at", "seconds": 3600}
RED = encoded("PNG")


def pdf(*lines: str) -> bytes:
    """A PDF with a page for each line."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    pages = []
    for line in lines:
        text = f"BT /F1 24 Tf 72 700 Td ({line}) Tj ET".encode()
        objects.append(b"<< /Length %d >>\nstream\n%b\nendstream" % (len(text), text))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R /Resources "
            b"<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>"
            % len(objects)
        )
        pages.append(len(objects))
    kids = b" ".join(b"%d 0 R" % page for page in pages)
    objects[1] = b"<< /Type /Pages /Kids [%b] /Count %d >>" % (kids, len(pages))
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    end = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return out + head + table + end % (len(objects) + 1, len(out))


@pytest.fixture
def other(stack: ServedStack) -> openai.OpenAI:
    """The client of another project."""
    return stack.client(make_key(stack).secret)


def refusal(call: Any, *args: Any, **kwargs: Any) -> tuple[int, str | None, str | None]:
    """Status, code and parameter of the error of a call."""
    with pytest.raises(openai.APIStatusError) as caught:
        call(*args, **kwargs)
    error: Any = caught.value
    return error.status_code, error.code, error.param


def test_file_is_kept_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = b"Line one\nLine two\n" * 100_000
    made = client.files.create(file=("a/b/notes.txt", content, "text/plain"), purpose="user_data")
    assert (made.object, made.bytes, made.filename) == ("file", len(content), "notes.txt")
    assert (made.purpose, made.status, made.expires_at) == ("user_data", "processed", None)
    assert client.files.retrieve(made.id) == made
    assert made.id in [file.id for file in client.files.list(purpose="user_data")]
    assert made.id not in [file.id for file in client.files.list(purpose="batch")]
    assert client.files.content(made.id).content == content
    assert client.files.delete(made.id).deleted
    assert refusal(client.files.retrieve, made.id) == (404, None, "id")
    assert refusal(client.files.content, made.id) == (404, None, "id")


def test_pages_of_the_list(client: openai.OpenAI) -> None:
    ids = [client.files.create(file=(f"{n}.txt", b"x"), purpose="assistants").id for n in range(5)]
    newest = [file.id for file in client.files.list(purpose="assistants", limit=2)]
    assert newest[:5] == ids[::-1]
    oldest = [file.id for file in client.files.list(purpose="assistants", limit=3, order="asc")]
    assert oldest[-5:] == ids
    assert refusal(client.files.list, after="file-no") == (400, None, "after")


def test_part_of_a_content(client: openai.OpenAI, http: httpx.Client) -> None:
    id_ = client.files.create(file=('näme "1".bin', bytes(range(256))), purpose="user_data").id
    address = f"/v1/files/{id_}/content"
    for asked, part, shown in (
        ("bytes=0-9", bytes(range(10)), "bytes 0-9/256"),
        ("bytes=250-", bytes(range(250, 256)), "bytes 250-255/256"),
        ("bytes=-4", bytes(range(252, 256)), "bytes 252-255/256"),
        ("bytes=255-99999", b"\xff", "bytes 255-255/256"),
        ("Bytes=0-0", b"\0", "bytes 0-0/256"),
    ):
        answer = http.get(address, headers={"Range": asked})
        assert (answer.status_code, answer.content) == (206, part)
        assert answer.headers["content-range"] == shown
    for asked in ("bytes=9-2", "lines=1-2", "bytes=0-1,4-5", "bytes=-"):
        assert http.get(address, headers={"Range": asked}).status_code == 200
    for known in ('"etag"', "Wed, 21 Oct 2015 07:28:00 GMT"):  # Of a content that it was before.
        answer = http.get(address, headers={"Range": "bytes=4-", "If-Range": known})
        assert (answer.status_code, answer.content) == (200, bytes(range(256)))
    late = http.get(address, headers={"Range": "bytes=256-"})
    assert (late.status_code, late.headers["content-range"]) == (416, "bytes */256")
    assert late.json()["error"]["code"] == "range_not_satisfiable"
    whole = http.get(address)
    assert whole.headers["content-length"] == "256"
    assert whole.headers["content-disposition"].startswith("attachment;")
    assert whole.headers["x-content-type-options"] == "nosniff"


def test_expiry(client: openai.OpenAI) -> None:
    short = client.files.create(file=b"x", purpose="user_data", expires_after=HOUR)  # type: ignore[arg-type]
    assert short.expires_at == short.created_at + 3600
    batch = client.files.create(file=b"{}", purpose="batch")
    assert batch.expires_at == batch.created_at + 30 * 86_400
    for seconds in (3599, 2_592_001, "soon"):
        given: Any = {"anchor": "created_at", "seconds": seconds}
        status, _, param = refusal(
            client.files.create, file=b"x", purpose="user_data", expires_after=given
        )
        assert (status, param) == (400, "expires_after.seconds")


def test_bad_forms(http: httpx.Client) -> None:
    for form, files, param in (
        ({"purpose": "user_data"}, {}, "file"),
        ({}, {"file": b"x"}, "purpose"),
        ({"purpose": "spying"}, {"file": b"x"}, "purpose"),
        ({"purpose": "user_data"}, {"data": b"x"}, "file"),
    ):
        answer = http.post("/v1/files", data=form, files=files or {"other": b"x"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    as_json = http.post("/v1/files", json={"purpose": "user_data"})
    assert (as_json.status_code, "multipart/form-data" in as_json.text) == (415, True)
    broken = http.post(
        "/v1/files", content=b"no form", headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert broken.status_code == 400
    unbounded = http.post(
        "/v1/files", content=b"no form", headers={"content-type": "multipart/form-data"}
    )
    assert (unbounded.status_code, unbounded.json()["error"]["type"]) == (
        400,
        "invalid_request_error",
    )
    for name in ("..", "/"):
        unnamed = http.post(
            "/v1/files", data={"purpose": "user_data"}, files={"file": (name, b"x")}
        )
        assert unnamed.status_code == 400
        assert f"The file name '{name}' is not valid." in unnamed.text
    good = http.build_request("POST", "/v1/files", data={"purpose": "batch"}, files={"file": b"x"})
    kind = good.headers["content-type"].replace("multipart/form-data", "Multipart/Form-Data")
    capital = http.post("/v1/files", content=good.read(), headers={"content-type": kind})
    assert (capital.status_code, capital.json()["bytes"]) == (200, 1)
    odd = {"purpose": "user_data", "odd": "1"}
    named = http.post("/v1/files", data=odd, files={"file": ("a.txt", b"x")})
    assert (named.status_code, named.headers["x-unsupported-params"]) == (200, "odd")


def test_a_type_with_control_characters_makes_no_file_that_cannot_be_read(
    http: httpx.Client,
) -> None:
    announced = {"bytes": 1, "filename": "a", "purpose": "user_data"}
    for type_ in ("text/plain\0", "text/plain\r\nset-cookie: a=b"):
        refused = http.post("/v1/uploads", json={**announced, "mime_type": type_})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mime_type")
    form: Any = {"data": {"purpose": "user_data"}, "files": {"file": ("a", b"x", "text/\0plain")}}
    made = http.post("/v1/files", **form)
    assert made.status_code == 200, made.text
    read = http.get(f"/v1/files/{made.json()['id']}/content")
    assert (read.status_code, read.content, read.headers["content-type"]) == (
        200,
        b"x",
        "text/plain",
    )


def test_other_projects_see_nothing(client: openai.OpenAI, other: openai.OpenAI) -> None:
    id_ = client.files.create(file=b"secret", purpose="user_data").id
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        assert refusal(call, id_) == (404, None, "id")
    assert id_ not in [file.id for file in other.files.list()]
    message: Any = {"type": "file", "file": {"file_id": id_}}
    asked: Any = [{"role": "user", "content": [message]}]
    refused = refusal(other.chat.completions.create, model="demo", messages=asked)
    assert refused == (400, None, "messages[0].content[0].file.file_id")
    upload = client.uploads.create(
        bytes=1, filename="a", mime_type="text/plain", purpose="user_data"
    )
    assert refusal(other.uploads.cancel, upload.id) == (404, None, "upload_id")


def test_uploaded_parts_become_a_file(client: openai.OpenAI) -> None:
    content = bytes(range(256)) * 4096
    upload = client.uploads.create(
        bytes=len(content), filename="big.bin", mime_type="application/x-big", purpose="user_data"
    )
    assert (upload.status, upload.expires_at) == ("pending", upload.created_at + 3600)
    second = client.uploads.parts.create(upload.id, data=content[500_000:])
    first = client.uploads.parts.create(upload.id, data=content[:500_000])
    assert first.upload_id == upload.id
    assert first.id not in [file.id for file in client.files.list()]
    assert refusal(client.files.retrieve, first.id) == (404, None, "id")
    wrong = refusal(client.uploads.complete, upload.id, part_ids=[first.id])
    assert wrong == (400, None, "part_ids")
    parts = [first.id, second.id]
    damaged = refusal(client.uploads.complete, upload.id, part_ids=parts, md5="0" * 32)
    assert damaged == (400, None, "md5")
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    done = client.uploads.complete(upload.id, part_ids=parts, md5=md5)
    assert done.status == "completed"
    assert done.file is not None
    assert done.file.filename == "big.bin"
    assert client.files.content(done.file.id).content == content
    for change in (
        lambda: client.uploads.cancel(upload.id),
        lambda: client.uploads.parts.create(upload.id, data=b"x"),
        lambda: client.uploads.complete(upload.id, part_ids=parts),
    ):
        assert refusal(change) == (400, "invalid_upload_status", "upload_id")


def test_cancelled_upload_takes_no_part(client: openai.OpenAI) -> None:
    upload = client.uploads.create(
        bytes=2, filename="a.txt", mime_type="text/plain", purpose="user_data"
    )
    client.uploads.parts.create(upload.id, data=b"x")
    assert client.uploads.cancel(upload.id).status == "cancelled"
    late = refusal(client.uploads.parts.create, upload.id, data=b"x")
    assert late == (400, "invalid_upload_status", "upload_id")


def test_completed_once_when_asked_by_many(client: openai.OpenAI) -> None:
    upload = client.uploads.create(
        bytes=3, filename="once.txt", mime_type="text/plain", purpose="user_data"
    )
    part = client.uploads.parts.create(upload.id, data=b"abc")
    answers: list[int] = []

    def complete() -> None:
        one = client.with_options(max_retries=0)
        try:
            one.uploads.complete(upload.id, part_ids=[part.id])
            answers.append(200)
        except openai.APIStatusError as exc:
            answers.append(exc.status_code)

    threads = [threading.Thread(target=complete) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count(200) == 1
    assert set(answers) <= {200, 400, 409}
    named = [file for file in client.files.list() if file.filename == "once.txt"]
    assert len(named) == 1


def test_files_of_a_message_are_read(
    client: openai.OpenAI, http: httpx.Client, odd: UpstreamServer
) -> None:
    text = client.files.create(file=("q.txt", b"The sky is green."), purpose="user_data").id
    document = client.files.create(
        file=("report.pdf", pdf("Profit was 42 million", "Costs fell")), purpose="user_data"
    ).id
    inline = "data:application/pdf;base64," + base64.b64encode(pdf("An inline page")).decode()
    content = [
        {"type": "file", "file": {"file_id": text}},
        {"type": "file", "file": {"file_id": document}},
        {"type": "file", "file": {"file_data": inline, "filename": "in.pdf"}},
    ]
    asked = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    rendered = http.post("/v1/chat/render", json=asked)
    assert rendered.status_code == 200, rendered.text
    prompt = rendered.json()["prompt"]
    assert "q.txt:\nThe sky is green.\n" in prompt
    assert "report.pdf:\nProfit was 42 million\fCosts fell" in prompt
    assert "in.pdf:\nAn inline page" in prompt
    assert prompt.index("green") < prompt.index("Profit") < prompt.index("inline")


def test_image_of_a_file_reaches_a_model_that_sees(
    client: openai.OpenAI, odd: UpstreamServer
) -> None:
    id_ = client.files.create(file=("red.png", RED), purpose="vision").id
    part: Any = {"type": "input_image", "file_id": id_, "detail": "auto"}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What?"}, part]}]
    answer = client.responses.create(model="seeing", input=asked)
    sent = odd.body["messages"][-1]["content"][-1]["image_url"]["url"]
    assert base64.b64decode(sent.partition(",")[2]) == RED
    client.files.delete(id_)  # The conversation goes on without it.
    client.responses.create(model="seeing", input="And?", previous_response_id=answer.id)
    turns = odd.body["messages"]
    assert f"[The file {id_} was deleted.]" in str(turns[0]["content"])


@pytest.mark.parametrize("model", ["demo", "odd", "scripted"])
def test_image_of_a_file_is_refused_for_a_model_that_does_not_see(
    client: openai.OpenAI, odd: UpstreamServer, model: str
) -> None:
    id_ = client.files.create(file=("red.png", RED), purpose="vision").id
    part: Any = {"type": "file", "file": {"file_id": id_}}
    before = len(odd.asked)
    with pytest.raises(openai.BadRequestError, match="reads no images") as caught:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": [part]}])
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == "messages[0].content[0].file.file_id"
    assert len(odd.asked) == before


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"%PDF-1.4\nnothing", "not a PDF"),
        (pdf(""), "no text"),
        (b"\xff\xfe\x00\x01", "not an image"),
    ],
)
def test_file_that_cannot_be_read_is_named(
    client: openai.OpenAI, content: bytes, says: str
) -> None:
    id_ = client.files.create(file=("a.bin", content), purpose="user_data").id
    asked: Any = [{"role": "user", "content": [{"type": "input_file", "file_id": id_}]}]
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.responses.create(model="demo", input=asked)
    assert caught.value.param == "input[0].content[0].file_id"


def test_bodies_in_chunks_and_lies_about_length(stack: ServedStack, http: httpx.Client) -> None:
    boundary = "xyz"
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="c.bin"\r\n\r\n'
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()

    def chunks() -> Iterator[bytes]:
        yield head
        for _ in range(40):
            yield b"z" * 65_536
        yield tail

    kind = {"content-type": f"multipart/form-data; boundary={boundary}"}
    answer = http.post("/v1/files", content=chunks(), headers=kind)
    assert (answer.status_code, answer.json()["bytes"]) == (200, 40 * 65_536)

    post = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.key}\r\n"
    post += f"Content-Type: {kind['content-type']}\r\n"
    # One that never ends is answered while it is sent.
    with socket.create_connection(("127.0.0.1", stack.port)) as endless:
        endless.sendall(f"{post}Transfer-Encoding: chunked\r\n\r\n".encode())
        endless.sendall(b"%x\r\n%b\r\n" % (len(head), head))
        sent = 0
        while not select.select([endless], [], [], 0)[0]:
            endless.sendall(b"10000\r\n" + b"z" * 65_536 + b"\r\n")
            sent += 65_536
            assert sent < 8 * MAX_FILE_BYTES, "no answer"
        assert endless.recv(100).startswith(b"HTTP/1.1 413")
    assert sent > MAX_FILE_BYTES - 65_536
    announced = f"{post}Content-Length: {10**12}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", stack.port)) as lying:
        lying.sendall(announced.encode())
        assert lying.recv(100).startswith(b"HTTP/1.1 413")


def test_quota_holds_when_files_come_at_the_same_moment(stack: ServedStack) -> None:
    one = stack.client(make_key(stack).secret).with_options(max_retries=0)
    codes: list[str | None] = []

    def upload() -> None:
        try:
            one.files.create(file=bytes(MAX_FILE_BYTES - 4096), purpose="user_data")
            codes.append("stored")
        except openai.APIStatusError as exc:
            codes.append(exc.code)

    threads = [threading.Thread(target=upload) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, codes)) == ["file_quota_exceeded"] * 3 + ["stored"] * 2
    stored = list(one.files.list())
    assert len(stored) == 2
    one.files.delete(stored[0].id)
    one.files.create(file=b"again", purpose="user_data")


def test_a_file_is_stored_once_when_it_is_sent_again_meanwhile(stack: ServedStack) -> None:
    """A client that sent it again because of its own timeout had two files."""
    key, headers = make_key(stack), {"Idempotency-Key": "again"}
    with (
        psycopg.connect(stack.services["DATABASE_URL"]) as other,
        ThreadPoolExecutor(2) as pool,
        key.http(stack) as http,
    ):
        quota = "SELECT pg_advisory_xact_lock(%s, %s)"
        other.execute(quota, [_QUOTA_LOCK, key.project_id])
        form: Any = {"data": {"purpose": "user_data"}, "files": {"file": ("a.txt", b"once")}}
        sent = [pool.submit(http.post, "/v1/files", headers=headers, **form) for _ in range(2)]
        wait_until(lambda: stack.sql(WAITING_FOR_LOCKS) == [(2,)])
        other.commit()
        one, two = (answer.result() for answer in sent)
        assert (one.status_code, two.status_code) == (200, 200), (one.text, two.text)
        assert one.json() == two.json()
        assert [file["id"] for file in http.get("/v1/files").json()["data"]] == [one.json()["id"]]


def test_idempotency_key_of_a_file(client: openai.OpenAI, http: httpx.Client) -> None:
    headers = {"Idempotency-Key": f"files-{time.time()}"}
    form = {"data": {"purpose": "user_data"}, "files": {"file": ("i.txt", b"same")}}
    kind = {"content-type": "multipart/form-data; boundary=same"}
    one = http.post("/v1/files", **form, headers={**headers, **kind})  # type: ignore[arg-type]
    two = http.post("/v1/files", **form, headers={**headers, **kind})  # type: ignore[arg-type]
    assert one.status_code == 200, one.text
    assert one.json() == two.json()
