"""The real clients: how each is installed into ``var/clients``, told of the site, and run.

Most run a script of ``scripts/`` in their own environment; agents and applications are told what
docs/agents.md says, and run as their users run them, in a folder of their own. A run returns its
steps with what went wrong in each, and nothing for a step that worked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import yaml

from tests.clients.documented import documented, variables_and_command
from tests.ports import free_port
from tests.served_stack import ROOT

FOLDER = ROOT / "var" / "clients"
SCRIPTS = Path(__file__).parent / "scripts"
MODEL, SMALL = "played", "smollm2"
_INSTALL_S, _RUN_S, _AGENT_RUN_S = 900, 300, 1800
_MADE = "made.txt"
_SAY_DONE = "SAY All done."
_RESUMED = ("resume", "--last")
_FILLER = "word " * 20_000  # Three of these do not fit into the context of the played model.
_QUESTION, _ANSWER = "Which city is the capital of France?", "Paris"
PICTURE, SEEN = SCRIPTS / "picture.png", "I see 64 x 48."

Steps = dict[str, str]


@dataclass(frozen=True)
class Site:
    """Where the site is, a key for it, and its model that drives agents, if it has one."""

    url: str
    key: str
    agent: str = ""

    @property
    def env(self) -> dict[str, str]:
        """What a script is told."""
        told = {"SITE_URL": self.url, "SITE_KEY": self.key}
        told |= {"SITE_MODEL": MODEL, "SITE_SMALL_MODEL": SMALL}
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
        return kept | told | {"NO_PROXY": "127.0.0.1", "DO_NOT_TRACK": "1"}

    @property
    def run_s(self) -> float:
        """How long an agent may run: a model reads its tools for minutes."""
        return _AGENT_RUN_S if self.agent else _RUN_S

    def documented(self, section: str, model: str = MODEL) -> str:
        """What docs/agents.md has a client be told of this site."""
        return documented(section, self.url, self.key, model)

    def documented_command(
        self, section: str, program: Path, model: str = MODEL
    ) -> tuple[dict[str, str], list[str]]:
        """The variables and the command of such a section; the program is the installed one."""
        env, command = variables_and_command(self.documented(section, model))
        return env, [str(program), *command[1:]]


@dataclass(frozen=True)
class Client:
    """A client: its packages in a registry, what it speaks, and how it is run."""

    name: str
    registry: str
    packages: tuple[str, ...]
    protocols: str
    run: Callable[[Site, Path], Steps]
    also: str = ""
    is_recorded: bool = False

    @property
    def title(self) -> str:
        """Its name in the table, with that of a library that is run inside it."""
        return ", ".join(filter(None, (self.name, self.also)))

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        return FOLDER / self.name

    def install(self) -> str:
        """Install it if it is not there yet; return its version. Raise CalledProcessError."""
        python, done = self.folder / "bin" / "python", self.folder / ".installed"
        if not done.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            if self.registry == "PyPI":
                _sh([sys.executable, "-m", "venv", str(self.folder)], self.folder)
                _sh([str(python), "-m", "pip", "install", "-q", *self.packages], self.folder)
            else:
                (self.folder / "package.json").write_text('{"private": true}')
                _sh(["npm", "install", "--no-audit", "--no-fund", *self.packages], self.folder)
            done.touch()
        main = re.split(r"[\[<=>]", self.packages[0])[0]
        if self.registry == "PyPI":
            code = f"from importlib.metadata import version; print(version({main!r}))"
            return _sh([str(python), "-c", code], self.folder).strip()
        installed = self.folder / "node_modules" / main / "package.json"
        return str(json.loads(installed.read_text())["version"])


def _sh(
    command: list[str],
    folder: Path,
    env: Mapping[str, str] | None = None,
    text: str = "",
    timeout_s: float = _INSTALL_S,
) -> str:
    """Return what a command prints. Raise CalledProcessError or TimeoutExpired."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=env and dict(env),
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return done.stdout


