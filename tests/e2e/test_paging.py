"""Lists whose entries a client deletes while it pages through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
from openai.pagination import SyncCursorPage
from openai.types.responses import Response

from tests.e2e.keys import make_key
from tests.served_stack import ServedStack


class OneList:
    """How a project adds to one of the API's lists, lists it and deletes from it."""

    def __init__(self, client: openai.OpenAI, kind: str) -> None:
        conversation = client.conversations.create().id if kind == "items" else ""
        store = client.vector_stores.create().id if kind == "entries" else ""

        def file() -> str:
            return client.files.create(file=("a.txt", b"tea"), purpose="user_data").id

        def entry() -> str:
            return client.vector_stores.files.create(store, file_id=file()).id

        def item() -> str:
            message: Any = {"role": "user", "content": "tea"}
            return str(client.conversations.items.create(conversation, items=[message]).data[0].id)

        def chat() -> str:
            message: Any = {"role": "user", "content": "tea"}
            made = client.chat.completions.create(model="demo", messages=[message], store=True)
            return made.id

        def response() -> str:
            return client.responses.create(model="demo", input="tea", max_output_tokens=16).id

        stores, entries, items = (
            client.vector_stores,
            client.vector_stores.files,
            client.conversations.items,
        )
        every: dict[str, tuple[Callable[[], str], Callable[..., Any], Callable[[str], Any]]] = {
            "files": (file, client.files.list, client.files.delete),
            "stores": (lambda: stores.create().id, stores.list, stores.delete),
            "entries": (
                entry,
                lambda **page: entries.list(store, **page),
                lambda id_: entries.delete(id_, vector_store_id=store),
            ),
            "items": (
                item,
                lambda **page: items.list(conversation, **page),
                lambda id_: items.delete(id_, conversation_id=conversation),
            ),
            "chats": (chat, client.chat.completions.list, client.chat.completions.delete),
            "responses": (
                response,
                lambda **page: client.get_api_list(
                    "/responses",
                    page=SyncCursorPage[Response],
                    options={"params": page},
                    model=Response,
                ),
                client.responses.delete,
            ),
        }
        self.add, self.list, self.delete = every[kind]


KINDS = ("files", "stores", "entries", "items", "chats", "responses")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_entries_can_be_deleted_while_they_are_listed(
    stack: ServedStack, kind: str, order: str
) -> None:
    key = make_key(stack)
    entries = OneList(openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key.secret), kind)
    added = [entries.add() for _ in range(5)]
    deleted = []
    for entry in entries.list(limit=2, order=order):
        entries.delete(entry.id)
        deleted.append(entry.id)
    assert deleted == (added if order == "asc" else added[::-1])
    assert list(entries.list()) == []


def test_a_deleted_entry_is_a_cursor_of_its_own_list_only(
    stack: ServedStack, http: httpx.Client
) -> None:
    def key() -> httpx.Headers:
        secret = make_key(stack).secret
        return httpx.Headers({"Authorization": f"Bearer {secret}"})

    def listed(path: str, headers: httpx.Headers, after: str) -> tuple[int, Sequence[Any]]:
        answer = http.get(path, params={"after": after}, headers=headers)
        return answer.status_code, answer.json().get("data")

    own, other = key(), key()
    made = http.post("/v1/vector_stores", json={}, headers=own).json()["id"]
    assert http.delete(f"/v1/vector_stores/{made}", headers=own).status_code == 200
    assert listed("/v1/vector_stores", own, made) == (200, [])
    assert listed("/v1/vector_stores", other, made)[0] == 400
    assert listed("/v1/files", own, made)[0] == 400
