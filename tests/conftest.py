"""Fixtures for all tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.conf import global_settings, settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project
from tests import emptied_tables
from tests.image_server import ImageServer
from tests.order import SHARED
from tests.ports import free_port
from tests.served_stack import ROOT, ServedStack, served_stack
from tests.upstream_server import UpstreamServer


def pytest_configure() -> None:
    """Have Django do quickly, in the processes of the tests, what many of them ask it for.

    Usually a password takes half a second to be hashed, and each test client, whose middleware
    looks for all static files, a tenth of that to be made.
    """
    quick = "django.contrib.auth.hashers.MD5PasswordHasher"
    settings.PASSWORD_HASHERS = [quick, *global_settings.PASSWORD_HASHERS]
    settings.WHITENOISE_AUTOREFRESH = True
    emptied_tables.use_it()


SEEING = """
  seeing:
    engine: openai_upstream
    base_url: {url}
    model: m
    capabilities: [chat, vision]
    slots: 2
"""


@pytest.fixture(scope="session")
def seeing() -> Iterator[UpstreamServer]:
    """The server of the plain stack's model ``seeing``, which takes images."""
    with UpstreamServer().running() as server:
        yield server


@pytest.fixture(scope="session")
def plain_stack(seeing: UpstreamServer, pytestconfig: pytest.Config) -> ServedStack:
    """The whole product, running, for tests/browser and tests/contract, which share a process."""
    env = {"KEEP_ALIVE_INTERVAL": "400"}
    env |= {"EMAIL_HOST": "127.0.0.1", "EMAIL_PORT": str(free_port())}
    models = SEEING.format(url=seeing.url)
    return pytestconfig.stash[SHARED].enter_context(
        served_stack(models, WEBHOOKS_ALLOW_PRIVATE="true", **env)
    )


ROUTES = f"""
  small: {{engine: scripted, slots: 4, context_length: 300, price: {{output: 1000000}}}}
  large: {{engine: scripted, slots: 16, context_length: 9000}}
  held: {{engine: scripted, slots: 1, context_length: 9000}}
  own: {{file: {ROOT}/worker/demo/demo-q8_0.gguf, slots: 2, threads: 1, context_length: 512}}
  vectors: {{file: {ROOT}/worker/demo/demo-q8_0.gguf, embedding: mean, slots: 1, threads: 1,
    context_length: 256}}
  away: {{engine: openai_upstream, base_url: "http://127.0.0.1:9/v1", context_length: 9000}}
  hidden: {{engine: scripted, projects: [nobody]}}
  chat: {{route: [{{model: small, weight: 80}}, {{model: large, weight: 20}}], fallback: [large]}}
  down: {{route: [{{model: away}}], fallback: [vectors, large]}}
  lost: {{route: [{{model: away}}, {{model: hidden, weight: 0}}]}}
  wary: {{route: [{{model: held}}], fallback: [large], max_queue_s: 0.5}}
  dies: {{route: [{{model: own}}], fallback: [large]}}
  embeds: {{route: [{{model: away}}], fallback: [vectors]}}
  dies-not: {{route: [{{model: away}}], fallback: [large]}}
  plain: {{route: [{{model: large}}]}}
  none-for-you: {{route: [{{model: hidden}}]}}
"""


@pytest.fixture(scope="session")
def routes_stack(pytestconfig: pytest.Config) -> ServedStack:
    """The whole product with routes, for what tests/order.py names beside e2e/test_routes.py.

    It refuses unknown fields, of which requests for routes have none, and its worker sends events.
    """
    names = "scripted,small,large,held,own,vectors,away,hidden"
    env = {"SERVER_WAIT_S": "2", "START_MODELS": names, "STRICT_FIELDS": "true"}
    env |= {"TASK_EVENTS": "true", "DRAIN_TIMEOUT_S": "60"}
    return pytestconfig.stash[SHARED].enter_context(served_stack(ROUTES, **env))


PLAYED = """
  searcher:
    engine: openai_upstream
    base_url: {searcher}
    context_length: 65536
    slots: 4
  reader:
    engine: openai_upstream
    base_url: {reader}
    context_length: 65536
    slots: 4
  player:
    engine: openai_upstream
    base_url: {player}
    flavor: vllm
    context_length: 65536
    slots: 4
  judge:
    engine: openai_upstream
    base_url: {judge}
    capabilities: [moderation]
    slots: 2
  demo-embedding:
    file: {root}/worker/demo/demo-q8_0.gguf
    embedding: mean
    slots: 2
    threads: 1
    context_length: 512
"""
CALLS_MAX = 4
"""Calls of tools of the site that an answer may make there."""