def _script(name: str) -> Callable[[Site, Path], Steps]:
    """Return what runs a script of ``scripts/`` and reads the steps that it prints."""

    def run(site: Site, folder: Path) -> Steps:
        installed = FOLDER / folder.name
        for script in SCRIPTS.iterdir():
            if script.is_file():
                shutil.copy(script, installed / script.name)
        runner = str(installed / "bin" / "python") if name.endswith(".py") else "node"
        env = {**site.env, "HOME": str(folder)}
        said = _sh([runner, str(installed / name)], folder, env, timeout_s=_RUN_S)
        lines = (line.removeprefix("STEP ") for line in said.splitlines() if "STEP {" in line)
        return {step["step"]: step["error"] for step in map(json.loads, lines)}

    return run


def _codex(site: Site, folder: Path) -> Steps:
    """Run OpenAI's Codex: its tools, one of an MCP server, an image, a session and its summary."""
    python = sys.executable  # It has the SDK of MCP, which the platform uses too.
    (folder / "config.toml").write_text(
        f"{site.documented('Codex')}\n[mcp_servers.weather]\n"
        f'command = "{python}"\nargs = ["{SCRIPTS / "weather_server.py"}"]\n'
        "startup_timeout_sec = 60\n"
    )
    env = {**site.env, "CODEX_HOME": str(folder), "HOME": str(folder)}
    binary = str(_bin("codex", "codex"))
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")

    def ask(prompt: str, *options: str, resume: tuple[str, ...] = ()) -> str:
        """Return its last message; what it prints repeats the prompt."""
        last = folder / "last.txt"
        command = [binary, "exec", *options, *flags, "--output-last-message", str(last)]
        said = _sh([*command, *resume, prompt], folder, env, timeout_s=site.run_s)
        return last.read_text() or said

    patch = "*** Begin Patch\n*** Add File: patched.txt\n+patched\n*** End Patch\n"
    applied = f"apply_patch <<'EOF'\n{patch}EOF"
    call = json.dumps({"cmd": applied})
    return _steps(
        {
            "command": lambda: _made(folder, ask(_command("exec_command", "cmd"))),
            "patch applied to a file": lambda: _made(
                folder, ask(f"Please.\nCALL exec_command {call}\n{_SAY_DONE}"), "patched.txt"
            ),
            "MCP tool": lambda: _holds(
                ask(_weather("exec_command", {"cmd": "sleep 8"})), "sunny in Oslo"
            ),
            "session resumed": lambda: _holds(ask("Go on.", resume=_RESUMED), "sunny in Oslo"),
            "plan": lambda: _plans(folder, ask),
            "image": lambda: _holds(ask("SEE images", "-i", str(PICTURE)), SEEN),
            "compaction": lambda: _compacts(folder, ask),
            **_answers(site, lambda: ask(_QUESTION, "-m", site.agent)),
        }
    )


def _plans(folder: Path, ask: Callable[..., str]) -> None:
    """Have a plan made, for which Codex has a tool only where that is asked for."""
    plan = json.dumps({"plan": [{"step": "look around", "status": "in_progress"}]})
    asked = f"Please.\nCALL update_plan {plan}\n{_SAY_DONE}"
    _holds(ask(asked, "-c", "tools.update_plan.enabled=true"), "All done.")
    assert "Plan updated" in _codex_log(folder), "no plan was updated"


def _compacts(folder: Path, ask: Callable[..., str]) -> None:
    """Resume the session with a limit that it is past."""
    limit = ("-c", "model_auto_compact_token_limit=10")
    _holds(ask("SAY After it.", *limit, resume=_RESUMED), "After it.")
    assert '"type":"compacted"' in _codex_log(folder), "nothing was compacted"


def _codex_log(folder: Path) -> str:
    """What Codex notes of all its sessions."""
    return "".join(log.read_text() for log in sorted((folder / "sessions").rglob("*.jsonl")))


