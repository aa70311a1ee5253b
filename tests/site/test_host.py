"""What a host gives: cores within affinity and quota, hyper-threads counted once, and memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference_site.catalogue.models_file import default_threads
from inference_site.core import host

MIB = 2**20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of 16 processors without a control group; files of ``/sys`` are in the folder."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_CPUS", tmp_path)
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({}, 16),
    ],
)
def test_threads_follow_the_quota_of_the_container(
    files: dict[str, str], cores: int, machine: Path
) -> None:
    write(machine, files)
    assert host.physical_cores() == default_threads("llama_cpp") == cores
    assert default_threads("ctransformers") == max(1, cores // 2)


def test_two_processors_of_one_core_count_once(machine: Path) -> None:
    siblings = {f"cpu{n}/topology/thread_siblings_list": f"{n % 8},{n % 8 + 8}" for n in range(16)}
    write(machine, siblings)
    assert host.physical_cores() == 8
    assert host.usable_cores() == 16
    write(machine, {"cpu.max": "600000 100000"})
    assert host.physical_cores() == 6


@pytest.mark.parametrize(
    ("limit", "used", "parts", "cached", "none"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file", "max\n"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
            "9223372036854771712\n",
        ),
    ],
)
def test_memory_is_that_of_the_control_group(
    limit: str,
    used: str,
    parts: str,
    cached: str,
    none: str,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meminfo = machine / "meminfo"
    meminfo.write_text(f"MemTotal: {8192 * 1024} kB\nMemAvailable: {6000 * 1024} kB\n")
    monkeypatch.setattr(host, "_MEMINFO", meminfo)
    assert host.memory_bytes() == (8192 * MIB, 6000 * MIB)
    write(
        machine,
        {
            limit: str(2048 * MIB),
            used: str(1000 * MIB),
            parts: f"anon {700 * MIB}\n{cached} {300 * MIB}\n",
        },
    )
    assert host.memory_bytes() == (2048 * MIB, (2048 - 700) * MIB)
    write(machine, {limit: none})
    assert host.memory_bytes() == (8192 * MIB, 6000 * MIB)
