"""The real thing for tests: ``manage.py serve`` in its own directory, with all its processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import psutil
import psycopg
import redis

from tests import migrated_postgres
from tests.manage_forks import Manage, manage_forks
from tests.ports import free_port
from tests.responses_api.validation import ClientCheck
from tests.waiting import pauses

ROOT = Path(__file__).resolve().parent.parent
MODELS = """
models:
  demo:
    file: {root}/worker/demo/demo-q8_0.gguf
    slots: 4
    threads: 1
    chat_template_kwargs: {{enable_thinking: false}}
    price: {{input: 2, cached: 1, output: 10}}
  scripted:
    engine: scripted
    slots: 4
    context_length: 5000
"""
MORE_MODELS = """
  demo-embedding:
    file: {root}/worker/demo/demo-q8_0.gguf
    embedding: mean
    matryoshka: true
    slots: 2
    threads: 1
    context_length: 256
  reranker:
    file: {adapters}/reranker.gguf
    embedding: rank
    slots: 2
    threads: 1
    context_length: 512
  tuned:
    file: {root}/worker/demo/demo-q8_0.gguf
    slots: 4
    threads: 1
    chat_template_kwargs: {{enable_thinking: false}}
    sampling: {{temperature: 0, presence_penalty: 2}}
    fim_tokens: ["Before: ", " After: ", " Between: "]
    lora_adapters: {{one: {adapters}/one.gguf, two: {adapters}/two.gguf}}
    projects: [default]
    aliases: [own-story]
