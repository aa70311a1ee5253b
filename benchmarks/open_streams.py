"""Hold many streams open on the platform and measure the memory of its web process.

``python -m benchmarks.open_streams --streams 1000``. A server sends each stream a token a second,
so that the streams cost memory and little time.
"""

import argparse
import asyncio
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from benchmarks.figures import add_write_option, keep
from benchmarks.gateway import paced, platform_before
from benchmarks.load import Address, LoadPlan, request_bytes
from benchmarks.processes import TargetFailed, descendants, end_on_sigterm
from benchmarks.targets import Endpoint

OPENING_AT_ONCE = 32
"""Streams that wait for their first byte at a time."""
SPARE_FILES = 200


@dataclass(frozen=True, slots=True)
class OpenStreams:
    """The cost of the open streams; memory is the web process's resident set."""

    opened: int
    seconds_until_all: float
    rss_before_bytes: int
    rss_during_bytes: int

    def bytes_per_stream(self) -> float:
        return (self.rss_during_bytes - self.rss_before_bytes) / max(1, self.opened)


class HeldStream(asyncio.Protocol):
    """Wait for the first event of a response and discard the rest."""

    def __init__(self) -> None:
        self.first_byte = asyncio.Event()
        self.head = b""
        self.closed = False

    def data_received(self, data: bytes) -> None:
        if self.first_byte.is_set():
            return
        self.head += data
        if b"\r\n\r\n" in self.head and b"data:" in self.head:
            self.first_byte.set()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.closed = True


async def open_stream(address: Address, request: bytes, gate: asyncio.Semaphore) -> HeldStream:
    """Open one stream, up to its first byte. Raise OSError or TimeoutError if it does not open."""
    async with gate, asyncio.timeout(30):
        loop = asyncio.get_running_loop()
        transport, stream = await loop.create_connection(HeldStream, address.host, address.port)
        transport.write(request)
        await stream.first_byte.wait()
    return stream


async def hold(
    endpoint: Endpoint, web: psutil.Process, streams: int, timeout_s: float, hold_s: float
) -> OpenStreams:
    """Open the streams, wait for a first byte on each, keep them for ``hold_s``, and weigh."""
    plan = LoadPlan(endpoint.url, endpoint.key, endpoint.model, streams, max_tokens=1_000_000)
    address, gate = Address.of(plan.url), asyncio.Semaphore(OPENING_AT_ONCE)
    before, started = web.memory_info().rss, time.perf_counter()
    opening = [open_stream(address, request_bytes(plan, address, n), gate) for n in range(streams)]
    attempts = [asyncio.create_task(one) for one in opening]
    await asyncio.wait(attempts, timeout=timeout_s)
    held = [task.result() for task in attempts if task.done() and not task.exception()]
    seconds = time.perf_counter() - started
    await asyncio.sleep(hold_s)
    return OpenStreams(
        opened=sum(not stream.closed for stream in held),
        seconds_until_all=seconds,
        rss_before_bytes=before,
        rss_during_bytes=web.memory_info().rss,
    )


def web_process(pid: int) -> psutil.Process:
    """Return the web process below the serve process ``pid``. Raise TargetFailed without one."""
    for process in descendants(pid):
        if any(word in " ".join(process.cmdline()) for word in ("daphne", "web")):
            return process
    raise TargetFailed("no process of the platform looks like its web process")


def allow_files(streams: int) -> None:
    """Raise the limit of open files, which the platform's processes inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * streams + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def report(result: OpenStreams, streams: int) -> Sequence[str]:
    return (
        f"open streams          {result.opened} of {streams}",
        f"until all were open   {result.seconds_until_all:.2f} s",
        f"web process before    {result.rss_before_bytes / 2**20:.1f} MiB",
        f"web process during    {result.rss_during_bytes / 2**20:.1f} MiB",
        f"per open stream       {result.bytes_per_stream() / 1024:.1f} KiB",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--hold-s", type=float, default=5.0, help="keep them open so long")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="for all first bytes")
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    allow_files(options.streams)
    with paced(1.0) as upstream, platform_before(upstream, options.streams) as endpoint:
        web = web_process(endpoint.process.pid)
        asyncio.run(hold(endpoint, web, 8, 30, 0))  # So that imports are not counted as streams.
        holding = hold(endpoint, web, options.streams, options.timeout_s, options.hold_s)
        result = asyncio.run(holding)
    print("\n".join(report(result, options.streams)))
    if options.write:
        keep("open_streams", {"streams": options.streams, **asdict(result)})


if __name__ == "__main__":
    main()
