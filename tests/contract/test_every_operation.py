"""What holds for every operation of the OpenAPI document, also for those that are added to it."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from inference_site.accounts.models import Scope
from inference_site.gateway.api.openapi import document
from tests.e2e.keys import MadeKey, make_key
from tests.served_stack import ServedStack
from tests.waiting import wait_until

PARAMETER = re.compile(r"\{(\w+)\}")
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FORMS = {"/v1/files", "/v1/uploads/{upload_id}/parts"}
FORMS |= {"/v1/audio/transcriptions", "/v1/audio/translations"}
HELLO = {"role": "user", "content": "Hello"}
Ids = Mapping[str, str]
Operations = list[tuple[str, str]]


@pytest.fixture(scope="module")
def paths() -> dict[str, Any]:
    """What the document says of each path."""
    found: dict[str, Any] = json.loads(document())["paths"]
    return found


@pytest.fixture(scope="module")
def operations(paths: dict[str, Any]) -> Operations:
    """The path and the method of everything that needs a key."""
    return [
        (path, method.upper())
        for path, item in paths.items()
        for method in item
        if "security" in item[method]
    ]


@pytest.fixture(scope="module")
def anybody(stack: ServedStack) -> Iterator[httpx.Client]:
    """A client that sends no key of its own."""
    with httpx.Client(base_url=stack.url, timeout=60) as opened:
        yield opened


def ask(who: httpx.Client, path: str, method: str, ids: Ids | None = None, **sent: Any) -> Any:
    """Ask with these ids in the path, and with a body that reaches the id where there is one."""
    address = PARAMETER.sub(lambda found: (ids or {}).get(found[1], "x"), path)
    if method == "POST" and path in FORMS:  # Another type of body is refused before the key.
        return who.request(method, address, files={"file": b"x", "data": b"x"}, **sent)
    reaching: dict[str, Any] = {"metadata": {}, "items": [HELLO], "part_ids": []}
    reaching |= {"query": "x", "rating": "up", "file_id": "x", "file_ids": ["x"], "attributes": {}}
    body = reaching if method in ("POST", "PUT", "PATCH") else None
    return who.request(method, address, json=body, **sent)


def keys_that_are_refused(stack: ServedStack) -> dict[str, str]:
    """A secret for each state in which a key opens nothing."""
    past = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)
    rotated = make_key(stack, *Scope.values)
    stack.sql(
        "UPDATE accounts_keysecret SET expires_at = %s WHERE api_key_id = %s", past, rotated.id
    )
    inactive = make_key(stack, *Scope.values)
    stack.sql("UPDATE accounts_project SET is_active = false WHERE id = %s", inactive.project_id)
    return {
        "unknown": f"sk-{'x' * 48}",
        "short": "x",
        "rotated": rotated.secret,
        "revoked": make_key(stack, *Scope.values, revoked_at=past).secret,
        "expired": make_key(stack, *Scope.values, expires_at=past).secret,
        "of an inactive project": inactive.secret,
    }


def test_no_operation_is_open_to_a_key_that_is_not_valid(
    stack: ServedStack, anybody: httpx.Client, operations: Operations
) -> None:
    """Two of the states in turn are sent to each operation, each state in both headers."""
    refused = itertools.cycle(keys_that_are_refused(stack).items())
    headers = itertools.cycle(("Authorization", "x-api-key", "x-api-key", "Authorization"))
    for path, method in operations:
        assert ask(anybody, path, method).status_code == 401, (path, method)
        for (state, secret), header in itertools.islice(zip(refused, headers, strict=False), 2):
            sent = {header: f"Bearer {secret}" if header == "Authorization" else secret}
            answer = ask(anybody, path, method, headers=sent)
            assert answer.status_code == 401, (path, method, state)
            # Ollama's errors are words, and Anthropic's have no code.
            if not path.startswith(("/api/", "/v1/messages")):
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert secret not in answer.text or len(secret) < 5


def test_no_operation_is_open_to_a_key_without_its_scope(
    stack: ServedStack, anybody: httpx.Client, operations: Operations
) -> None:
    for scopes, is_open in ((["none"], False), (Scope.values, True)):
        headers = {"Authorization": f"Bearer {make_key(stack, *scopes).secret}"}
        for path, method in operations:
            answer = ask(anybody, path, method, headers=headers)
            assert (answer.status_code not in (401, 403)) is is_open, (path, method)


TRICKS: list[dict[str, str]] = [
    {
        "X-HTTP-Method-Override": "GET",
        "X-HTTP-Method": "GET",
        "X-Method-Override": "OPTIONS",
        "X-Original-URL": "/health",
        "X-Rewrite-URL": "/health",
        "X-Forwarded-Prefix": "/health",
        "X-Forwarded-For": "127.0.0.1",
        "X-Real-IP": "127.0.0.1",
        "X-Forwarded-User": "admin",
        "Remote-User": "admin",
        "X-Forwarded-Host": "localhost",
        "Host": "localhost",
        "Cookie": "sessionid=x; csrftoken=x",
        "OpenAI-Organization": "default",
        "OpenAI-Project": "default",
    },
    {"Host": "elsewhere.example", "Authorization": "Bearer"},
    {"Authorization": "Bearer null"},
    {"Authorization": "Basic YWRtaW46YWRtaW4="},
    {"Authorization": "Token x", "X-CSRFToken": "x"},
]
"""Headers that are sent together: if one of them opened an operation, all of them would."""


def test_no_header_opens_an_operation(anybody: httpx.Client, operations: Operations) -> None:
    for headers in TRICKS:
        for path, method in operations:
            answer = ask(anybody, path, method, headers=headers)
            assert answer.status_code == 401, (path, method, headers)


@pytest.fixture(scope="module")
def owner(stack: ServedStack) -> MadeKey:
    """A key of a project that has stored something."""
    return make_key(stack, *Scope.values)


@pytest.fixture(scope="module")
def ids(stack: ServedStack, owner: MadeKey) -> dict[str, str]:
    """Ids of what the owner's project has, by the names of path parameters."""
    with owner.http(stack) as http:
        chat = {"model": "scripted", "messages": [HELLO], "store": True}
        made = http.post(RESPONSES, json={"model": "scripted", "input": "Hello"}).json()
        conversation = http.post("/v1/conversations", json={"items": [HELLO]}).json()["id"]
        upload = {"filename": "a", "bytes": 1, "mime_type": "a/b", "purpose": "user_data"}
        items = http.get(f"/v1/conversations/{conversation}/items").json()["data"]
        return {
            "completion_id": http.post(CHAT, json=chat).json()["id"],
            "response_id": made["id"],
            "conversation_id": conversation,
            "item_id": items[0]["id"],
            "upload_id": http.post("/v1/uploads", json=upload).json()["id"],
            "batch_id": _ended_batch(http, "/v1/batches", _batch(http)),
            **_vector_store(stack, owner, http),
            "message_batch_id": _ended_batch(http, "/v1/messages/batches", MESSAGES),
        }