def _claude_code(site: Site, folder: Path) -> Steps:
    """Run Claude Code: its tools, one of an MCP server, an image, a session and its summary."""
    binary = _bin("claude-code", "claude")
    told, claude = site.documented_command("Claude Code", binary)
    env = site.env | told | {"HOME": str(folder), "IS_SANDBOX": "1"}
    env |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    python = sys.executable
    server = {"command": python, "args": [str(SCRIPTS / "weather_server.py")]}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"weather": server}}))

    def ask(prompt: str, *flags: str) -> str:
        command = [*claude, "-p", "--dangerously-skip-permissions", *flags]
        return _sh(command, folder, env, prompt, timeout_s=site.run_s)

    path = folder / "written.txt"
    write = json.dumps({"file_path": str(path), "content": "written\n"})
    read = json.dumps({"file_path": str(PICTURE)})
    return _steps(
        {
            "command": lambda: _made(folder, ask(_command("Bash", "command", described=True))),
            "file written": lambda: _made(
                folder, ask(f"Please.\nCALL Write {write}\n{_SAY_DONE}"), path.name
            ),
            "MCP tool": lambda: _holds(
                ask(
                    _weather("Bash", {"command": "sleep 8", "description": "wait"}),
                    "--mcp-config",
                    str(folder / "mcp.json"),
                ),
                "sunny in Oslo",
            ),
            "session resumed": lambda: _holds(ask("Go on.", "--continue"), "sunny in Oslo"),
            "image read": lambda: _holds(ask(f"Please.\nCALL Read {read}\nSEE images"), SEEN),
            "compaction": lambda: _outgrows(ask),
            **_answers(site, lambda: ask(_QUESTION, "--model", site.agent)),
        }
    )


def _opencode(site: Site, folder: Path) -> Steps:
    """Run opencode: a command, a file that is written and edited, and a resumed session."""
    config = json.loads(site.documented("opencode")) | {"permission": "allow"}
    models = config["provider"]["site"]["models"]
    models |= {site.agent: models[MODEL]} if site.agent else {}
    (folder / "opencode.json").write_text(json.dumps(config))
    binary = str(_bin("opencode", "opencode"))
    env = {**site.env, "HOME": str(folder)}

    def ask(prompt: str, *flags: str) -> str:
        return _sh([binary, "run", *flags], folder, env, prompt, timeout_s=site.run_s)

    def edited() -> None:
        said = ask(f"Please.\nCALL write {write}\nCALL edit {edit}\n{_SAY_DONE}")
        _made(folder, said, path.name)
        assert path.read_text() == "edited\n"

    asked = _command("bash", "command", described=True)
    path = folder / "written.txt"
    write = json.dumps({"filePath": str(path), "content": "written\n"})
    edit = json.dumps({"filePath": str(path), "oldString": "written", "newString": "edited"})
    return _steps(
        {
            "command": lambda: _made(folder, ask(asked)),
            "file written and edited": edited,
            "session resumed": lambda: _holds(ask("Go on.", "--continue"), "The tool said"),
            **_answers(site, lambda: ask(_QUESTION, "--model", f"site/{site.agent}")),
        }
    )


def _qwen_code(site: Site, folder: Path) -> Steps:
    """Run Qwen Code: a command, a resumed session, and an answer with a schema."""
    told, qwen = site.documented_command("Qwen Code", _bin("qwen-code", "qwen"))
    env = {**site.env, **told, "HOME": str(folder)}

    def ask(prompt: str, *flags: str) -> str:
        command = [*qwen, "--yolo", *flags, "--prompt", prompt]
        return _sh(command, folder, env, timeout_s=_RUN_S)

    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    call = 'CALL structured_output {"name": "Ann"}'
    return _steps(
        {
            "command": lambda: _made(
                folder, ask(_command("run_shell_command", "command", described=True))
            ),
            "session resumed": lambda: _holds(ask("Go on.", "--continue"), "The tool said"),
            "structured output": lambda: _holds(
                ask(f"Please.\n{call}", "--json-schema", json.dumps(schema)), '"Ann"'
            ),
        }
    )


def _cline(site: Site, folder: Path) -> Steps:
    """Run Cline: a command."""
    _, auth = site.documented_command("Cline", _bin("cline", "cline"))
    data = ["--data-dir", str(folder / "data")]
    env = {**site.env, "HOME": str(folder)}
    call = json.dumps({"commands": [f"echo made > {_MADE}"]})
    prompt = f"Please.\nCALL run_commands {call}\n{_SAY_DONE}"

    def command() -> None:
        _sh([*auth, *data], folder, env, timeout_s=_RUN_S)
        _made(folder, _sh([auth[0], *data, prompt], folder, env, timeout_s=_RUN_S))

    return _steps({"command": command})


