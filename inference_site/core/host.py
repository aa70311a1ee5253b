"""What the system knows: the cores, memory and devices that this process may use, and addresses.

Cores and memory are those of its control group. Addresses are free ports of this host, and those of
other hosts.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# The files of a group's limit, use and parts of the use, and the cached part: version 2, 1.
_GROUP_MEMORY = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
_CPUS = Path("/sys/devices/system/cpu")
_MEMINFO = Path("/proc/meminfo")
_HAS_AFFINITY = hasattr(os, "sched_getaffinity")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that holds weights: a GPU, or the host's memory. Sizes are in bytes.

    ``temperature_c`` is in degrees Celsius; None where it is not known.
    """

    name: str
    memory_total: int
    memory_free: int
    temperature_c: int | None = None
    busy_percent: int | None = None


def usable_cores() -> float:
    """Return how many cores this process may use, by its affinity and its control group."""
    cores = float(len(_processors()))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # Version 2, 1.
        try:
            quota, period = " ".join((_CGROUP / name).read_text() for name in names).split()
            return min(cores, int(quota) / int(period)) if int(quota) > 0 else cores
        except (OSError, ValueError):  # There is no such group, or its quota is "max".
            continue
    return cores


def physical_cores() -> int:
    """Return how many whole physical cores this process may use, at least one.

    Two logical processors of one core (hyper-threads) count once, because they compute in turns.
    """
    cores = set()
    for processor in _processors():
        try:  # The kernel lists the processors of the same core.
            siblings = _CPUS / f"cpu{processor}" / "topology" / "thread_siblings_list"
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(processor))
    return max(1, min(len(cores), int(usable_cores())))


def memory_bytes() -> tuple[int, int]:
    """Return the total memory, and how much is available without swapping."""
    total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _MEMINFO.exists():
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        sizes = {words[0]: int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
        total, available = sizes["MemTotal:"], sizes["MemAvailable:"]
    for names in _GROUP_MEMORY:
        try:  # The control group may have a limit.
            limit, used, statistics = ((_CGROUP / name).read_text() for name in names[:3])
            lines = (line.split() for line in statistics.splitlines())
            cached = next(int(size) for name, size in lines if name == names[3])
            # The group counts cached files, but the kernel can drop them.
            taken = max(0, int(used) - cached)
            return min(total, int(limit)), min(available, int(limit) - taken)
        except (OSError, ValueError, StopIteration):  # There is no such group, or it has no limit.
            continue
    return total, available


def free_port() -> int:
    """Return a port of the loopback address on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_taken(port: int) -> bool:
    """Return whether something listens on a port of the loopback address."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def resolve_within(host: str, seconds: float) -> list[str]:
    """Return the addresses of a host; none for an unknown host. Raise TimeoutError.

    The system's resolver has no time limit, so it runs on a thread that is abandoned if it is slow.
    """
    found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(resolve_host(host)), daemon=True).start()
    try:
        return found.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None


def resolve_host(host: str) -> list[str]:
    """Return the addresses that the system knows of a host, in the order to try them."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def _processors() -> set[int]:
    return os.sched_getaffinity(0) if _HAS_AFFINITY else set(range(os.cpu_count() or 2))
