"""From nothing to a served model in the console, and what becomes of it: without a restart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.served_stack import ServedStack, wait_until

pytestmark = pytest.mark.timeout(400)
ADMIN = "/admin/model_store"


@pytest.fixture(scope="module")
def console(stack: ServedStack) -> Iterator[httpx.Client]:
    """The browser of the administrator."""
    found = re.search(r"password: (\S+)", stack.text())
    assert found
    with httpx.Client(base_url=stack.url, timeout=60) as opened:
        send(opened, "/admin/login/", username="admin", password=found[1])
        yield opened


def send(console: httpx.Client, address: str, **form: str) -> str:
    """Fill in the form of a page; return the page that it leads to."""
    token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', console.get(address).text)
    assert token
    answer = console.post(address, data={**form, "csrfmiddlewaretoken": token[1]})
    assert answer.status_code == 302, re.findall(r"errorlist.*?</ul>", answer.text, re.DOTALL)
    return console.get(answer.headers["Location"]).text


def model(stack: ServedStack, name: str) -> Any:
    """What the API says of a model; None if there is none."""
    with stack.http() as http:
        shown = http.get(f"/v1/models/{name}")
        return shown.json() if shown.status_code == 200 else None


def is_loaded(stack: ServedStack, name: str) -> bool:
    return (model(stack, name) or {}).get("status") == "loaded"


def test_a_model_is_pulled_served_changed_and_removed(
    stack: ServedStack, console: httpx.Client
) -> None:
    text = send(
        console, f"{ADMIN}/pull/add/", reference="org/repo:Q8_0", revision="main", model_id="mine"
    )
    assert "Pulling org/repo:Q8_0" in text
    wait_until(lambda: is_loaded(stack, "mine"), 120, "the model is pulled and served")
    client = stack.client()
    assert client.completions.create(model="mine", prompt="Once", max_tokens=3).usage
    page = console.get("/admin/fleet/models/mine/").text
    for part in ("Q8_0", "llama", "3.8 MiB", "the database", "no price set"):
        assert part in page, part

    [(pk,)] = stack.sql("SELECT id FROM model_store_storedmodel WHERE model_id = 'mine'")
    entry = {"engine": "llama_cpp", "file": "hf:org/repo/tiny.Q8_0.gguf", "is_listed": "on"}
    change = f"{ADMIN}/storedmodel/{pk}/change/"
    send(console, change, **entry, aliases="ours", price_input="2")
    wait_until(lambda: model(stack, "ours") is not None, 120, "the alias is known")
    assert is_loaded(stack, "mine"), "a price and an alias need no new load"
    assert "2.00 USD" in console.get("/admin/fleet/models/mine/").text

    send(console, change, **entry, context_length="64")
    wait_until(
        lambda: is_loaded(stack, "mine") and refuses_as_too_long(client), 120, "it is loaded anew"
    )

    send(console, f"{ADMIN}/storedmodel/{pk}/delete/", post="yes")
    wait_until(lambda: model(stack, "mine") is None, 120, "it is gone")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="mine", prompt="Once", max_tokens=3)


def refuses_as_too_long(client: openai.OpenAI) -> bool:
    try:
        client.completions.create(model="mine", prompt="Once upon a time " * 60, max_tokens=1)
    except openai.BadRequestError as exc:
        return exc.code == "context_length_exceeded"
    except openai.InternalServerError:  # It is being loaded.
        return False
    return False


def test_a_model_of_another_server_is_added_and_its_worker_serves_it(
    stack: ServedStack, console: httpx.Client
) -> None:
    more = f"base_url: {stack.url}/v1\nmodel: demo\napi_key: {stack.key}"
    send(
        console,
        f"{ADMIN}/storedmodel/add/",
        model_id="twin",
        engine="openai_upstream",
        is_listed="on",
        more=more,
    )
    wait_until(lambda: is_loaded(stack, "twin"), 120, "it is served")
    message: Any = {"role": "user", "content": "Hello"}
    done = stack.client().chat.completions.create(model="twin", messages=[message], max_tokens=4)
    assert done.choices[0].message.content
