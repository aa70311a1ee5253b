"""The compared servers: the platform, llama.cpp's own, and LiteLLM in front of that."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.processes import CACHE, ROOT, TargetFailed, free_port, running, wait_for_ok

READY_TIMEOUT_S = 120
INSTALL_TIMEOUT_S = 900
# Pinned, so that results of different days compare the same gateway.
LITELLM = "litellm[proxy]==1.106.2"
LITELLM_KEY = "sk-benchmark"
LITELLM_ENVIRONMENT = {
    "LITELLM_TELEMETRY": "False",
    # Its price list comes from the package, not from the network.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    # llama.cpp closes an idle connection after 5 s: reusing one just then is an error 500.
    "AIOHTTP_KEEPALIVE_TIMEOUT": "2",
}


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A model file and how each target is to run it: ``slots`` sequences in one batch.

    Without ``threads`` the platform chooses for itself, and llama.cpp's own server has one.
    """

    name: str
    path: Path
    slots: int
    threads: int | None = 1
    context_length: int = 2048


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running target: its base URL (up to ``/v1``), an API key, and the process behind it.

    ``data_dir`` is the platform's.
    """

    url: str
    key: str
    model: str
    process: subprocess.Popen[bytes]
    data_dir: Path | None = None

    @property
    def database_url(self) -> str:
        """Where the platform's PostgreSQL is."""
        assert self.data_dir is not None
        services = json.loads((self.data_dir / "services.json").read_text())
        return str(services["DATABASE_URL"])


@contextmanager
def llama_cpp(served: ServedFile) -> Iterator[Endpoint]:
    """Run llama.cpp's own HTTP server in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.llama_server", "--file", str(served.path)]
    command += ["--port", str(port), "--slots", str(served.slots)]
    command += [
        "--context-length",
        str(served.context_length),
        "--threads",
        str(served.threads or 1),
    ]
    with running("llama_cpp", command, {}) as process:
        wait_for_ok("llama_cpp", f"http://127.0.0.1:{port}/health", process, READY_TIMEOUT_S)
        yield Endpoint(f"http://127.0.0.1:{port}/v1", "none", served.name, process)


@contextmanager
def platform(served: ServedFile) -> Iterator[Endpoint]:
    """Run the product on the same file."""
    entry: dict[str, object] = {
        "engine": "llama_cpp",
        "file": str(served.path),
        "slots": served.slots,
        "context_length": served.context_length,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    if served.threads:
        entry["threads"] = served.threads
    with platform_with({served.name: entry}) as endpoint:
        yield endpoint


@contextmanager
def platform_with(
    models: Mapping[str, Mapping[str, object]], settings: Mapping[str, str] | None = None
) -> Iterator[Endpoint]:
    """Run the product with a fresh data folder, these entries of its models file, and settings.

    With a DATABASE_URL, which may have keys already, there is no first key.
    """
    port, data = free_port(), Path(tempfile.mkdtemp(prefix="bench-"))
    models_file = data / "models.yaml"
    models_file.write_text(yaml.safe_dump({"models": dict(models)}))
    environment = {"DATA_DIR": str(data), "MODELS_FILE": str(models_file), "DEMO_MODEL": "false"}
    environment |= settings or {}
    command = [sys.executable, "manage.py", "serve", "--host", "127.0.0.1", "--port", str(port)]
    try:
        with running("platform", command, environment, mark=str(data)) as process:
            ready = f"http://127.0.0.1:{port}/health/ready"
            wait_for_ok("platform", ready, process, READY_TIMEOUT_S)
            key = "" if "DATABASE_URL" in environment else _first_key(data, process)
            yield Endpoint(f"http://127.0.0.1:{port}/v1", key, next(iter(models)), process, data)
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _first_key(data: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the key that ``serve`` makes after the tables; on a busy host the site is ready first.

    Raise TargetFailed if it ends without one.
    """
    file = data / "api_key"
    while not file.exists() or not (key := file.read_text().strip()):
        if process.poll() is not None:
            raise TargetFailed(f"serve ended without a key: {process.returncode}")
        time.sleep(0.05)
    return key


@contextmanager
def litellm(served: ServedFile) -> Iterator[Endpoint]:
    """Run the LiteLLM proxy, one worker, in front of llama.cpp's own server."""
    with llama_cpp(served) as upstream, litellm_before(upstream) as endpoint:
        yield endpoint


@contextmanager
def litellm_before(upstream: Endpoint, program: Path | None = None) -> Iterator[Endpoint]:
    """Run the LiteLLM proxy, one worker, in front of a server; install it if it is missing."""
    program = program or install_litellm()
    CACHE.mkdir(parents=True, exist_ok=True)
    port, config = free_port(), CACHE / "litellm.yaml"
    config.write_text(yaml.safe_dump(litellm_config(upstream)))
    command = [str(program), "--config", str(config), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1"]
    with running("litellm", command, LITELLM_ENVIRONMENT) as process:
        live = f"http://127.0.0.1:{port}/health/liveliness"
        wait_for_ok("litellm", live, process, READY_TIMEOUT_S)
        yield Endpoint(f"http://127.0.0.1:{port}/v1", LITELLM_KEY, upstream.model, process)


def litellm_config(upstream: Endpoint) -> dict[str, object]:
    parameters = {"model": f"openai/{upstream.model}", "api_base": upstream.url, "api_key": "none"}
    return {
        "model_list": [{"model_name": upstream.model, "litellm_params": parameters}],
        "general_settings": {"master_key": LITELLM_KEY},
    }


def install_litellm() -> Path:
    """Return LiteLLM's program, from a virtual environment of its own, created if it is missing."""
    folder = CACHE / "litellm"
    done = folder / LITELLM
    if not done.exists():
        print(f"Installing {LITELLM} into {folder.relative_to(ROOT)} …", file=sys.stderr)
        python = str(folder / "bin" / "python")
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [python, "-m", "pip", "install", "--quiet", LITELLM],
        ):
            subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S)
        done.touch()
    return folder / "bin" / "litellm"


TARGETS = {"llama_cpp": llama_cpp, "litellm": litellm, "platform": platform}