"""


class ServedStack:
    """One running stack and the ways to look into it."""

    def __init__(self, data_dir: Path, port: int, env: Mapping[str, str]) -> None:
        self.data_dir, self.port = data_dir, port
        self.url = f"http://127.0.0.1:{port}"
        self.output = data_dir / "serve.out"
        kept = {k: v for k, v in os.environ.items() if k not in ("DATABASE_URL", "REDIS_URL")}
        kept["DJANGO_SETTINGS_MODULE"] = "tests.site_settings"
        self.env = {**kept, "DATA_DIR": str(data_dir), "REAL_MODEL": "false", **env}
        self.process: subprocess.Popen[bytes] | None = None
        self._clients: list[openai.OpenAI] = []
        self._database: psycopg.Connection[tuple[Any, ...]] | None = None
        self._database_lock = threading.Lock()
        self._opened = ExitStack()
        self._manage: Manage | None = None
        self.check = ClientCheck()

    def start(self, timeout_s: float = 300) -> None:
        """Start it and wait until it says that it is ready."""
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "serve", "--port", str(self.port)],
                cwd=ROOT,
                env=self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + timeout_s
        while "ready in" not in self.text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"serve did not get ready:\n{self.text()}")
            time.sleep(0.05)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Stop it; return how many seconds that took."""
        assert self.process is not None
        started = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(90)
        return time.monotonic() - started

    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def key(self) -> str:
        """The key of the first run."""
        return (self.data_dir / "api_key").read_text()

    @property
    def services(self) -> dict[str, str]:
        """Where its PostgreSQL and Redis are."""
        services: dict[str, str] = json.loads((self.data_dir / "services.json").read_text())
        return services

    def client(self, key: str | None = None) -> openai.OpenAI:
        """The official client; it does not retry. What it gets is checked against schemas."""
        client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key or self.key,
            max_retries=0,
            timeout=120,
            http_client=openai.DefaultHttpxClient(event_hooks={"response": [self.check.watch]}),
        )
        self._clients.append(client)
        return client

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Raise AssertionError at the end if it has sent what does not fit its schema."""
        yield
        found = self.check.violations
        violations, found[:] = list(found), []
        assert violations == [], violations

    def close_clients(self) -> None:
        """Close the connections of every client that was handed out, and that to the database.

        End the process of the management commands, too.
        """
        self._opened.close()
        self._manage = None
        for client in self._clients:
            client.close()
        if self._database is not None:
            self._database.close()
            self._database = None

    def http(self) -> httpx.Client:
        """A plain HTTP client that sends the key. What it gets is checked against schemas."""
        return httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=120,
            event_hooks={"response": [self.check.watch]},
        )

    def signed_in(self) -> httpx.Client:
        """A browser of the user whom the first run has made."""
        who = httpx.Client(base_url=self.url, follow_redirects=True, timeout=60)
        page = who.get("/admin/login/")
        found = re.search(r"user: admin +password: (\S+)", self.text())
        assert found is not None
        form = {"username": "admin", "password": found[1], **token(page)}
        who.post("/admin/login/?next=/admin/", data=form, headers={"Referer": str(page.url)})
        return who

    def row(self, public_id: str) -> dict[str, Any]:
        """The generation's row."""
        cursor = self._execute(
            "SELECT * FROM generations_generation WHERE public_id = %s", public_id
        )
        row = cursor.fetchone()
        assert row is not None, f"no row for {public_id}"
        assert cursor.description is not None
        return {column.name: value for column, value in zip(cursor.description, row, strict=True)}

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        """The rows of a statement."""
        cursor = self._execute(statement, *parameters)
        return cursor.fetchall() if cursor.description else []

    def _execute(self, statement: str, *parameters: Any) -> psycopg.Cursor[tuple[Any, ...]]:
        """Run it on a connection that is kept: a new one costs PostgreSQL more than most of them.

        Tests kill PostgreSQL, and cut connections: then it is another one.
        """
        with self._database_lock:
            if self._database is not None:
                try:
                    return self._database.execute(statement.encode(), parameters)
                except psycopg.OperationalError:
                    self._database.close()
            self._database = psycopg.connect(self.services["DATABASE_URL"], autocommit=True)
            return self._database.execute(statement.encode(), parameters)

    @contextmanager
    def file(self, name: str) -> Iterator[None]:
        """Have a file in the data directory, which the hooks of tests look for."""
        path = self.data_dir / name
        path.touch()
        try:
            yield
        finally:
            path.unlink()

    def redis(self) -> redis.Redis:
        """A client of its Redis."""
        return redis.Redis.from_url(self.services["REDIS_URL"])

    def model_reports(self, model: str) -> list[dict[str, Any]]:
        """What its workers last said of a model; they do every 2 s."""
        with self.redis() as client:
            # Beside the lease of a worker there is a hash of its unsent tokens.
            keys = [key for key in client.keys("worker:*") if not key.endswith(b":unsent")]
            leases: Any = [client.get(key) for key in keys]
        told = [one for lease in leases if lease for one in orjson.loads(lease)["models"]]
        return [one for one in told if one["id"] == model]

    def wait_served(self, model: str) -> None:
        """Wait until the model answers; after its worker was killed that takes a while."""
        client = self.client().with_options(max_retries=30)
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "x"}], max_tokens=1
        )

    def manage(self, *arguments: str) -> str:
        """The output of a management command, which finds the site's services by its directory.

        Raise CalledProcessError if it fails.
        """
        if self._manage is None:
            env = {**self.env, "SECRET_KEY": "only-for-this-command"}
            self._manage = self._opened.enter_context(manage_forks(env))
        done = self._manage(*arguments)
        try:
            done.check_returncode()
        except subprocess.CalledProcessError as exc:
            exc.add_note(f"{exc.stdout}{exc.stderr}")  # Else it says only that it failed.
            raise
        return done.stdout

    def pid_of(self, name: str) -> int:
        """The process id of ``web``, ``worker``, ``beat`` or ``redis``, as it is now."""
        marks = {"web": "manage.py web", "worker": "manage.py worker"}
        marks |= {"beat": "manage.py beat", "redis": "redis-server"}
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        for child in sorted(children, key=lambda child: child.create_time()):
            if _runs(child, marks[name]):
                return int(child.pid)
        raise AssertionError(f"{name} does not run")

    def server_of(self, model: str) -> psutil.Process:
        """The process that runs a model of llama.cpp, as it is now."""
        for process in psutil.Process(self.pid_of("worker")).children(recursive=True):
            with suppress(psutil.Error):
                if f"--alias {model} " in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"{model} has no server")

    def leftovers(self) -> list[psutil.Process]:
        """Every process that was started for this stack and still runs, whoever its parent is."""
        left = []
        for process in psutil.process_iter():
            try:
                is_own = process.environ().get("DATA_DIR") == str(self.data_dir)
                is_of_model = process.cwd() == str(self.data_dir / "model-servers")
                if (is_own or is_of_model) and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
            except psutil.Error:  # It has ended, or is somebody else's.
                continue
        return left

    def postgres_pid(self) -> int:
        """The process id of the postmaster."""
        return int((self.data_dir / "postgres" / "postmaster.pid").read_text().split()[0])