def _continue(site: Site, folder: Path) -> Steps:
    """Run Continue: a command, and a resumed session."""
    config = folder / "config.yaml"
    config.write_text(site.documented("Continue"))
    program = [str(_bin("continue", "cn")), "--config", str(config), "--auto"]
    env = {**site.env, "HOME": str(folder), "CONTINUE_TELEMETRY_ENABLED": "0"}

    def ask(prompt: str, *flags: str) -> str:
        return _sh([*program, *flags, "-p", prompt], folder, env, timeout_s=_RUN_S)

    return _steps(
        {
            "command": lambda: _made(folder, ask(_command("Bash", "command"))),
            "session resumed": lambda: _holds(ask("Go on.", "--resume"), "The tool said"),
        }
    )


def _pi(site: Site, folder: Path) -> Steps:
    """Run pi with each API: a command, an image that it reads, and the summary of a session."""
    models = folder / ".pi" / "agent" / "models.json"
    models.parent.mkdir(parents=True)
    [provider] = json.loads(site.documented("pi"))["providers"].values()
    apis = {
        "chat completions": {"api": "openai-completions"},
        "responses": {"api": "openai-responses"},
        "messages": {"api": "anthropic-messages", "baseUrl": site.url},
    }
    named = {api.replace(" ", "-"): {**provider, **more} for api, more in apis.items()}
    models.write_text(json.dumps({"providers": named}))
    env = {**site.env, "HOME": str(folder), "PI_OFFLINE": "1"}
    shutil.copy(PICTURE, folder)
    read = json.dumps({"path": PICTURE.name})

    def ask(api: str, prompt: str, *flags: str) -> str:
        program = [str(_bin("pi", "pi")), "--provider", api.replace(" ", "-"), "--model", MODEL]
        return _sh([*program, *flags, "-p"], folder, env, prompt, timeout_s=_RUN_S)

    def works(api: str) -> None:
        call = json.dumps({"command": f"echo made > {_MADE}"})
        said = ask(api, f"Please.\nCALL bash {call}\nCALL read {read}\nSEE images")
        _holds(said, SEEN)
        (folder / _MADE).unlink()

    steps: dict[str, Callable[[], None]] = {}
    for api in apis:
        steps[f"{api}: command, image read"] = partial(works, api)
        steps[f"{api}: compaction"] = partial(_outgrows, partial(ask, api))
    return _steps(steps)


def _copilot(site: Site, folder: Path) -> Steps:
    """Run GitHub's Copilot CLI with each API: a command, and a session with a summary."""
    told, program = site.documented_command("Copilot CLI", _bin("copilot", "copilot"))
    apis = {
        "chat completions": {"WIRE_API": "completions"},
        "responses": {"WIRE_API": "responses"},
        "responses over a WebSocket": {"WIRE_API": "responses", "TRANSPORT": "websockets"},
        "messages": {"TYPE": "anthropic", "BASE_URL": site.url},
    }

    def ask(api: str, prompt: str, *flags: str) -> str:
        chosen = {f"COPILOT_PROVIDER_{name}": value for name, value in apis[api].items()}
        env = {**site.env, **told, **chosen, "HOME": str(folder)}
        command = [*program, "--allow-all-tools", *flags, "-p", prompt]
        return _sh(command, folder, env, timeout_s=_RUN_S)

    def works(api: str) -> None:
        _made(folder, ask(api, _command("bash", "command", described=True)))
        (folder / _MADE).unlink()

    def compacts(api: str) -> None:
        ask(api, f"SAY One.\n{_FILLER}")
        ask(api, f"SAY Two.\n{_FILLER}", "--continue")
        _holds(ask(api, f"SAY Three.\n{_FILLER}", "--continue"), "Compacting history and retrying")

    steps: dict[str, Callable[[], None]] = {}
    for api in apis:
        steps[f"{api}: command"] = partial(works, api)
        if api != "chat completions":  # OpenAI's words for these are unknown to it.
            steps[f"{api}: compaction"] = partial(compacts, api)
    return _steps(steps)


