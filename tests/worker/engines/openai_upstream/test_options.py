"""Options of a model, and what a load looks at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inference_site.catalogue.engines.registry import ENGINES, model_capabilities
from inference_site.catalogue.models_file import read_models_file
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Message
from tests.sinks import RecordingSink
from tests.upstream_server import Talk, UpstreamServer
from tests.worker.engines.openai_upstream.conftest import Load
from worker.engines.base import load_engine
from worker.engines.openai_upstream.server import server_of

HELLO = GenerationRequest("m", (Message("user", "Hello"),))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "'base_urls': it is missing, as is 'base_url'"),
        ({"base_urls": ["http://host/v1"]}, "'base_urls': cannot be used together with 'base_url'"),
        ({"base_url": 5}, "'base_url': URL input should be a string"),
        ({"base_url": "localhost:8000"}, "'base_url': URL scheme should be 'http' or 'https'"),
        ({"base_url": "ftp://host/v1"}, "'base_url': URL scheme should be 'http' or 'https'"),
        ({"base_url": "http://host/v1?a=b"}, "neither a query nor a password"),
        ({"base_url": "http://user:pass@host/v1"}, "neither a query nor a password"),
        (
            {"base_url": "http://host:99999/v1"},
            "'base_url': Input should be a valid URL, invalid port",
        ),
        ({"flavor": "llama"}, "'flavor': Input should be 'openai', 'vllm'"),
        ({"model": ""}, "'model': String should have at least 1 character"),
        ({"capabilities": "chat"}, "'capabilities': must be a list"),
        ({"capabilities": ["flying"]}, "'capabilities.0': Input should be 'audio', 'cache_prompt'"),
        ({"fields": []}, "'fields': must be a mapping"),
        ({"fields": {"top_z": "x"}}, "'fields.top_z': unknown name"),
        ({"fields": {"top_k": 5}}, "'fields.top_k': Input should be a valid string"),
        ({"headers": {"X-A": "line\nbreak"}}, "'headers.X-A': must fit into a header"),
        ({"timeout_s": 0}, "'timeout_s': Input should be greater than 0"),
        ({"timeout_s": "5"}, "'timeout_s': Input should be a valid number"),
        ({"connections": True}, "'connections': Input should be a valid integer"),
        ({"chat_template_kwargs": 5}, "'chat_template_kwargs': must be a mapping"),
        (
            {"api_key": "a", "api_key_env": "B"},
            "'api_key_env': cannot be used together with 'api_key'",
        ),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "names NO_SUCH_VARIABLE, which is not set"),
        ({"api_key_file": "/no/such/file"}, "'api_key_file' cannot be read"),
        ({"api_key": "sk\nx"}, "'api_key' must fit into a header"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], reason: str) -> None:
    whole = {"base_url": "http://127.0.0.1:9/v1", **options} if options else {}
    with pytest.raises(EngineLoadError) as caught:
        load_engine(ModelSpec("m", "openai_upstream", options=whole))
    assert "Model 'm'" in str(caught.value)
    assert reason in str(caught.value)


def test_options_are_known_to_the_models_file() -> None:
    options = ENGINES["openai_upstream"].options.model_fields.keys()
    assert {"base_url", "api_key_env", "fields", "flavor"} <= options


def spec(**options: Any) -> ModelSpec:
    return ModelSpec("m", "openai_upstream", options=options)


def test_capabilities_are_those_of_the_flavor() -> None:
    assert {"chat", "completions", "tools", "grammar"} <= model_capabilities(spec())
    assert "chat_template" not in model_capabilities(spec())
    assert {"chat_template", "tokens", "render"} <= model_capabilities(spec(flavor="vllm"))
    assert "choices" not in model_capabilities(spec(flavor="ollama"))
    assert "mirostat" in model_capabilities(spec(flavor="llama_cpp"))
    assert "mirostat" not in model_capabilities(spec(flavor="vllm"))


def test_an_operator_declares_capabilities() -> None:
    declared = spec(flavor="vllm", capabilities=["embeddings", "dimensions"])
    assert model_capabilities(declared) == {"embeddings", "dimensions"}


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, None),
        ({"api_key": "sk-1"}, "Bearer sk-1"),
        ({"api_key_env": "UPSTREAM_KEY"}, "Bearer sk-2"),
        ({"api_key_file": "KEY_FILE"}, "Bearer sk-3"),
    ],
)
def test_the_key_comes_from_where_it_is_kept(
    server: UpstreamServer,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: dict[str, str],
    sent: str | None,
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-2")
    (tmp_path / "key").write_text("sk-3\n")
    options = {k: v.replace("KEY_FILE", str(tmp_path / "key")) for k, v in options.items()}
    load(**options, headers={"X-Tenant": "blue"}).run(HELLO, RecordingSink())
    assert server.asked[-1].headers.get("authorization") == sent
    assert server.asked[-1].headers["x-tenant"] == "blue"


def test_a_key_is_not_shown_when_the_options_are_printed(load: Load) -> None:
    told = repr(server_of(spec(base_url="http://h/v1", api_key="sk-1", headers={"a": "sk-1"})))
    assert "sk-1" not in told


def test_the_model_is_called_what_the_server_calls_it(server: UpstreamServer, load: Load) -> None:
    server.models = ["first", "org/Second-7B"]
    load(model="org/Second-7B").run(HELLO, RecordingSink())
    assert server.body["model"] == "org/Second-7B"


def test_the_only_model_needs_no_name(server: UpstreamServer, load: Load) -> None:
    server.models = ["/data/weights.gguf"]
    load().run(HELLO, RecordingSink())
    assert server.body["model"] == "/data/weights.gguf"


def test_ollama_leaves_latest_out(server: UpstreamServer, load: Load) -> None:
    server.models = ["llama3:latest", "other:latest"]
    load(model="llama3").run(HELLO, RecordingSink())
    assert server.body["model"] == "llama3"


def test_a_server_that_lists_no_models_has_the_one_that_the_entry_names(
    server: UpstreamServer, load: Load
) -> None:
    """``transformers serve`` lists those of its cache, and runs one of a folder."""
    server.models = []
    engine = load(model="/data/weights")
    engine.run(HELLO, RecordingSink())
    assert (engine.fault, server.body["model"]) == ("", "/data/weights")
    assert "but 0 others" in load().fault


def test_list_of_models_may_come_without_its_object(server: UpstreamServer, load: Load) -> None:
    """Together AI sends the list alone."""
    entries = [{"id": "org/a", "context_length": 4096}, {"id": "org/b"}]
    server.list_models = lambda talk: talk.say(200, json.dumps(entries).encode())
    engine = load(model="org/a")
    assert (engine.fault, engine.context_length) == ("", 4096)
    assert "but 2 others" in load(model="org/c").fault


@pytest.mark.parametrize("options", [{"model": "ghost"}, {}])
def test_a_model_the_server_does_not_have_cannot_be_run(
    server: UpstreamServer, load: Load, options: dict[str, str]
) -> None:
    server.models = ["one", "two"]
    fault = load(**options).fault
    assert "but 2 others" in fault
    assert "one" not in fault.split(), "people who choose the address read it on the model's page"
    assert f"{server.url}/models" in fault


def test_a_server_that_cannot_be_reached_cannot_be_used(load: Load) -> None:
    fault = load(base_url="http://127.0.0.1:9/v1").fault
    assert "http://127.0.0.1:9/v1/models cannot be reached" in fault


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (401, b"Wrong key sk-1", "status 401"),
        (404, b"{}", "status 404"),
        (200, b"<html>", "is no list of models"),
        (200, b'{"data": 5}', "is no list of models"),
    ],
)
def test_a_server_with_a_strange_list_of_models_cannot_be_used(
    server: UpstreamServer, load: Load, status: int, body: bytes, reason: str
) -> None:
    server.list_models = lambda talk: Talk.say(talk, status, body)
    fault = load(api_key="sk-1").fault
    assert reason in fault
    assert "sk-1" not in fault
    assert "Wrong key" not in fault, "the answer may be that of any service of the network"


def test_a_key_file_is_read_from_the_folder_of_the_models_file(tmp_path: Path) -> None:
    models_file = tmp_path / "models.yaml"
    entry = "{engine: openai_upstream, base_url: http://h/v1, api_key_file: secret/key}"
    models_file.write_text(f"models: {{m: {entry}}}")
    [found] = read_models_file(models_file)
    assert found.options["api_key_file"] == str(tmp_path / "secret" / "key")


def test_options_of_a_models_file_reach_the_server(tmp_path: Path) -> None:
    models_file = tmp_path / "models.yaml"
    models_file.write_text(
        """
        models:
          m:
            engine: openai_upstream
            base_url: http://h:8000/v1/
            flavor: vllm
            api_key: sk-1
            headers: {X-Number: 5}
            fields: {top_k: k, seed: null}
            connections: 3
        """
    )
    [found] = read_models_file(models_file)
    server = server_of(found)
    assert server.base_urls == ("http://h:8000/v1",)
    assert (server.key, server.headers) == ("sk-1", {"X-Number": "5"})
    assert server.fields["top_k"] == "k"
    assert "seed" not in server.fields


def test_endless_list_of_models_is_not_read_to_its_end(server: UpstreamServer, load: Load) -> None:
    sent = 0

    def answer(talk: Talk) -> None:
        nonlocal sent
        talk.begin("application/json")
        while sent < 200 * 2**20:
            talk.send(b" " * 2**20)
            sent += 2**20
        talk.end()

    server.list_models = answer
    assert load().fault.endswith("/v1/models is too long.")
    assert sent < 50 * 2**20  # The sockets' buffers hold some.
