"""One stack for the tests of this folder, with hooks and in front of other servers too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.gguf_files import metadata
from tests.ports import free_port
from tests.served_stack import MORE_MODELS, ROOT, ServedStack, served_stack
from tests.tiny_weights import write_adapter, write_reranker
from tests.upstream_server import UpstreamServer, llama_server

SHARE_OF_REDIS = 24 * 1024 * 1024
MAX_FILE_BYTES = 8 * 1024 * 1024
ODD_CONTEXT = 8192
"""What the server of the model ``odd`` says; its entry says nothing."""
OTHER_MODELS = """
  hooked:
    engine: scripted
    slots: 4
    context_length: 5000
  hooked-demo:
    file: {file}
    chat_template: {template}
    slots: 4
    threads: 1
    chat_template_kwargs: {{enable_thinking: false}}
  remote:
    engine: openai_upstream
    base_url: {llama}
    flavor: llama_cpp
    slots: 2
    context_length: 512
  told:
    file: {file}
    prompt_templates: {{bare: {bare}}}
    chat_template: {template}
    slots: 2
    threads: 1
    context_length: 1024
    tool_format: hermes
    force_enable_thinking: true
    stop_texts: [", 9"]
    forced_sampling: {{temperature: 0}}
  old:
    engine: ctransformers
    prompt_templates: {{bare: {bare}}}
    file: {file}
    chat_template: {template}
    slots: 1
    threads: 1
    context_length: 512
    chat_template_kwargs: {{enable_thinking: false}}
  odd:
    engine: openai_upstream
    base_url: {odd}
    api_key_env: ODD_KEY
    slots: 4
  seeing:
    engine: openai_upstream
    base_url: {odd}
    model: odd
    capabilities: [chat, vision]
    slots: 4
  judge:
    engine: openai_upstream
    base_url: {odd}
    model: odd
    capabilities: [moderation, vision]
    aliases: [omni-moderation-latest]
    price: {{input: 3, cached: 1, output: 10}}
    slots: 4
  guard:
    engine: openai_upstream
    base_url: {odd}
    model: odd
    guard: llama_guard
    slots: 4
  seeing-guard:
    engine: openai_upstream
    base_url: {odd}
    model: odd
    capabilities: [chat, vision]
    guard: llama_guard
    slots: 2
  told-guard:
    engine: scripted
    guard: qwen3_guard
    slots: 2
    context_length: 5000
  wide:
    engine: scripted
    slots: 2
    context_length: 65536
  sounds:
    engine: openai_upstream
    base_url: {odd}
    model: odd
    capabilities: [speech, transcription, translation]
    price: {{input: 2, cached: 1, output: 10}}
    slots: 4
  ranker:
    engine: openai_upstream
    base_url: {odd}
    model: odd
    capabilities: [rerank]
    price: {{input: 4, cached: 1, output: 10}}
    slots: 4
  judges:
    route: [{{model: judge}}]
    listed: false
  rankers:
    route: [{{model: ranker}}]
    listed: false
  away:
    engine: openai_upstream
    base_urls: [{away}, "http://127.0.0.1:9/v1"]
    slots: 4
    check_every_s: 0.5
"""


@pytest.fixture(scope="package")
def odd() -> Iterator[UpstreamServer]:
    """A server that does what it is told."""
    server = UpstreamServer()
    server.models, server.context_length = ["odd"], ODD_CONTEXT
    with server.running():
        yield server


@pytest.fixture(scope="package")
def away_port() -> int:
    """Where a server of the model ``away`` may be started; none is when the product starts."""
    return free_port()


@pytest.fixture(scope="package")
def hook_notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``ON_DONE`` writes what it has seen."""
    return tmp_path_factory.mktemp("hooks") / "notes"


def stopping_template(path: Path) -> Path:
    """Write the demo's chat template with a stop text of its own, and a short one."""
    own = dict(metadata(DEMO_FILE))["tokenizer.chat_template"]
    path.with_name("bare.jinja").write_text("Q: {{ messages[-1].content }} A:")
    path.write_text(f'{{%- set stop_strings = ["Tokyo"] -%}}{own}')
    return path


RERANKED_WORDS = [
    *("what", "is", "the", "a", "capital", "of", "japan", "norway", "tokyo", "oslo"),
    *("pirate", "tells", "story"),
]
"""The vocabulary of the model ``reranker``."""


@pytest.fixture(scope="package")
def models(
    tmp_path_factory: pytest.TempPathFactory, odd: UpstreamServer, away_port: int
) -> Iterator[str]:
    """The entries of the models file; what serves them elsewhere runs meanwhile."""
    adapters = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        write_adapter(adapters / f"{name}.gguf", seed)
    write_reranker(adapters / "reranker.gguf", RERANKED_WORDS)
    with llama_server(slots=2, context_length=512) as llama:
        yield MORE_MODELS.format(root=ROOT, adapters=adapters) + OTHER_MODELS.format(
            llama=llama,
            odd=odd.url,
            away=f"http://127.0.0.1:{away_port}/v1",
            file=DEMO_FILE,
            template=stopping_template(adapters / "stopping.jinja"),
            bare=adapters / "bare.jinja",
        )


@pytest.fixture(scope="package")
def stack(models: str, hook_notes: Path) -> Iterator[ServedStack]:
    """The whole product, running, with hooks that act on two models alone."""
    hooks = {name: f"tests.hook_functions.{name.lower()}" for name in ("ON_CHUNK", "ON_DONE")}
    short = {"KEEP_ALIVE_INTERVAL": "400", "CONVERSATION_LOCK_WAIT_S": "1"}
    env = {
        **hooks,
        **short,
        "IDEMPOTENCY_KEYS": "40",
        "SERVER_WAIT_S": "4",
        "PROJECT_REDIS_BYTES": str(SHARE_OF_REDIS),
        "MAX_FILE_BYTES": str(MAX_FILE_BYTES),
        "FILE_BYTES_PER_PROJECT": str(5 * MAX_FILE_BYTES // 2),
        "ODD_KEY": "sk-of-the-operator",
        "MEDIA_ALLOW_PRIVATE": "true",
        "MEDIA_ALLOWED_HOSTS": "127.0.0.1",
    }
    env["CORS_ALLOWED_ORIGINS"] = "https://app.example, http://localhost:5173"
    with served_stack(
        models, **env, HOOK_NOTES=str(hook_notes), WEBHOOKS_ALLOW_PRIVATE="true"
    ) as running:
        yield running


@pytest.fixture(scope="package")
def other_stack(stack: ServedStack) -> ServedStack:
    """The same, for tests of hooks and of models of other servers."""
    return stack


@pytest.fixture(autouse=True)
def _checked(stack: ServedStack) -> Iterator[None]:
    """Fail a test in which the server sent what does not fit its schema."""
    with stack.checked():
        yield


@pytest.fixture(autouse=True)
def _answers_as_before(odd: UpstreamServer) -> Iterator[None]:
    """Have the server of the model ``odd`` answer other tests as it did."""
    before = odd.answers
    yield
    odd.answers = before


@pytest.fixture(scope="package")
def client(stack: ServedStack) -> openai.OpenAI:
    """The official client."""
    return stack.client()


@pytest.fixture(scope="package")
def http(stack: ServedStack) -> Iterator[httpx.Client]:
    """A plain HTTP client with a valid key."""
    with stack.http() as plain:
        yield plain