def _runs(process: psutil.Process, mark: str) -> bool:
    """Whether its command has this mark, and it has not ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and mark in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # It was gone between two looks.
        return False


def wait_until(condition: Any, timeout_s: float, what: str) -> float:
    """Return the seconds until the condition holds. Raise AssertionError past the timeout."""
    started = time.monotonic()
    for pause_s in pauses():
        if condition():
            break
        assert time.monotonic() - started < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(pause_s)
    return time.monotonic() - started


Surroundings = Callable[[Path], AbstractContextManager[Mapping[str, str]]]


@contextmanager
def _plain(_data_dir: Path) -> Iterator[Mapping[str, str]]:
    yield {}


def served_stack(
    models: str = "", around: Surroundings = _plain, /, **env: str
) -> AbstractContextManager[ServedStack]:
    """Run a stack in a directory of its own; stop it and what may be left of it at the end.

    ``models`` are entries of the models file beside ``demo`` and ``scripted``. ``around`` prepares
    the directory, cleans up after the stack, and returns more of its environment. It may find a
    database that is migrated (tests/migrated_postgres.py).
    """
    return _stack(models, around, env, is_new=False)


def new_stack(around: Surroundings = _plain, /, **env: str) -> AbstractContextManager[ServedStack]:
    """Run a stack that makes its database itself, as at a user's first start."""
    return _stack("", around, env, is_new=True)


@contextmanager
def _stack(
    models: str, around: Surroundings, env: Mapping[str, str], *, is_new: bool
) -> Iterator[ServedStack]:
    with tempfile.TemporaryDirectory(prefix="served-", ignore_cleanup_errors=True) as name:
        data_dir = Path(name)
        data_dir.chmod(0o755)  # PostgreSQL runs as a user of its own when the tests run as root.
        (data_dir / "models.yaml").write_text(MODELS.format(root=ROOT) + models)
        with around(data_dir) as more:
            if not is_new:
                migrated_postgres.copy_to(data_dir)
            # What a site has beside its models file costs each stack a process.
            beside = {"MODELS_FILE": str(data_dir / "models.yaml"), "DEMO_MODEL": "false"}
            env = {**beside, **more, **env}
            stack = ServedStack(data_dir, free_port(), env)
            try:
                stack.start()
                yield stack
            finally:
                stack.close_clients()
                if stack.process is not None and stack.process.poll() is None:
                    stack.stop()
                left = stack.leftovers()
                for process in left:
                    process.kill()
        assert left == [], "processes were left running"
        assert stack.check.violations == [], "what was sent does not fit its schema"


def token(page: httpx.Response) -> dict[str, str]:
    """The hidden field that a form of a page of the console sends."""
    found = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
    assert found is not None, page.text[:500]
    return {"csrfmiddlewaretoken": found[1]}


def generation_id(text: str) -> str:
    """The id of the generation that a stream's text belongs to."""
    found = re.search(r"chatcmpl-[0-9a-f]{32}", text)
    assert found, f"no id in {text!r}"
    return found.group()
