"""The load generator: concurrent streamed chat completions, in a process of its own.

``python -m benchmarks.load --url http://127.0.0.1:8000/v1 --key KEY --model demo --streams 8``
prints one line of JSON, a LoadResult. Every request opens a connection of its own, and opening it
is a part of the time to first token.
"""

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from urllib.parse import urlsplit

from benchmarks.http_stream import ReplyDecoder

REQUEST_TIMEOUT_S = 180
_WORDS = (
    *("river", "stone", "light", "paper", "winter", "garden"),
    *("engine", "letter", "window", "silver", "morning"),
)
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The requests of a load, its target and its duration.

    Each stream sends requests back to back, ``rounds`` of them, or, where that is None, until
    ``seconds`` have passed; requests that run by then are finished. With ``arrivals_per_s``
    ``streams * rounds`` requests wait for no other: they arrive at random, so many a second
    (Poisson). ``whole`` answers are not streamed. Prompts are numbered from ``first_prompt`` on and
    never repeat, so that no target can reuse a prefix that another cannot; each has ``words`` words
    more. ``body`` holds further fields of each request.
    """

    url: str
    key: str
    model: str
    streams: int
    rounds: int | None = None
    seconds: float = 10.0
    max_tokens: int = 128
    temperature: float = 0.0
    first_prompt: int = 0
    arrivals_per_s: float = 0.0
    whole: bool = False
    words: int = 0
    body: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Address:
    """Where requests go: a host name, a port, and the path before ``/chat/completions``."""

    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """Read a base URL. Raise ValueError if it names no host."""
        parts = urlsplit(url)
        if not parts.hostname:
            raise ValueError(f"no host in {url!r}")
        return cls(parts.hostname, parts.port or 80, parts.path)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request; times are seconds of the monotonic clock."""

    started: float
    finished: float
    first_token: float | None
    tokens: int
    error: str | None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load.

    ``seconds`` is the measured window: until the last request finished, or the plan's seconds.
    ``tokens_per_s`` takes ``usage.completion_tokens``; the tokens of a request that outlives the
    window are counted in proportion. ``client_cpu_s`` is the processor time of the generator.
    """

    streams: int
    requests: int
    tokens: int
    seconds: float
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    errors: int
    first_error: str | None
    client_cpu_s: float


class ChatStream(asyncio.Protocol):
    """A fold over one response; ``ended`` resolves at its end."""

    def __init__(self) -> None:
        self.reply = ReplyDecoder()
        self.first_token: float | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        try:
            self.reply.feed(data)
        except ValueError as exc:
            self._end(exc)
            return
        if self.first_token is None and self.reply.events.content_events:
            self.first_token = time.perf_counter()
        if self.reply.done:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)

    def _end(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        if exc:
            self.ended.set_exception(exc)
        else:
            self.ended.set_result(None)


def messages(number: int, words: int = 0) -> list[dict[str, str]]:
    """Return the messages of prompt ``number``; each word is about one token."""
    chosen = random.Random(number).choices(_WORDS, k=words)
    text = " ".join([f"{number} Tell me a story about a fox.", *chosen])
    return [{"role": "user", "content": text}]


def request_bytes(plan: LoadPlan, address: Address, number: int) -> bytes:
    """Return the HTTP request with prompt ``number``."""
    body = json.dumps(
        {
            "model": plan.model,
            "messages": messages(number, plan.words),
            **({} if plan.whole else _STREAMED),
            "max_tokens": plan.max_tokens,
            "ignore_eos": True,
            "temperature": plan.temperature,
            **plan.body,
        }
    ).encode()
    head = (
        f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
        f"Authorization: Bearer {plan.key}\r\nContent-Type: application/json\r\n"
        f"Accept: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def complete(address: Address, request: bytes) -> Sample:
    """Run one request to its end; a failure becomes a sample with an error."""
    started, stream, transport = time.perf_counter(), ChatStream(), None
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(lambda: stream, address.host, address.port)
            transport.write(request)
            await stream.ended
        error = stream.reply.problem()
    except (OSError, TimeoutError, ValueError) as exc:
        error = repr(exc)
    if transport:
        transport.close()
    tokens = stream.reply.events.completion_tokens or 0
    return Sample(started, time.perf_counter(), stream.first_token, tokens, error)


async def run_stream(plan: LoadPlan, numbers: Iterator[int], deadline: float) -> list[Sample]:
    """Send requests back to back until the rounds are done or the deadline has passed."""
    address, samples = Address.of(plan.url), list[Sample]()

    def goes_on() -> bool:
        if plan.rounds is None:
            return time.perf_counter() < deadline
        return len(samples) < plan.rounds

    while goes_on():
        samples.append(await complete(address, request_bytes(plan, address, next(numbers))))
        if samples[-1].error:
            await asyncio.sleep(0.05)  # A target that refuses at once must not be flooded.
    return samples


async def run_arrivals(plan: LoadPlan, numbers: Iterator[int]) -> list[Sample]:
    """Send requests at random times, whether those before have ended or not."""
    address, gaps = Address.of(plan.url), random.Random(plan.first_prompt)
    running = []
    for _ in range(plan.streams * (plan.rounds or 1)):
        await asyncio.sleep(gaps.expovariate(plan.arrivals_per_s))
        request = request_bytes(plan, address, next(numbers))
        running.append(asyncio.create_task(complete(address, request)))
    return await asyncio.gather(*running)


async def run_load(plan: LoadPlan) -> LoadResult:
    """Run all streams of the plan concurrently."""
    numbers, started, cpu = count(plan.first_prompt), time.perf_counter(), time.process_time()
    deadline = started + plan.seconds if plan.rounds is None else math.inf
    if plan.arrivals_per_s:
        streams, deadline = [run_arrivals(plan, numbers)], math.inf
    else:
        streams = [run_stream(plan, numbers, deadline) for _ in range(plan.streams)]
    samples = [sample for part in await asyncio.gather(*streams) for sample in part]
    return summarise(plan.streams, samples, started, deadline, time.process_time() - cpu)


def summarise(
    streams: int, samples: Sequence[Sample], started: float, deadline: float, client_cpu_s: float
) -> LoadResult:
    """Fold the samples of one load; ``started`` and ``deadline`` bound the measured window."""
    good = [sample for sample in samples if sample.error is None]
    errors = [sample.error for sample in samples if sample.error is not None]
    end = min(deadline, max(sample.finished for sample in samples))
    waits = sorted(1000 * (s.first_token - s.started) for s in good if s.first_token is not None)
    return LoadResult(
        streams=streams,
        requests=len(good),
        tokens=sum(sample.tokens for sample in good),
        seconds=round(end - started, 3),
        tokens_per_s=round(sum(tokens_until(end, s) for s in good) / (end - started), 1),
        ttft_ms_p50=round(percentile(waits, 50), 2),
        ttft_ms_p99=round(percentile(waits, 99), 2),
        errors=len(errors),
        first_error=errors[0] if errors else None,
        client_cpu_s=round(client_cpu_s, 3),
    )


def tokens_until(end: float, sample: Sample) -> float:
    """Return the share of the sample's tokens that falls before ``end``, as if they came evenly."""
    inside = min(end, sample.finished) - sample.started
    return sample.tokens * max(0.0, inside) / (sample.finished - sample.started)


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile; not a number where there are no values."""
    if not ascending:
        return math.nan
    return ascending[max(0, math.ceil(len(ascending) * percent / 100) - 1)]


def parse_plan() -> LoadPlan:
    parser = argparse.ArgumentParser(description="Load a chat completions endpoint.")
    parser.add_argument("--url", required=True, help="base URL, as http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="API key")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, help="requests per stream, in place of --seconds")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--first-prompt", type=int, default=0)
    parser.add_argument("--arrivals-per-s", type=float, default=0.0, help="at random times")
    parser.add_argument("--words", type=int, default=0, help="of each prompt, beside its own")
    parser.add_argument("--whole", action="store_true", help="answers are not streamed")
    return LoadPlan(**vars(parser.parse_args()))


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(run_load(parse_plan())))))
