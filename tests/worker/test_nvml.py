"""GPUs as the driver reports them: a driver's library that the test compiles, in a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

DRIVER = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } Process;
int nvmlInitWithFlags(unsigned flags) { return STATUS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)1; return 0; }
int nvmlDeviceGetName(void *handle, char *name, unsigned length)
{ strcpy(name, "GPU X"); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory)
{ memory->total = 100; memory->free = 60; memory->used = 40; return 0; }
int nvmlDeviceGetUtilizationRates(void *handle, Utilization *used) { used->gpu = 7; return 0; }
#ifdef KNOWS_PROCESSES
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *found)
{ if (*count < 2) { *count = 2; return 7; }
  *count = 2; found[0].pid = 11; found[0].used = 30; found[1].pid = 12; found[1].used = 5;
  return 0; }
#endif
"""
"""Statuses: 0 is success, 7 "insufficient size"; a driver before R510 knows no processes by v3."""

SHOWN = """
from worker.model_servers.nvml import gpu_bytes, gpus
print([(gpu.name, gpu.memory_total, gpu.memory_free, gpu.busy_percent) for gpu in gpus()])
print(gpu_bytes([11, 99]))
"""


def seen_with(driver: Path, *defines: str) -> list[str]:
    """Compile a driver's library; return what a process prints that finds it."""
    source = driver / "nvml.c"
    source.write_text(DRIVER)
    library = driver / "libnvidia-ml.so.1"
    command = [str(COMPILER), "-shared", "-fPIC", *defines, "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("defines", "seen"),
    [
        (["-DSTATUS=0", "-DKNOWS_PROCESSES"], ["[('GPU X 0', 100, 60, 7)]", "{0: 30}"]),
        (["-DSTATUS=0"], ["[('GPU X 0', 100, 60, 7)]", "{}"]),
        (["-DSTATUS=9"], ["[]", "{}"]),
    ],
    ids=["current", "too old to know processes", "not loaded"],
)
def test_gpus_and_their_use_are_those_of_the_driver(
    tmp_path: Path, defines: list[str], seen: list[str]
) -> None:
    assert seen_with(tmp_path, *defines) == seen