def _letta_code(site: Site, folder: Path) -> Steps:
    """Run Letta Code: an agent is made, runs a command, and goes on later."""
    _, connect = site.documented_command("Letta Code", _bin("letta-code", "letta"))
    program = [connect[0], "--backend", "local", "--yolo"]
    new = ("--new-agent", "--model", f"llama-cpp/{MODEL}", "--memfs-startup", "skip")
    env = {**site.env, "HOME": str(folder)}

    def ask(prompt: str, *flags: str) -> str:
        return _sh([*program, *flags, "-p", prompt], folder, env, timeout_s=_RUN_S)

    def command() -> None:
        _sh(connect, folder, env, timeout_s=_RUN_S)
        _made(folder, ask(_command("Bash", "command", described=True), *new))

    return _steps(
        {
            "command": command,
            "session resumed": lambda: _holds(ask("SAY Here again."), "Here again."),
        }
    )


def _gptme(site: Site, folder: Path) -> Steps:
    """Run gptme: a command."""
    told, command = site.documented_command("gptme", FOLDER / "gptme" / "bin" / "gptme")
    command += ["--non-interactive", "--no-confirm", "--tool-format", "tool"]
    env = {**site.env, **told, "HOME": str(folder)}
    prompt = f"{_command('shell', 'command')}\nCALL complete"
    return _steps(
        {"command": lambda: _made(folder, _sh([*command, prompt], folder, env, timeout_s=_RUN_S))}
    )


def _promptfoo(site: Site, folder: Path) -> Steps:
    """Run promptfoo: one case on each API, graded by a model."""
    rubric = 'SAY {"reason": "fine", "pass": true, "score": 1}'
    asserts = [
        {"type": "equals", "value": "All done."},
        {"type": "llm-rubric", "value": rubric},
    ]
    config = yaml.safe_load(site.documented("promptfoo")) | {
        "prompts": [_SAY_DONE],
        "tests": [{"assert": asserts}],
    }
    (folder / "promptfooconfig.yaml").write_text(json.dumps(config))
    command = [str(_bin("promptfoo", "promptfoo")), "eval", "--no-cache", "--no-table"]
    env = {**site.env, "HOME": str(folder), "PROMPTFOO_DISABLE_TELEMETRY": "1"}
    env |= {"PROMPTFOO_DISABLE_UPDATE": "1", "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1"}
    report = folder / "report.json"

    def evaluate() -> None:
        _sh([*command, "--output", str(report)], folder, env, timeout_s=_RUN_S)
        stats = json.loads(report.read_text())["results"]["stats"]
        assert (stats["successes"], stats["failures"], stats["errors"]) == (3, 0, 0), stats

    return _steps({"cases with a judge": evaluate})


def _bin(client: str, name: str) -> Path:
    """Return the command of this name that a client from npm has installed."""
    return FOLDER / client / "node_modules" / ".bin" / name


def _aider(site: Site, folder: Path) -> Steps:
    """Run aider: an edit of a file."""
    file = folder / "file.txt"
    file.write_text("old\n")
    _sh(["git", "init", "-q", "."], folder)
    fence = "```"
    edit = f"file.txt\n{fence}\n<<<<<<< SEARCH\nold\n=======\nnew\n>>>>>>> REPLACE\n{fence}"
    api, command = site.documented_command("aider", FOLDER / "aider" / "bin" / "aider")
    command += ["--edit-format", "diff", "--yes-always", "--no-check-update", "--no-auto-commits"]
    command += ["--no-show-model-warnings", "--analytics-disable", "--message"]
    env = {**site.env, **api, "HOME": str(folder)}

    def edited() -> None:
        said = _sh([*command, f"SAY {json.dumps(edit)}", "file.txt"], folder, env, timeout_s=_RUN_S)
        assert file.read_text() == "new\n", said[-300:]

    return _steps({"edit of a file": edited})