MESSAGES: dict[str, Any] = {
    "requests": [
        {
            "custom_id": "one",
            "params": {"model": "scripted", "max_tokens": 9, "messages": [HELLO]},
        }
    ]
}


def _batch(http: httpx.Client) -> dict[str, str]:
    """What creates a batch of one line."""
    body = {"model": "scripted", "messages": [HELLO]}
    line = {"custom_id": "one", "method": "POST", "url": CHAT, "body": body}
    form = {"data": {"purpose": "batch"}, "files": {"file": json.dumps(line).encode()}}
    file = http.post("/v1/files", **form).json()["id"]  # type: ignore[arg-type]
    return {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}


def _vector_store(stack: ServedStack, owner: MadeKey, http: httpx.Client) -> dict[str, str]:
    """The ids of a vector store, its file and its file batch; the stack has no embedding model."""
    form = {"data": {"purpose": "assistants"}, "files": {"file": b"x"}}
    file = http.post("/v1/files", **form).json()["id"]  # type: ignore[arg-type]
    [[store]] = stack.sql(
        "INSERT INTO vector_stores_vectorstore (public_id, project_id, name, description, language,"
        " embedding_model, metadata, created_at, last_active_at, is_deleted)"
        " VALUES ('vs_every_operation', %s, '', '', 'english', 'none', '{}', now(), now(), false)"
        " RETURNING id",
        owner.project_id,
    )
    [[batch]] = stack.sql(
        "INSERT INTO vector_stores_filebatch (public_id, store_id, is_cancelled, created_at)"
        " VALUES ('vsfb_every_operation', %s, false, now()) RETURNING id",
        store,
    )
    stack.sql(
        "INSERT INTO vector_stores_vectorstorefile (store_id, file_id, project_id, api_key_id,"
        " batch_id, attributes, chunk_size, chunk_overlap, status, error_code, error_message,"
        " chunk_count, usage_bytes, attempts, worked_by, created_at)"
        " SELECT %s, id, %s, %s, %s, '{}', 800, 400, 'cancelled', '', '', 0, 0, 0, '', now()"
        " FROM files_storedfile WHERE public_id = %s RETURNING id",
        store, owner.project_id, owner.id, batch, file,
    )  # fmt: skip
    return {
        "vector_store_id": "vs_every_operation",
        "file_id": file,
        "file_batch_id": "vsfb_every_operation",
    }


