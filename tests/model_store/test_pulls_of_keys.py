"""Pulls that keys ask for in Ollama's API: which are taken, and what their clients are sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from completions.ollama import models as ollama_models
from inference_site.accounts.keys import create_key
from inference_site.accounts.models import Project, Scope
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.fleet import ModelStatus
from inference_site.catalogue.model_store.entries import refresh_catalogue
from inference_site.catalogue.model_store.models import (
    MOST_UNFINISHED,
    UNFINISHED,
    Pull,
    PullState,
    StoredModel,
    TooManyPulls,
)
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.gateway.handler import ApiHandler
from inference_site.gateway.handoff import SCOPE_KEY, Feed, Outcome
from inference_site.runs.streams.batches import Ending
from tests.gateway.asgi import scope, with_head
from tests.hub_server import Hub
from worker.runtime.pulls import Pulls

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("models_dir")]
NAME = "hf.co/org/repo:Q8_0"
MANIFEST = {"status": "pulling manifest"}
SUCCESS = {"status": "success", "model": "tiny.q8_0"}


class Asked:
    """What a key was answered: a status and a body, or a feed."""

    def __init__(self, secret: str, body: Any) -> None:
        outcome = Outcome()
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        asked = {**scope("POST", "/api/pull", headers), SCOPE_KEY: outcome}
        response: Any = ApiHandler().respond(with_head(asked), json.dumps(body).encode())
        self.status, self.headers = response.status_code, response.headers
        self.body = json.loads(response.content) if response.content else None
        self.feed: Feed | None = outcome.feed

    @property
    def error(self) -> str:
        """The words of a refusal, which is Ollama's."""
        assert self.body is not None
        assert list(self.body) == ["error"]
        return str(self.body["error"])

    def lines(self, *moves: dict[str, Any]) -> tuple[list[Any], Ending]:
        """The lines of the stream, and its ending; after each line the row moves on."""
        assert self.feed is not None
        return asyncio.run(_read(self.feed, list(moves)))


async def _read(feed: Feed, moves: list[dict[str, Any]]) -> tuple[list[Any], Ending]:
    lines: list[Any] = []
    async for frame in feed.frames:
        if isinstance(frame, Ending):
            return [*lines, *map(json.loads, frame.frames)], frame
        lines.append(json.loads(frame))
        if moves:
            await asyncio.to_thread(_move, moves.pop(0))
    raise AssertionError("the stream has no ending")


def _move(facts: dict[str, Any]) -> None:
    with release_connection_after():
        Pull.objects.update(**facts)


@pytest.fixture
def ask(
    project: Project, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Asked]:
    """Asks with a key that may pull, and looks quickly at what becomes of it."""
    monkeypatch.setattr(ollama_models, "_POLL_S", 0.001)
    monkeypatch.setattr(ollama_models, "_REFRESHED_WITHIN_S", 0.05)
    _, secret = create_key(project, "models", scopes=[Scope.MODELS])

    def asked(model: Any = NAME, *, key: str = secret, **fields: Any) -> Asked:
        return Asked(key, {"model": model, **fields})

    return asked


Ask = Callable[..., Asked]


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        (NAME, "org/repo:Q8_0"),
        ("HF.co/org/repo:Q8_0", "org/repo:Q8_0"),
        ("huggingface.co/org/repo:latest", "org/repo"),
        ("https://huggingface.co/org/repo", "org/repo"),
        ("hf:org/repo/tiny.Q8_0.gguf", "org/repo/tiny.Q8_0.gguf"),
        ("org/repo:Q8_0", "org/repo:Q8_0"),
    ],
)
def test_a_model_of_the_hub_is_pulled_and_served(ask: Ask, name: str, reference: str) -> None:
    asked = ask(name)
    assert asked.status == 200
    assert Pull.objects.get().reference == reference
    assert Pulls("w").run_next()
    refresh_catalogue()
    lines, ending = asked.lines()
    assert (lines[0], lines[-1]) == (MANIFEST, SUCCESS)
    assert (ending.status, json.loads(ending.body)) == (200, SUCCESS)
    again = ask("tiny.q8_0")
    assert (again.status, again.body) == (200, SUCCESS)
    assert Pull.objects.count() == 1