def _llm(site: Site, folder: Path) -> Steps:
    """Run the command ``llm``: a chat."""
    (folder / "extra-openai-models.yaml").write_text(site.documented("llm", SMALL))
    binary = str(FOLDER / "llm" / "bin" / "llm")
    command = [binary, "-m", "site", "--key", site.key, "Hello", "-o", "max_tokens", "20"]
    env = {**site.env, "LLM_USER_PATH": str(folder), "HOME": str(folder)}

    def chat() -> None:
        assert _sh(command, folder, env, timeout_s=_RUN_S).strip()

    return _steps({"chat, stream": chat})


def _lm_eval(site: Site, folder: Path) -> Steps:
    """Run the evaluation harness: likelihoods of texts, with the site's tokenizer."""
    (folder / "data.jsonl").write_text('{"q": "The capital of France is", "a": " Paris"}\n')
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "output_type": "loglikelihood",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "metadata": {"version": 1},
    }
    (folder / "tiny.yaml").write_text(json.dumps(task))
    model = f"model={SMALL},base_url={site.url}/v1/completions,auth_token={site.key}"
    command = [str(FOLDER / "lm-eval" / "bin" / "lm_eval"), "--model", "local-completions"]
    command += ["--model_args", f"{model},tokenizer_backend=remote,max_length=2048"]
    command += ["--include_path", str(folder), "--tasks", "tiny"]
    env = {**site.env, "OPENAI_API_KEY": site.key, "HF_HUB_OFFLINE": "1", "HOME": str(folder)}

    def evaluate() -> None:
        _holds(_sh(command, folder, env, timeout_s=_RUN_S), "perplexity")

    return _steps({"likelihoods": evaluate})


def _guidellm(site: Site, folder: Path) -> Steps:
    """Run the benchmark: three chats one after another."""
    (folder / "prompts.jsonl").write_text('{"prompt": "Hello"}\n' * 3)
    backend = f"kind=openai_http,target={site.url},model={MODEL},api_key={site.key}"
    command = [str(FOLDER / "guidellm" / "bin" / "guidellm"), "run", "--backend", backend]
    command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"]
    command += ["--data", "kind=json_file,path=prompts.jsonl", "--disable-console-interactive"]
    command += ["--output", "kind=json,path=report.json"]

    def bench() -> None:
        _sh(command, folder, {**site.env, "HOME": str(folder)}, timeout_s=_RUN_S)
        [report] = json.loads((folder / "report.json").read_text())["benchmarks"]
        assert report["metrics"]["request_totals"]["successful"] == 3

    return _steps({"benchmark of a stream": bench})


def _open_webui(site: Site, folder: Path) -> Steps:
    """Run the web application, told of the site by its environment, and use it as its page does."""
    port = free_port()
    program = FOLDER / "open-webui" / "bin" / "open-webui"
    told, command = site.documented_command("Open WebUI", program)
    told |= {"WEBUI_SECRET_KEY": "secret", "OFFLINE_MODE": "True", "HOME": str(folder)}
    told |= {"RAG_EMBEDDING_ENGINE": "openai", "DATA_DIR": str(folder)}
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, cwd=folder, env=site.env | told, stdout=log, stderr=log) as app,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as page,
    ):
        try:
            return _steps(
                {
                    "starts": lambda: _sign_up(page),
                    "models": lambda: _lists_models(page),
                    "chat": lambda: _chats(page, stream=False),
                    "stream": lambda: _chats(page, stream=True),
                }
            )
        finally:
            app.terminate()


def _sign_up(page: httpx.Client) -> None:
    """Wait until the application answers, and make its first user."""
    deadline = time.monotonic() + _RUN_S
    while True:
        with suppress(httpx.HTTPError):
            if page.get("/health").is_success:
                break
        assert time.monotonic() < deadline, "it has not started"
        time.sleep(1)
    user = {"name": "a", "email": "a@example.org", "password": "a long password 1"}
    made = page.post("/api/v1/auths/signup", json=user)
    assert made.is_success, made.text
    page.headers["Authorization"] = f"Bearer {made.json()['token']}"


def _lists_models(page: httpx.Client) -> None:
    found = page.get("/api/models")
    assert {MODEL, SMALL} <= {model["id"] for model in found.json()["data"]}, found.text[:300]


