"""``python -m tests.faults.soak.census``: what grows in web, worker and beat over many requests.

Each round asks the same number of requests of every kind; after each the processes write what
their heaps hold (``heap/sitecustomize.py``). The first round fills what is filled once. What grows
by about the same in each later round grows with requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect

from tests.served_stack import ServedStack, served_stack, wait_until

MODEL = """
  crowd:
    engine: scripted
    slots: 16
    context_length: 5000
"""
PROCESSES = ("web", "worker", "beat")
_STEPS = [{"text": "one "}, {"text": "two "}, {"text": "three"}]
Body = dict[str, Any]
Census = dict[str, Any]


def _chat(**fields: Any) -> Body:
    script = json.dumps([*_STEPS, {"text": secrets.token_hex(4)}])
    return {"model": "crowd", "messages": [{"role": "user", "content": script}], **fields}


def _response(**fields: Any) -> Body:
    return {"model": "crowd", "input": json.dumps(_STEPS), **fields}


async def _post(http: httpx.AsyncClient, path: str, body: Any, **options: Any) -> httpx.Response:
    return await http.post(path, json=body, **options)


async def chat(http: httpx.AsyncClient) -> None:
    await _post(http, "/v1/chat/completions", _chat())


async def chat_stream(http: httpx.AsyncClient) -> None:
    await _post(http, "/v1/chat/completions", _chat(stream=True))


async def chat_left(http: httpx.AsyncClient) -> None:
    """Leave a stream that would go on for a minute."""
    steps = json.dumps([{"text": "a"}, {"sleep_ms": 60_000}])
    body = _chat(stream=True) | {"messages": [{"role": "user", "content": steps}]}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line:
                break


async def chat_stored(http: httpx.AsyncClient) -> None:
    made = await _post(http, "/v1/chat/completions", _chat(store=True))
    await http.get(f"/v1/chat/completions/{made.json().get('id')}")


async def chat_keyed(http: httpx.AsyncClient) -> None:
    headers, body = {"Idempotency-Key": secrets.token_hex(8)}, _chat()
    for _ in range(2):
        await _post(http, "/v1/chat/completions", body, headers=headers)


async def response(http: httpx.AsyncClient) -> None:
    await _post(http, "/v1/responses", _response())


async def response_stream(http: httpx.AsyncClient) -> None:
    await _post(http, "/v1/responses", _response(stream=True))


async def background(http: httpx.AsyncClient) -> None:
    made = (await _post(http, "/v1/responses", _response(background=True))).json()
    while (await http.get(f"/v1/responses/{made['id']}")).json()["status"] != "completed":
        await asyncio.sleep(0.05)
    await http.delete(f"/v1/responses/{made['id']}")


async def turns(http: httpx.AsyncClient) -> None:
    made = (await _post(http, "/v1/conversations", {})).json()["id"]
    for _ in range(2):
        await _post(http, "/v1/responses", _response(conversation=made))


async def refused(http: httpx.AsyncClient) -> None:
    """Ask for what is refused: each time another key, model, path and field."""
    word = secrets.token_hex(8)
    await _post(http, "/v1/chat/completions", _chat() | {"model": word})
    await _post(http, "/v1/chat/completions", _chat() | {word: 1})
    await http.get("/v1/models", headers={"Authorization": f"Bearer sk-{word}"})
    await http.get(f"/v1/{word}")


async def tools(http: httpx.AsyncClient) -> None:
    """Have a tool called whose schema is another each time."""
    name = f"f_{secrets.token_hex(4)}"
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    script = json.dumps([{"tool_call": {"name": name, "arguments": ["{", "}"]}}])
    body = _chat(tools=[tool]) | {"messages": [{"role": "user", "content": script}]}
    await _post(http, "/v1/chat/completions", body)


async def pages(http: httpx.AsyncClient) -> None:
    await http.get("/v1/models")
    await http.get("/health/ready")
    await http.get("/metrics")
    await _post(http, "/v1/tokenize", {"model": "crowd", "content": secrets.token_hex(20)})


async def large_body(http: httpx.AsyncClient) -> None:
    """Send a prompt of 4 MiB, which is refused."""
    body = {"model": "demo", "messages": "a " * (2 << 20)}
    await _post(http, "/v1/chat/completions", body)


async def many_errors(http: httpx.AsyncClient) -> None:
    """Send a list of half a million items of a wrong type."""
    content = '{"model":"demo","messages":[%s0]}' % ("0," * (1 << 19))
    json_type = {"Content-Type": "application/json"}
    await http.post("/v1/chat/completions", content=content, headers=json_type)


async def long_answer(http: httpx.AsyncClient) -> None:
    """Stream a response of 2 MiB, read it again twice, and delete it."""
    steps = [{"repeat": 200, "steps": [{"text": "abcdefgh" * 1280}]}]
    body = _response(stream=True) | {"input": json.dumps(steps)}
    made = await _post(http, "/v1/responses", body)
    if made.status_code != 200:  # Too many of them wait, or have too much in Redis.
        return
    response_id = json.loads(made.text.split("data: ")[1].split("\n")[0])["response"]["id"]
    for query in ("", "?stream=true"):
        await http.get(f"/v1/responses/{response_id}{query}")
    await http.delete(f"/v1/responses/{response_id}")


async def socket(http: httpx.AsyncClient) -> None:
    """Have a response made over a WebSocket."""
    url = str(http.base_url).replace("http", "ws", 1).rstrip("/") + "/v1/responses"
    headers = {"Authorization": http.headers["Authorization"]}
    async with connect(url, additional_headers=headers, proxy=None) as opened:
        await opened.send(json.dumps({"type": "response.create", **_response()}))
        async for message in opened:
            if "response.completed" in str(message) or '"error"' in str(message):
                break


KINDS: dict[str, Callable[[httpx.AsyncClient], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        chat,
        chat_stream,
        chat_left,
        chat_stored,
        chat_keyed,
        response,
        response_stream,
        background,
        turns,
        refused,
        tools,
        pages,
        large_body,
        many_errors,
        long_answer,
        socket,
    )
}
SMALL = [kind for kind in KINDS if kind not in ("large_body", "many_errors", "long_answer")]


async def ask(stack: ServedStack, kinds: Iterable[str], requests: int, clients: int) -> int:
    """Send this many requests of every kind in turn; return how many were sent."""
    counted = 0

    async def count(_: httpx.Request) -> None:
        nonlocal counted
        counted += 1

    async def client(acts: list[Callable[[httpx.AsyncClient], Awaitable[None]]]) -> None:
        headers = {"Authorization": f"Bearer {stack.key}"}
        async with httpx.AsyncClient(
            base_url=stack.url, headers=headers, timeout=120, event_hooks={"request": [count]}
        ) as http:
            while counted < requests:
                for act in acts:
                    await act(http)

    acts = [KINDS[kind] for kind in kinds]
    turned = [acts[n % len(acts) :] + acts[: n % len(acts)] for n in range(clients)]
    await asyncio.gather(*map(client, turned))
    return counted


def censuses(stack: ServedStack, out: Path) -> dict[str, Census]:
    """Return the census of each process."""
    pids = {name: stack.pid_of(name) for name in PROCESSES}
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR2)
    found = {}
    for name, pid in pids.items():
        path = out / str(pid)
        wait_until(path.exists, 300, f"the census of {name}")
        found[name] = json.loads(path.read_text())
        path.unlink()
    return found


def _grown(before: dict[str, int], after: dict[str, int], most: int) -> list[tuple[str, int, int]]:
    changes = [
        (key, value, value - before.get(key, 0))
        for key, value in after.items()
        if value != before.get(key, 0)
    ]
    return sorted(changes, key=lambda change: -abs(change[2]))[:most]


def report(name: str, before: Census, after: Census, asked: int) -> list[str]:
    """Return lines on what one process holds more than before."""
    lines = [f"## {name}, {asked} requests later; garbage collected: {after['collected']}"]
    for kind, most in (("memory", 9), ("types", 25), ("caches", 25)):
        for key, value, change in _grown(before[kind], after[kind], most):
            per_request = f"{change / asked:+.2f} a request"
            lines.append(f"  {kind}: {key} {value:,} ({change:+,}; {per_request})")
    for key, (size, holder) in after["containers"].items():
        known = before["containers"].get(key, (0, ""))[0]
        if abs(size - known) > 20:
            lines.append(f"  container: {key} {size:,} ({size - known:+,}) {holder}")
    known_traces = {tuple(lines_): (size, n) for size, n, lines_ in before["traces"]}
    traces = [
        (size - known_traces.get(tuple(lines_), (0, 0))[0], n, lines_)
        for size, n, lines_ in after["traces"]
    ]
    for size, n, lines_ in sorted(traces, key=lambda trace: -trace[0])[:15]:
        if size > 4096:
            lines.append(f"  allocated: {size:+,} bytes, now {n} blocks")
            lines += [f"      {line.strip()}" for line in lines_]
    return lines


def main() -> None:
    """Print what grew in each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="in each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the warm-up")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--kinds", default=",".join(SMALL))
    parser.add_argument("--trace", type=int, default=0, help="frames of tracemalloc")
    parser.add_argument("--env", nargs="*", default=[], help="NAME=VALUE, for the stack")
    parser.add_argument("--rest", type=float, default=15.0, help="seconds before each census")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    with tempfile.TemporaryDirectory() as name:
        env = {
            "PYTHONPATH": str(Path(__file__).parent / "heap"),
            "HEAP_OUT": name,
            "HEAP_TRACE": str(options.trace),
            **dict(pair.split("=", 1) for pair in options.env),
        }
        with served_stack(MODEL, **env) as stack:
            before: dict[str, Census] = {}
            for number in range(options.rounds + 1):
                began = time.monotonic()
                asked = asyncio.run(ask(stack, kinds, options.requests, options.clients))
                took_s = time.monotonic() - began
                time.sleep(options.rest)
                print(f"# Round {number}: {asked} requests in {took_s:.0f} s", flush=True)
                after = censuses(stack, Path(name))
                for process, found in after.items():
                    if process in before:
                        lines = report(process, before[process], found, asked)
                        print("\n".join(lines), flush=True)
                    else:
                        print(f"## {process}: {found['memory']}", flush=True)
                before = after
            print(*stack.sql(_TABLES), sep="\n")


_TABLES = """
SELECT relname, n_live_tup, n_dead_tup, pg_relation_size(relid) AS rows,
       pg_indexes_size(relid) AS indexes,
       pg_total_relation_size(relid) - pg_relation_size(relid) - pg_indexes_size(relid) AS toast
FROM pg_stat_user_tables WHERE pg_total_relation_size(relid) > 65536
ORDER BY pg_total_relation_size(relid) DESC
"""

if __name__ == "__main__":
    main()