def test_the_older_name_is_taken_and_what_is_ignored_is_named(ask: Ask) -> None:
    asked = ask(None, name=NAME, stream=False, username="me")
    assert asked.headers["x-unsupported-params"] == "username"
    assert asked.feed is not None
    assert not asked.feed.stream
    assert ask(None).error == "Missing required parameter: 'model'."


def test_lines_say_how_far_it_is_and_each_part_has_its_own_digest(ask: Ask) -> None:
    running = {"state": PullState.RUNNING, "worker": "w"}
    lines, _ = ask().lines(
        {**running, "have_bytes": 25, "size_bytes": 100},
        {"have_bytes": 100},
        {"have_bytes": 10, "size_bytes": 50},
        {"state": PullState.COMPLETED, "model_id": "demo"},
    )
    told = {"status": "pulling org/repo:Q8_0"}
    assert lines == [
        MANIFEST,
        {**told, "digest": "org/repo:Q8_0", "total": 100, "completed": 25},
        {"status": "verifying sha256 digest"},
        {**told, "digest": "org/repo:Q8_0#2", "total": 50, "completed": 10},
        {"status": "writing manifest"},
        {"status": "success", "model": "demo"},
    ]


def test_the_end_waits_for_the_load_of_the_model(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([ModelStatus.LOADING, ModelStatus.LOADING, ModelStatus.LOADED])
    monkeypatch.setattr(fleet, "status_of", lambda _: next(states))
    lines, _ = ask().lines({"state": PullState.COMPLETED, "model_id": "demo"})
    assert lines == [MANIFEST, {"status": "loading model"}, {"status": "success", "model": "demo"}]


def test_who_waits_long_is_told_so_and_hears_of_it_again(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ollama_models, "_CLAIMED_WITHIN_S", 0.0)
    monkeypatch.setattr(ollama_models, "_REPEAT_S", 0.0)
    lines, _ = ask().lines({}, {}, {}, {"state": PullState.CANCELLED})
    assert lines[:3] == [MANIFEST, *[{"status": "waiting for a worker"}] * 2]


@pytest.mark.parametrize(
    ("moved", "status", "error"),
    [
        ({"state": PullState.FAILED, "error": "org/repo has no file x."}, 500, "has no file x."),
        ({"state": PullState.CANCELLED}, 409, "An operator has stopped the pull."),
        ({"state": PullState.COMPLETED, "model_id": "nobody"}, 409, "has no model 'nobody'"),
    ],
)
def test_what_goes_wrong_is_the_last_line_and_a_status_without_a_stream(
    ask: Ask, moved: dict[str, Any], status: int, error: str
) -> None:
    lines, ending = ask().lines(moved)
    assert lines[0] == MANIFEST
    assert list(lines[-1]) == ["error"]
    assert error in lines[-1]["error"]
    assert (ending.status, json.loads(ending.body)) == (status, lines[-1])


HINT = "hf.co/OWNER/NAME:QUANTIZATION"


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("llama3.2", 404, HINT),
        ("library", 404, HINT),
        ("hf.co/../..", 400, "is no model"),
        ("hf.co/org/../../etc/passwd", 400, "is no model"),
        ("hf.co/org/%2e%2e/x.gguf", 400, "is no model"),
        ("hf.co/org/repo/x.so", 400, "x.so is no model file"),
        ("hf.co/org\0/repo", 400, "is no model"),
        ("hf.co/", 400, "is no model"),
        ("hf.co:443/org/repo", 400, "is no model"),
        ("https://evil.example/org/repo", 400, "is no model"),
        ("evil.example/org/repo/x.gguf", 400, "'evil.example' is no hub of this site"),
        ("hf.co.evil.example/org/repo", 400, "is no hub of this site"),
        ("registry.ollama.ai/library/llama3.2", 400, "is no hub of this site"),
        ("10.0.0.1/org/repo/x.gguf", 400, "'10.0.0.1' is no hub of this site"),
        ("[::1]:80/org/repo/x.gguf", 400, "is no hub of this site"),
        ("localhost/org/x.gguf", 400, "'localhost' is no hub of this site"),
        ("http://169.254.169.254/latest/meta-data", 400, "is no hub of this site"),
        ("file:///etc/passwd", 400, "is no hub of this site"),
        (f"org/{'x' * 300}", 400, "longer than 200 characters"),
        (7, 400, "Invalid type for 'model'"),
        (" ", 400, "Missing required parameter: 'model'."),
    ],
)
def test_what_is_no_reference_is_refused_at_once(
    ask: Ask, name: Any, status: int, error: str
) -> None:
    refused = ask(name)
    assert refused.status == status
    assert error in refused.error
    assert not Pull.objects.exists()


