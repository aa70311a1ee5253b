"""The servers behind a site whose tool is counted: that of the tool, and the model's."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from inference_site.core.domain.compaction import SUMMARY_TASK
from tests.served_stack import ROOT, ServedStack, served_stack
from tests.upstream_server import Answer, Talk, UpstreamServer, streamed

MODELS = """
  player:
    engine: openai_upstream
    base_url: {url}
    flavor: vllm
    context_length: 65536
    slots: 4
  narrow:
    engine: openai_upstream
    base_url: {url}
    flavor: vllm
    context_length: 65536
    slots: 1
  mortal:
    engine: openai_upstream
    base_url: {url}
    flavor: vllm
    context_length: 65536
    slots: 16
"""
"""The site's own worker has the first two; a test starts and kills workers of ``mortal``."""


class CountingServer:
    """Answers a call after ``sleep`` seconds, by default at once; ``effects`` counts the calls.

    ``held`` has the marks of the calls that wait for the death of their worker.
    """

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self.calls: list[dict[str, Any]] = []
        self.held: set[str] = set()
        self._done_at: dict[str, float] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/held":
                    site.held.add(call["mark"])
                else:
                    site._begin(call)
                self._say(204, "")

            def do_GET(self) -> None:
                key = parse_qs(urlsplit(self.path).query)["key"][0]
                if time.monotonic() < site._done_at[key]:
                    self._say(204, "")
                else:
                    self._say(200, f"done {site.effects[key]}")

            def _say(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler

    def _begin(self, call: dict[str, Any]) -> None:
        self.calls.append(call)
        self.effects[call["key"]] += 1
        takes_s = call.get("sleep", 0)
        if call.get("hold") == "in_tool" and call["attempt"] == 1:
            takes_s = math.inf
            self.held.add(call["mark"])
        self._done_at[call["key"]] = time.monotonic() + takes_s

    @contextmanager
    def running(self) -> Iterator[CountingServer]:
        """Serve."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield self
        self._server.shutdown()
        self._server.server_close()
        thread.join()


def play(talk: Talk) -> None:
    """Play the turns that the last message of the user lists, each after the results before it.

    A turn has ``calls`` (pairs of a name and arguments), ``say``, both, or ``kill``: the id of a
    process to kill before anything is called, the first time. With ``hold``, a unique mark, it
    waits there the first time, until ``release`` is called.
    """
    messages = talk.body["messages"]
    begun = max(place for place, message in enumerate(messages) if message["role"] == "user")
    content = messages[begun]["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    turns = json.loads(text)
    turn = turns[min(_next_turn(messages[begun:]), len(turns) - 1)]
    talk.begin()
    common = {"id": "chatcmpl-1", "created": 1, "model": "m", "object": "chat.completion.chunk"}

    def delta(fields: dict[str, Any], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": fields, "finish_reason": finish}
        talk.event({**common, "choices": [choice]})

    for word in turn.get("say", "").split():
        delta({"content": f"{word} "})
        time.sleep(turn.get("pause", 0))
    if (pid := turn.get("kill")) and (text, pid) not in _KILLED:
        _KILLED.add((text, pid))
        os.kill(pid, signal.SIGKILL)
        return
    if (mark := turn.get("hold")) and mark not in HELD_TURNS:
        HELD_TURNS.add(mark)
        _RELEASED.wait(60)
        return
    for index, (name, arguments) in enumerate(turn.get("calls", ())):
        given = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": name, "arguments": given}
        call = {"index": index, "id": f"call_{len(messages)}_{index}", "type": "function"}
        delta({"tool_calls": [{**call, "function": function}]})
    delta({}, "tool_calls" if turn.get("calls") else "stop")
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    talk.event({**common, "choices": [], "usage": usage})
    talk.send(b"data: [DONE]\n\n")
    talk.end()


def _next_turn(messages: list[dict[str, Any]]) -> int:
    """Return the number of the turn after the ``turn`` in the arguments of the last call."""
    made = [message for message in messages if message["role"] == "assistant"]
    if made and (calls := made[-1].get("tool_calls")):
        arguments = json.loads(calls[-1]["function"]["arguments"])
        if isinstance(arguments, dict) and "turn" in arguments:
            return int(arguments["turn"]) + 1
    return len(made)


def playing_in(characters: int) -> Answer:
    """Play turns in a context of this many characters, and say "SUMMARY" if asked for one."""

    def answer(talk: Talk) -> None:
        messages = talk.body["messages"]
        size = sum(len(json.dumps(message)) for message in messages)
        if size > characters:
            said = (
                f"This model's maximum context length is {characters} tokens. However, your "
                f"messages resulted in {size} tokens."
            )
            talk.say(400, {"error": {"message": said, "type": "invalid_request_error"}})
        elif is_summary(talk.body):
            streamed("SUMMARY")(talk)
        else:
            play(talk)

    return answer


def is_summary(body: dict[str, Any]) -> bool:
    """Whether the model is asked to summarise."""
    return bool(body["messages"][0]["content"] == SUMMARY_TASK)


_KILLED: set[tuple[str, int]] = set()
HELD_TURNS: set[str] = set()
"""The marks of the turns that wait, or have waited, for the death of their worker."""
_RELEASED = threading.Event()


def release() -> None:
    """End the turns that wait: their worker is dead."""
    _RELEASED.set()


@dataclass(frozen=True)
class LoopSite:
    """A running site, its model and the server of its tool."""

    stack: ServedStack
    tool: CountingServer
    model: UpstreamServer = field(repr=False)

    def request(self, *turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Return the body of a request whose model plays these turns."""
        tool = {"type": "code_interpreter", "url": self.tool.url}
        return {"model": "player", "input": json.dumps(turns), "tools": [tool], **fields}


def start_worker(stack: ServedStack, model: str, **env: str) -> subprocess.Popen[bytes]:
    """Start a worker of this model beside the site's own."""
    environment = {**stack.env, **stack.services, "SECRET_KEY": "x", **env}
    command = [sys.executable, "manage.py", "worker", "--models", model]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)


@contextmanager
def loop_site(**env: str) -> Iterator[LoopSite]:
    """Run a site with a counted tool."""
    model, tool = UpstreamServer(), CountingServer()
    model.answers = [play]
    settings = {"DJANGO_SETTINGS_MODULE": "tests.tool_loop.site_settings", **env}
    settings["START_MODELS"] = "player,narrow"
    with (
        model.running(),
        tool.running(),
        served_stack(MODELS.format(url=model.url), **settings) as stack,
    ):
        yield LoopSite(stack, tool, model)
