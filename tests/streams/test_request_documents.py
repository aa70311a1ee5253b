"""Documents of the releases before and after: a queue outlives an upgrade.

``documents/`` has two as the release before this one wrote them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from completions.assemblers.chat import ChatAssembly
from completions.models import StoredCompletion
from inference_site.accounts.models import ApiKey
from inference_site.core.domain.deltas import Finish, TextDelta, Usage
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.storage.redis import client_for
from inference_site.runs.models import Generation, Status
from inference_site.runs.streams.event_log import document_key
from inference_site.runs.streams.request_documents import Document, reader_of
from responses_api.assembler import ResponseAssembly
from tests.generations.rows import create_generation
from tests.worker.runtime.test_run import LocalStream
from worker.engines.base import Sink
from worker.engines.scripted import ScriptedEngine
from worker.runtime.run import Run

Key = tuple[ApiKey, str]
FOLDER = Path(__file__).parent / "documents"
OPTIONAL = {
    "chat": ("stream", "include_usage", "choices", "logprobs", "is_legacy", "service_tier"),
    "response": ("emits", "sends_done", "seal_for"),
}


class NotingEngine(ScriptedEngine):
    """Notes what it is asked; every answer is the same."""

    def __init__(self) -> None:
        super().__init__(ModelSpec("m", "scripted"))
        self.asked: list[GenerationRequest] = []

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        self.asked.append(request)
        for index in range(request.answers):
            sink.feed(TextDelta("A unit.", index))
            sink.feed(Finish("stop", index))
        sink.feed(Usage(9, 0, 3))


def written(name: str) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads((FOLDER / f"{name}.json").read_bytes())
    return document


def of_the_future(value: Any) -> Any:
    """Return the same with an unknown field in every object whose fields are known."""
    if isinstance(value, list):
        return [of_the_future(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    free = ("parameters", "template_vars", "metadata", "response")
    known = {name: v if name in free else of_the_future(v) for name, v in value.items()}
    return {**known, "of_the_future": {"x": 1}}


def run(api_key: ApiKey, kind: str, document: dict[str, Any]) -> tuple[Any, Generation, str]:
    """Run a generation with this document; return what the engine got, its row and its stream."""
    row = create_generation(api_key, kind=kind, model="demo")
    client_for(row.public_id).set(document_key(row.public_id), orjson.dumps(document), ex=60)
    claim = Generation.objects.claim("demo", "w")
    assert claim is not None
    stream, engine = LocalStream(row.public_id), NotingEngine()
    Run(claim, stream).start(engine, lambda _: None)
    batch = stream.take()
    assert batch is not None
    return engine.asked, Generation.objects.get(pk=row.pk), b"".join(batch.frames).decode()


def as_it_was(value: Any) -> Any:
    return value


@pytest.fixture(params=[as_it_was, of_the_future], ids=["before", "after"])
def shape(request: pytest.FixtureRequest) -> Any:
    """What a document of the release before, or of the one after, looks like."""
    return request.param


def test_chat_of_another_release_runs_and_is_stored(api_key: Key, shape: Any) -> None:
    document = written("chat")
    document["store"]["project_id"] = api_key[0].project_id
    [asked], row, told = run(api_key[0], "chat.completion", shape(document))
    assert row.status == Status.COMPLETED
    assert [message.role for message in asked.messages] == ["system", "user", "assistant", "tool"]
    assert asked.messages[2].tool_calls[0].arguments == '{"word":"word"}'
    assert (asked.sampling.temperature, asked.sampling.logit_bias) == (0.5, ((5, -1.5),))
    assert (asked.stop, asked.choices, asked.top_logprobs) == (("\n\n",), 2, 1)
    assert asked.tools[0].parameters["properties"] == {"word": {"type": "string"}}
    assert told.count(document["assembly"]["completion_id"]) == 2 * 3 + 1
    assert '"total_tokens":12' in told
    stored = StoredCompletion.objects.get(public_id=row.public_id)
    assert stored.metadata["topic"] == "words"
    assert stored.messages[0]["role"] == "developer"


def test_response_of_another_release_runs(api_key: Key, shape: Any) -> None:
    document = written("response")
    [asked], row, told = run(api_key[0], "response", shape(document))
    assert row.status == Status.COMPLETED
    assert [message.text for message in asked.messages] == ["Be brief.", "What is a word?"]
    assert (asked.constraint.kind, asked.sampling.temperature) == ("json_object", 0.25)
    assert document["assembly"]["response"]["id"] in told
    assert '"type":"response.completed"' in told
    assert told.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("name", "assembly"), [("chat", ChatAssembly), ("response", ResponseAssembly)]
)
def test_what_another_release_does_not_write_has_a_default(name: str, assembly: Any) -> None:
    document = written(name)
    for field in ("store", "traceparent"):
        del document[field]
    for field in OPTIONAL[name]:
        del document["assembly"][field]
    document["request"] = {"model": "demo"}
    found = reader_of(assembly).validate_json(orjson.dumps(document))
    assert (found.store, found.traceparent) == (None, "")
    assert found.request == GenerationRequest("demo")


@pytest.mark.parametrize(
    ("name", "assembly"), [("chat", ChatAssembly), ("response", ResponseAssembly)]
)
def test_the_release_before_finds_all_its_fields(name: str, assembly: Any) -> None:
    old = written(name)
    again: Document[Any] = reader_of(assembly).validate_json(orjson.dumps(old))
    assert known_to(old, orjson.loads(orjson.dumps(again))) == old


def known_to(old: Any, new: Any) -> Any:
    """What of a document the release before reads: it ignores fields that it does not know."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: known_to(old[key], new[key]) for key in old if key in new}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [known_to(*pair) for pair in zip(old, new, strict=True)]
    return new