def _ended_batch(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """Create a batch, and return its id when it has ended."""
    made = http.post(path, json=body).json()
    address = f"{path}/{made['id']}"

    def has_ended() -> bool:
        found = http.get(address).json()
        return found.get("status") == "completed" or found.get("ended_at") is not None

    wait_until(has_ended)
    return str(made["id"])


def test_an_id_of_another_project_is_like_one_that_does_not_exist(
    stack: ServedStack, owner: MadeKey, ids: Ids, operations: Operations, subtests: pytest.Subtests
) -> None:
    with make_key(stack, *Scope.values).http(stack) as stranger, owner.http(stack) as http:
        for path, method in operations:
            named = set(PARAMETER.findall(path)) - {"model_id"}  # Models: test_model_access.py.
            is_of_site = path.startswith("/v1/organization/")  # For the keys of administrators.
            if named and not is_of_site:
                with subtests.test(path, method=method):
                    _is_like_an_unknown_one(
                        stranger, path, method, {name: ids[name] for name in named}
                    )
                    if method == "GET":
                        assert ask(http, path, method, ids).status_code == 200


def _is_like_an_unknown_one(stranger: httpx.Client, path: str, method: str, ids: Ids) -> None:
    absent = {name: id_[:-4] + "0000" for name, id_ in ids.items()}
    foreign = ask(stranger, path, method, ids)
    unknown = ask(stranger, path, method, absent)
    assert (foreign.status_code, unknown.status_code) == (404, 404)
    told = foreign.text
    for name in ids:
        assert ids[name] in told or absent[name] not in unknown.text
    for name in ids:
        told = told.replace(ids[name], absent[name])
    assert json.loads(told) == unknown.json()


CURSORS = ("after", "before", "conversation", "previous_response_id")


def test_a_list_tells_nothing_of_an_id_of_another_project(
    stack: ServedStack, ids: Ids, paths: dict[str, Any], subtests: pytest.Subtests
) -> None:
    cursors = [
        (path, parameter["name"])
        for path, item in paths.items()
        for parameter in item.get("get", {}).get("parameters", ())
        if parameter["name"] in CURSORS and "{" not in path
    ]
    assert cursors
    with make_key(stack, *Scope.values).http(stack) as stranger:
        for path, name in cursors:
            for id_ in ids.values():
                with subtests.test(path, name=name, id=id_):
                    foreign = stranger.get(path, params={name: id_})
                    unknown = stranger.get(path, params={name: id_[:-4] + "0000"})
                    assert foreign.status_code == unknown.status_code < 500
                    told = unknown.text.replace(id_[:-4] + "0000", "")
                    assert foreign.text.replace(id_, "") == told