@dataclass(frozen=True)
class ToolsStack:
    """A stack with tools of the site, the servers of its models, and that of its web."""

    stack: ServedStack
    searcher: UpstreamServer
    reader: UpstreamServer
    player: UpstreamServer
    judge: UpstreamServer
    web: ImageServer


@pytest.fixture(scope="session")
def tools_stack(pytestconfig: pytest.Config) -> ToolsStack:
    """The whole product with web search, file search and MCP servers.

    For tests/web_search, tests/vector_stores and what tests/order.py names beside them: they share
    a process. The web is searched with a server like SearXNG; the embedding model is the demo's.
    """
    return pytestconfig.stash[SHARED].enter_context(_tools_stack())


@contextmanager
def _tools_stack() -> Iterator[ToolsStack]:
    with (
        UpstreamServer().running() as searcher,
        UpstreamServer().running() as reader,
        UpstreamServer().running() as player,
        UpstreamServer().running() as judge,
        ImageServer().running() as web,
    ):
        models = PLAYED.format(
            searcher=searcher.url, reader=reader.url, player=player.url, judge=judge.url, root=ROOT
        )
        with served_stack(
            models,
            START_MODELS="searcher,reader,player,judge,demo,demo-embedding",
            WEB_SEARCH_PROVIDER="searxng",
            WEB_SEARCH_URL=web.url(""),
            WEB_SEARCH_ALLOW_PRIVATE="true",
            EMBEDDING_MODEL="demo-embedding",
            MAX_DOCUMENT_BYTES="2000000",
            MCP_ALLOWED_HOSTS="127.0.0.1",
            MCP_ALLOWED_NETWORKS="127.0.0.0/8",
            TOOL_TIMEOUT_S="12",
            TOOL_CALLS_MAX=str(CALLS_MAX),
            TOOL_PRICES='{"web_search": 0.25, "mcp:test": 8}',
        ) as stack:
            yield ToolsStack(stack, searcher, reader, player, judge, web)


@pytest.fixture
def folder(settings: Any, tmp_path: Path) -> Path:
    """The folder of the files' content."""
    files = {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        "OPTIONS": {"location": str(tmp_path / "files")},
    }
    settings.STORAGES = {**settings.STORAGES, "files": files}
    return tmp_path / "files"


@pytest.fixture
def project(db: None) -> Project:
    """A tenant."""
    return Project.objects.create(name="owner")


@pytest.fixture
def api_key(project: Project) -> tuple[ApiKey, str]:
    """A key of the tenant, and its secret."""
    return create_key(project, "test")


@pytest.fixture
def admin(db: None) -> Client:
    """A browser in which a superuser is logged in."""
    return _logged_in(get_user_model().objects.create_superuser("admin", ""))


AtTheSameMoment = Callable[[type[Any], Callable[[], object]], None]


@pytest.fixture
def at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> AtTheSameMoment:
    """Has another connection do something after the next form is checked, before it is saved.

    The form is one of the given class of admin.
    """

    def arrange(admin_class: type[Any], do: Callable[[], object]) -> None:
        kept = admin_class.save_model

        def do_and_close() -> None:
            do()
            connection.close()

        def save_after_it(*given: Any) -> None:
            monkeypatch.undo()
            other = threading.Thread(target=do_and_close)
            other.start()
            other.join()
            kept(*given)

        monkeypatch.setattr(admin_class, "save_model", save_after_it)

    return arrange


@pytest.fixture
def staff(db: None) -> Callable[..., Client]:
    """Makes the browser of a member of the staff with these permissions, as ``app.codename``."""

    def make(*permissions: str) -> Client:
        user = get_user_model().objects.create_user(f"staff {permissions}", is_staff=True)
        for permission in permissions:
            app, codename = permission.split(".")
            found = Permission.objects.get(content_type__app_label=app, codename=codename)
            user.user_permissions.add(found)
        return _logged_in(user)

    return make


def _logged_in(user: object) -> Client:
    browser = Client()
    browser.force_login(user)  # type: ignore[arg-type]  # The user model of the settings.
    return browser
