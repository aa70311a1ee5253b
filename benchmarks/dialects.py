"""Streams of one model in each dialect of the API: ``python -m benchmarks.dialects``.

The demo model answers 64 streams at once, in turns as chat completions, responses and messages,
without thinking in all of them: Anthropic's messages ask for that by leaving ``thinking`` out.
What counts is the share of the tokens a second that chat completions have in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.figures import add_write_option, keep
from benchmarks.load import messages
from benchmarks.targets import Endpoint, platform_with
from inference_site.catalogue.catalogue import DEMO_FILE

_MODEL = "demo"


@dataclass(frozen=True)
class Dialect:
    """A path, its body besides model and stream, and a reader of an event's tokens."""

    path: str
    body: Callable[[int, int], dict[str, Any]]
    tokens: Callable[[dict[str, Any]], int]


def _chat(number: int, most: int) -> dict[str, Any]:
    usage = {"include_usage": True}
    asked = {"messages": messages(number), "max_tokens": most, "stream_options": usage}
    return asked | {"enable_thinking": False}


def _response(number: int, most: int) -> dict[str, Any]:
    asked = {"input": messages(number), "max_output_tokens": most, "store": False}
    return asked | {"enable_thinking": False}


def _message(number: int, most: int) -> dict[str, Any]:
    return {"messages": messages(number), "max_tokens": most}


def _ended(event: dict[str, Any]) -> int:
    is_end = event["type"] in ("response.completed", "response.incomplete")
    return int(event["response"]["usage"]["output_tokens"]) if is_end else 0


DIALECTS = {
    "chat completions": Dialect(
        "/chat/completions",
        _chat,
        lambda e: int((e.get("usage") or {}).get("completion_tokens", 0)),
    ),
    "responses": Dialect("/responses", _response, _ended),
    "messages": Dialect(
        "/messages",
        _message,
        lambda e: int(e["usage"]["output_tokens"]) if e["type"] == "message_delta" else 0,
    ),
}


async def _stream(
    http: aiohttp.ClientSession, url: str, dialect: Dialect, number: int, most: int
) -> int:
    """Return the tokens of one answer."""
    body = {"model": _MODEL, "stream": True, "temperature": 0, **dialect.body(number, most)}
    tokens = 0
    async with http.post(url + dialect.path, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                tokens = dialect.tokens(json.loads(line[6:])) or tokens
    return tokens


async def _tokens_per_s(
    endpoint: Endpoint, name: str, first: int, streams: int, most: int
) -> float:
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
        began = time.monotonic()
        work = [
            _stream(http, endpoint.url, DIALECTS[name], first + n, most) for n in range(streams)
        ]
        tokens = await asyncio.gather(*work)
        return sum(tokens) / (time.monotonic() - began)


def measure(streams: int, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Return the tokens a second of each round, by dialect."""
    entry = {"file": str(DEMO_FILE), "slots": streams, "threads": 1}
    found: dict[str, list[float]] = {name: [] for name in DIALECTS}
    with platform_with({_MODEL: entry}, {}) as endpoint:
        for turn in range(rounds + 1):
            for place, name in enumerate(DIALECTS):
                first = (turn * len(DIALECTS) + place) * streams
                rate = asyncio.run(_tokens_per_s(endpoint, name, first, streams, tokens))
                if turn:  # The first turn warms up.
                    found[name].append(rate)
    return found


def rows(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the median of each dialect, and its share of that of chat completions."""
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    base = medians["chat completions"]
    return [
        {"dialect": name, "tokens_per_s": rate, "share": rate / base}
        for name, rate in medians.items()
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("benchmarks.dialects", description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    add_write_option(parser)
    options = parser.parse_args()
    found = rows(measure(options.streams, options.rounds, options.tokens))
    print(f"| {options.streams} streams | tokens/s, median of {options.rounds} | share |")
    print("|---|---|---|")
    for row in found:
        print(f"| {row['dialect']} | {row['tokens_per_s']:,.0f} | {row['share']:.0%} |")
    if options.write:
        keep("dialects", {"streams": options.streams, "rounds": options.rounds, "rows": found})


if __name__ == "__main__":
    main()