def _chats(page: httpx.Client, *, stream: bool) -> None:
    asked = [{"role": "user", "content": _SAY_DONE}]
    body = {"model": MODEL, "messages": asked, "stream": stream}
    _holds(page.post("/api/chat/completions", json=body).text, "done." if stream else "All done.")


def _command(tool: str, argument: str, *, described: bool = False) -> str:
    """Return the prompt that has the model run a command which makes a file."""
    arguments = {argument: f"echo made > {_MADE}"}
    arguments |= {"description": "make a file"} if described else {}
    return f"Please.\nCALL {tool} {json.dumps(arguments)}\n{_SAY_DONE}"


def _weather(tool: str, wait: dict[str, str]) -> str:
    """Return the prompt that has a tool of the MCP server called, once that has started."""
    return f'Please.\nCALL {tool} {json.dumps(wait)}\nCALL get_weather {{"city": "Oslo"}}'


def _outgrows(ask: Callable[..., str]) -> None:
    """Go on with a session until its prompt is refused, and the agent asks for a summary of it."""
    ask(f"SAY One.\n{_FILLER}")
    ask(f"SAY Two.\n{_FILLER}", "--continue")
    _holds(ask(f"SAY Three.\n{_FILLER}", "--continue"), "Three.")


def _made(folder: Path, said: str, name: str = _MADE) -> None:
    """Raise AssertionError if the agent has not made the file and said that it is done."""
    assert (folder / name).exists(), said[-300:]
    _holds(said, "All done.")


def _holds(said: str, part: str) -> None:
    assert part in said, said[-300:]


def _answers(site: Site, ask: Callable[[], str]) -> dict[str, Callable[[], None]]:
    """The step of a model that drives agents, if the site has one."""
    return {"answers": lambda: _holds(ask(), _ANSWER)} if site.agent else {}


def _steps(steps: Mapping[str, Callable[[], None]]) -> Steps:
    """Run the steps; return what went wrong in each."""
    errors: Steps = {}
    for name, work in steps.items():
        try:
            work()
        except (AssertionError, OSError, httpx.HTTPError, subprocess.SubprocessError) as exc:
            said = getattr(exc, "output", "") or ""
            errors[name] = f"{exc} {said[-300:]}".strip()
        else:
            errors[name] = ""
    return errors


