"""A key pulls a model from the hub with Ollama's own client, and uses it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import ollama
import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from tests.e2e.keys import MadeKey, make_key
from tests.hub_server import Hub
from tests.served_stack import ServedStack, wait_until

pytestmark = pytest.mark.timeout(400)
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PULLS = "SELECT state FROM model_store_pull WHERE reference = %s"


@pytest.fixture
def key(stack: ServedStack) -> MadeKey:
    """A key that may pull models and use them."""
    return make_key(stack, "inference", "models:write")


@contextmanager
def ollama_client(stack: ServedStack, secret: str, **options: Any) -> Iterator[ollama.Client]:
    """The official client with a key."""
    headers = {"Authorization": f"Bearer {secret}"}
    opened = ollama.Client(stack.url, headers=headers, **options)
    yield opened
    opened._client.close()


@pytest.fixture
def client(stack: ServedStack, key: MadeKey) -> Iterator[ollama.Client]:
    """The official client with that key."""
    with ollama_client(stack, key.secret) as opened:
        yield opened


@contextmanager
def paused(hub: Hub) -> Iterator[None]:
    """Have the hub send a megabyte of a file, and the rest after the block."""
    hub.pause_after = 1_000_000
    hub.goes_on.clear()
    try:
        yield
    finally:
        hub.goes_on.set()
        hub.pause_after = None


def test_a_model_is_pulled_as_a_stream_and_answers(
    stack: ServedStack, hub: Hub, client: ollama.Client
) -> None:
    hub.files["streamed.Q5_0.gguf"] = DEMO_FILE.read_bytes()
    parts, size = [], DEMO_FILE.stat().st_size
    with paused(hub):
        stream = client.pull("hf.co/org/repo:Q5_0", stream=True)
        for part in stream:
            parts.append(part)
            if part.completed:
                break
    assert 0 < (parts[-1].completed or 0) < size == parts[-1].total
    assert parts[-1].status == "pulling org/repo:Q5_0"
    parts += stream
    assert (parts[0].status, parts[-1].status) == ("pulling manifest", "success")
    assert "streamed.q5_0" in [model.model for model in client.list().models]
    answer = client.chat("streamed.q5_0", HELLO, options={"num_predict": 3})
    assert answer.eval_count == 3


def test_two_at_the_same_moment_share_one_pull(
    stack: ServedStack, hub: Hub, client: ollama.Client, key: MadeKey
) -> None:
    hub.files["shared.Q5_1.gguf"] = DEMO_FILE.read_bytes()
    with ThreadPoolExecutor(2) as threads, paused(hub):
        whole = threads.submit(client.pull, "hf.co/org/repo:Q5_1")
        streamed = threads.submit(lambda: list(client.pull("org/repo:Q5_1", stream=True)))
        running = [("running",)]
        wait_until(lambda: stack.sql(PULLS, "org/repo:Q5_1") == running, 60, "it is taken")
        hub.goes_on.set()
        assert whole.result(60).status == streamed.result(60)[-1].status == "success"
    assert stack.sql(PULLS, "org/repo:Q5_1") == [("completed",)]


def test_a_pull_goes_on_when_its_client_leaves(
    stack: ServedStack, hub: Hub, client: ollama.Client, key: MadeKey
) -> None:
    hub.files["left.Q6_K.gguf"] = DEMO_FILE.read_bytes()
    name = "hf.co/org/repo:Q6_K"
    with paused(hub), ollama_client(stack, key.secret, timeout=1) as leaving:
        stream: Any = leaving.pull(name, stream=True)
        assert next(stream).status == "pulling manifest"
        stream.close()
        with pytest.raises(httpx.ReadTimeout):
            leaving.pull(name)
    done = [("completed",)]
    wait_until(lambda: stack.sql(PULLS, "org/repo:Q6_K") == done, 60, "it goes on")
    assert client.pull(name).status == "success", "it is there, and only checked"
    assert client.pull("left.q6_k").status == "success"
    assert stack.sql(PULLS, "org/repo:Q6_K") == done * 2


def test_what_goes_wrong_is_an_error_of_ollama(
    stack: ServedStack, hub: Hub, client: ollama.Client
) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="has no model of Q9_X"):
            list(client.pull("hf.co/org/repo:Q9_X", stream=stream))
    with pytest.raises(ollama.ResponseError, match="is no hub of this site") as caught:
        client.pull("10.0.0.1/org/repo:Q8_0")
    assert caught.value.status_code == 400
    lacks = pytest.raises(ollama.ResponseError, match="lacks the scope 'models:write'")
    with ollama_client(stack, stack.key) as other, lacks as caught:
        other.pull("hf.co/org/repo:Q8_0")
    assert caught.value.status_code == 403