def test_an_insecure_pull_is_refused(ask: Ask) -> None:
    assert ask(insecure=True).status == 400
    assert ask(insecure=False).status == 200


def test_a_key_without_the_scope_pulls_nothing(ask: Ask, project: Project) -> None:
    scopes = [scope for scope in Scope.values if scope != Scope.MODELS]
    _, secret = create_key(project, "others", scopes=scopes)
    for name in (NAME, "demo", "llama3.2"):
        refused = ask(name, key=secret)
        assert (refused.status, "lacks the scope 'models:write'" in refused.error) == (403, True)
    assert not Pull.objects.exists()


def test_a_key_of_some_models_pulls_no_others(ask: Ask, project: Project) -> None:
    _, secret = create_key(project, "some", scopes=[Scope.MODELS], allowed_models=["demo"])
    assert ask("demo", key=secret).body == {"status": "success", "model": "demo"}
    told = [ask(name, key=secret) for name in (NAME, "demo-embedding", "llama3.2")]
    assert [one.status for one in told] == [403] * 3
    assert len({one.error for one in told}) == 1, "it does not say which models there are"
    assert not Pull.objects.exists()


def test_a_model_of_another_project_is_not_known(ask: Ask) -> None:
    StoredModel.objects.create(
        model_id="theirs", entry={"engine": "scripted", "projects": ["another"]}
    )
    refresh_catalogue()
    assert ask("theirs").status == 404


def test_who_asks_for_the_same_joins_the_pull_that_goes_on(ask: Ask, hub: Hub) -> None:
    assert [ask(name).status for name in (NAME, "org/repo:Q8_0", f"https://{NAME}")] == [200] * 3
    assert Pull.objects.count() == 1
    Pull.objects.update(state=PullState.RUNNING, worker="w")
    ask()
    assert Pull.objects.count() == 1
    Pull.objects.cancel(Pull.objects.get().pk)
    ask()
    assert Pull.objects.filter(state=PullState.QUEUED).count() == 1


def test_those_of_an_operator_for_another_host_or_revision_are_not_joined(ask: Ask) -> None:
    Pull.objects.create(reference="org/repo:Q8_0", host="elsewhere")
    Pull.objects.create(reference="org/repo:Q8_0", revision="v1")
    ask()
    assert Pull.objects.count() == 3


def _at_once(calls: Sequence[Callable[[], object]]) -> list[object]:
    """What these return or raise when they are called at the same moment."""
    results: list[object] = []
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            results.append(call())
        except TooManyPulls as exc:
            results.append(exc)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_at_the_same_moment_get_the_same_pull() -> None:
    pulls = _at_once([lambda: Pull.objects.join("org/repo").pk] * 8)
    assert pulls == [Pull.objects.get().pk] * 8


def test_no_more_than_so_many_wait(ask: Ask) -> None:
    for number in range(MOST_UNFINISHED - 1):
        Pull.objects.create(reference=f"org/repo{number}")
    results = _at_once([lambda n=n: Pull.objects.join(f"org/more{n}") for n in range(4)])  # type: ignore[misc]  # A default of a lambda.
    assert sum(isinstance(one, TooManyPulls) for one in results) == 3
    assert Pull.objects.filter(state__in=UNFINISHED).count() == MOST_UNFINISHED
    refused = ask("org/another")
    assert (refused.status, refused.headers["Retry-After"]) == (429, "5")
    assert ask("org/repo0").status == 200, "what waits already can be joined"