_ALL_THREE = "chat completions, responses, messages"
_BOTH = "chat completions, responses"
CLIENTS = (
    Client(
        "openai-python",
        "PyPI",
        ("openai",),
        _BOTH,
        _script("openai_python.py"),
    ),
    Client("openai-node", "npm", ("openai",), _BOTH, _script("openai_node.mjs")),
    Client("anthropic-python", "PyPI", ("anthropic",), "messages", _script("anthropic_python.py")),
    Client(
        "anthropic-node", "npm", ("@anthropic-ai/sdk",), "messages", _script("anthropic_node.mjs")
    ),
    Client(
        "openai-agents",
        "PyPI",
        ("openai-agents", "mcp"),
        "responses, chat completions",
        _script("openai_agents.py"),
    ),
    Client(
        "openai-agents-js",
        "npm",
        ("@openai/agents", "zod"),
        "responses, chat completions",
        _script("openai_agents_js.mjs"),
    ),
    Client(
        "vercel-ai",
        "npm",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
        _ALL_THREE,
        _script("vercel_ai.mjs"),
    ),
    Client("codex", "npm", ("@openai/codex",), "responses", _codex, is_recorded=True),
    Client(
        "claude-code",
        "npm",
        ("@anthropic-ai/claude-code",),
        "messages",
        _claude_code,
        is_recorded=True,
    ),
    Client("opencode", "npm", ("opencode-ai",), "chat completions", _opencode, is_recorded=True),
    Client(
        "qwen-code",
        "npm",
        ("@qwen-code/qwen-code",),
        "chat completions",
        _qwen_code,
        is_recorded=True,
    ),
    Client("cline", "npm", ("cline",), "chat completions", _cline, is_recorded=True),
    Client("continue", "npm", ("@continuedev/cli",), "chat completions", _continue),
    Client("pi", "npm", ("@mariozechner/pi-coding-agent",), _ALL_THREE, _pi),
    Client("copilot", "npm", ("@github/copilot",), _ALL_THREE, _copilot),
    Client("letta-code", "npm", ("@letta-ai/letta-code",), "chat completions", _letta_code),
    Client("gptme", "PyPI", ("gptme",), "chat completions", _gptme),
    Client("aider", "PyPI", ("aider-chat",), "chat completions", _aider, is_recorded=True),
    Client("llm", "PyPI", ("llm",), "chat completions", _llm),
    Client(
        "langchain",
        "PyPI",
        ("langchain", "langchain-openai", "langgraph", "langchain-anthropic"),
        _ALL_THREE,
        _script("langchain_agents.py"),
        also="langgraph",
    ),
    Client(
        "llamaindex",
        "PyPI",
        ("llama-index-core", "llama-index-llms-openai-like"),
        "chat completions",
        _script("llamaindex_agents.py"),
    ),
    Client("pydantic-ai", "PyPI", ("pydantic-ai",), _ALL_THREE, _script("pydantic_ai_agents.py")),
    Client(
        "instructor", "PyPI", ("instructor",), "chat completions", _script("instructor_models.py")
    ),
    Client(
        "guidance",
        "PyPI",
        ("guidance", "openai"),
        "chat completions",
        _script("guidance_programs.py"),
    ),
    Client(
        "outlines",
        "PyPI",
        ("outlines", "openai"),
        "chat completions",
        _script("outlines_models.py"),
    ),
    Client(
        "smolagents",
        "PyPI",
        ("smolagents[openai]",),
        "chat completions",
        _script("smolagents_agents.py"),
    ),
    Client("agno", "PyPI", ("agno", "openai"), _BOTH, _script("agno_agents.py")),
    Client(
        "strands-agents", "PyPI", ("strands-agents[openai]",), _BOTH, _script("strands_agents.py")
    ),
    Client("dspy", "PyPI", ("dspy",), _BOTH, _script("dspy_programs.py")),
    Client("haystack-ai", "PyPI", ("haystack-ai",), _BOTH, _script("haystack_agents.py")),
    Client("google-adk", "PyPI", ("google-adk", "litellm"), _BOTH, _script("google_adk_agents.py")),
    Client("ag2", "PyPI", ("ag2[openai]",), _BOTH, _script("ag2_agents.py")),
    Client(
        "agent-framework",
        "PyPI",
        ("agent-framework-core", "agent-framework-openai"),
        _BOTH,
        _script("agent_framework_agents.py"),
    ),
    Client(
        "langchain-js",
        "npm",
        ("langchain", "@langchain/openai", "@langchain/core", "zod"),
        _BOTH,
        _script("langchain_js.mjs"),
    ),
    Client(
        "mastra", "npm", ("@mastra/core", "zod"), "chat completions", _script("mastra_agents.mjs")
    ),
    Client(
        "semantic-kernel", "PyPI", ("semantic-kernel",), _BOTH, _script("semantic_kernel_agents.py")
    ),
    Client(
        "browser-use",
        "PyPI",
        ("browser-use",),
        "chat completions, messages",
        _script("browser_use_models.py"),
    ),
    Client("crewai", "PyPI", ("crewai",), "chat completions", _script("crewai_agents.py")),
    Client(
        "litellm", "PyPI", ("litellm",), f"{_ALL_THREE}, completions", _script("litellm_sdk.py")
    ),
    Client("ollama-python", "PyPI", ("ollama",), "Ollama", _script("ollama_python.py")),
    Client("ollama-js", "npm", ("ollama",), "Ollama", _script("ollama_js.mjs")),
    Client(
        "inspect-ai",
        "PyPI",
        ("inspect-ai", "openai", "anthropic"),
        _ALL_THREE,
        _script("inspect_tasks.py"),
    ),
    Client("promptfoo", "npm", ("promptfoo",), _ALL_THREE, _promptfoo),
    Client("lm-eval", "PyPI", ("lm-eval[api]",), "completions", _lm_eval),
    Client("open-webui", "PyPI", ("open-webui",), "chat completions", _open_webui),
    Client("guidellm", "PyPI", ("guidellm",), "chat completions", _guidellm),
)
