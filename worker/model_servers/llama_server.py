"""llama.cpp's HTTP server from the wheel xllamacpp, with the arguments of ``llama-server``.

It runs without the platform's packages: ``python -I llama_server.py --model FILE …``. Arguments
have the names and values of ``llama-server``, so a build of that program can replace this one. The
API key of the server is in ``LLAMA_API_KEY``, and whether it copies the prompts of idle slots in
``LLAMA_ARG_CACHE_IDLE_SLOTS``, as it is there.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import signal
import sys
import threading
import time
from typing import Any

LOAD_FAILED = 3
"""The exit status if the model cannot be loaded."""
FEW_SPINS = "500" if platform.machine() == "x86_64" else "30000"
"""``GOMP_SPINCOUNT`` where the number of spins cannot be adapted: about 20 µs.

libgomp pauses 30 to 50 ns in each spin on x86-64 and not at all on others, as ARM.
"""
_FLASH = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
_ADAPT_EVERY_S = 0.25
_IDLE = 0.02
"""An idle process runs for less than this share of the time, and changes nothing."""
_SHORT = 0.6
"""Threads spin less if they have waited for processors for more than this share of the time.

Measured on two processors: 0.1 to 0.5 beside the platform and clients, 0.7 to 1.1 beside a process
that is always busy.
"""
_FREE_INTERVALS = 4
"""After this number of intervals in which processors were not short, the second team ends."""
_SEMAPHORE_BYTES = 32
"""The size of ``sem_t`` on 64-bit Linux."""


def main() -> None:
    """Load the model, and serve it until the process ends."""
    args = arguments(sys.argv[1:])
    adapts_spins = args.threads != 1 and has_waiting_ns()
    if not adapts_spins:
        os.environ.setdefault("GOMP_SPINCOUNT", FEW_SPINS)  # libgomp reads it when it is loaded.
    params = parameters(args)
    import xllamacpp

    try:
        server = xllamacpp.Server(params)
    except RuntimeError as exc:
        print(f"the model cannot be loaded: {exc}", flush=True)  # noqa: T201
        sys.exit(LOAD_FAILED)
    print(f"listening on {server.listening_address}", flush=True)  # noqa: T201
    if adapts_spins and (libgomp := loaded_libgomp()):
        spins = BarrierSpins(libgomp, args.threads or len(os.sched_getaffinity(0)))
        while True:
            time.sleep(_ADAPT_EVERY_S)
            spins.adapt()
    while True:
        signal.pause()


def arguments(given: list[str]) -> argparse.Namespace:
    """Return the parsed arguments; exit with status 2 for an unknown one."""
    parser = argparse.ArgumentParser("llama_server", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    for name in (
        *("host", "alias", "mmproj", "chat-template-file", "cache-type-k", "cache-type-v"),
        *("rope-scaling", "split-mode", "numa", "pooling", "tensor-split", "model-draft"),
    ):
        parser.add_argument(f"--{name}")
    for name in (
        *("port", "threads-http", "ctx-size", "parallel", "batch-size", "ubatch-size", "threads"),
        *("gpu-layers", "main-gpu", "yarn-orig-ctx", "cache-ram", "draft-max", "draft-min"),
        "gpu-layers-draft",
    ):
        parser.add_argument(f"--{name}", type=int)
    for name in ("rope-freq-base", "rope-freq-scale", "draft-p-min"):
        parser.add_argument(f"--{name}", type=float)
    for name in (
        *("mlock", "embedding", "metrics", "no-slots", "no-webui", "no-prefill-assistant"),
        *("lora-init-without-apply", "jinja"),
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--flash-attn", choices=_FLASH, default="auto")
    parser.add_argument("--lora", action="append", default=[])
    return parser.parse_args(given)


def parameters(args: argparse.Namespace) -> Any:
    """Return the library's parameters for these arguments."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.hostnames, params.port = [args.host or "127.0.0.1"], args.port or 0
    params.api_keys = [key] if (key := os.environ.get("LLAMA_API_KEY")) else []
    params.model_alias = {args.alias} if args.alias else set()
    params.verbosity = 0
    params.endpoint_metrics = args.metrics
    params.endpoint_slots, params.ui = not args.no_slots, not args.no_webui
    params.prefill_assistant = not args.no_prefill_assistant
    params.cache_idle_slots = os.environ.get("LLAMA_ARG_CACHE_IDLE_SLOTS") != "0"
    _set_given(
        params,
        n_threads_http=args.threads_http,
        n_ctx=args.ctx_size,
        n_parallel=args.parallel,
        n_batch=args.batch_size,
        n_gpu_layers=args.gpu_layers,
        main_gpu=args.main_gpu,
        rope_freq_base=args.rope_freq_base,
        rope_freq_scale=args.rope_freq_scale,
        yarn_orig_ctx=args.yarn_orig_ctx,
        cache_ram_mib=args.cache_ram,
    )
    params.n_ubatch = args.ubatch_size or min(params.n_ubatch, params.n_batch)
    for cpu in (params.cpuparams, params.cpuparams_batch):
        _set_given(cpu, n_threads=args.threads)
    _set_named(params, args)
    if args.chat_template_file:
        with open(args.chat_template_file, encoding="utf-8") as file:
            params.chat_template = file.read()
    if args.mmproj:
        params.mmproj.path = args.mmproj
    if args.tensor_split:
        shares = [float(share) for share in args.tensor_split.split(",")]
        params.tensor_split = shares + [0.0] * (len(params.tensor_split) - len(shares))
    if args.mlock:
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP_MLOCK
    scale = 0.0 if args.lora_init_without_apply else 1.0
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, scale) for path in args.lora]
    params.embedding = args.embedding
    if args.model_draft:
        _set_draft(params, args)
    return params


def _set_named(params: Any, args: argparse.Namespace) -> None:
    """Set the parameters whose values are enumerations of the library."""
    import xllamacpp

    for name, values, given in (
        ("flash_attn_type", xllamacpp.llama_flash_attn_type, _FLASH[args.flash_attn]),
        ("cache_type_k", xllamacpp.ggml_type, args.cache_type_k),
        ("cache_type_v", xllamacpp.ggml_type, args.cache_type_v),
        ("rope_scaling_type", xllamacpp.llama_rope_scaling_type, args.rope_scaling),
        ("split_mode", xllamacpp.llama_split_mode, args.split_mode),
        ("numa", xllamacpp.ggml_numa_strategy, args.numa),
        ("pooling_type", xllamacpp.llama_pooling_type, args.pooling),
    ):
        if given is not None:
            ending = f"_{given.upper()}"  # The names of values begin with that of the enumeration.
            setattr(params, name, next(v for v in values if v.name.endswith(ending)))


def _set_draft(params: Any, args: argparse.Namespace) -> None:
    from xllamacpp import common_speculative_type

    params.speculative.types = [common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    draft = params.speculative.draft
    draft.mparams.path = args.model_draft
    for cpu in (draft.cpuparams, draft.cpuparams_batch):
        _set_given(cpu, n_threads=args.threads)
    _set_given(
        draft,
        n_max=args.draft_max,
        n_min=args.draft_min,
        p_min=args.draft_p_min,
        n_gpu_layers=args.gpu_layers_draft,
    )


def _set_given(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        if value is not None:
            setattr(owner, name, value)


class BarrierSpins:
    """Limits the busy-waiting of llama.cpp's threads while other processes need their processors.

    The threads meet at barriers several hundred times for each token. A thread that arrives early
    first spins and then sleeps. Waking it takes 5 to 50 µs, so on free processors it should spin,
    for milliseconds, as libgomp does. But while another process runs on one of the processors, a
    spinning thread takes the time that the awaited thread needs. That shows in how long threads are
    ready to run and get no processor, which Linux counts for each thread.

    libgomp has no call that changes the number of spins. It spins only 100 times, about 5 µs, while
    the process has more OpenMP threads than processors (libgomp's manual, ``GOMP_SPINCOUNT``). So
    while processors are short, this class adds a second team of OpenMP threads, which sleep.
    """

    def __init__(self, libgomp: ctypes.CDLL, threads: int) -> None:
        """``threads`` is the size of llama.cpp's team."""
        self._libgomp, self._libc = libgomp, ctypes.CDLL(None)
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        # libgomp counts the threads of all teams, less one for each team after the first.
        self._size = max(2, len(os.sched_getaffinity(0)) - threads + 2)
        self._team: threading.Thread | None = None
        self._free_intervals = 0
        self._times = time.monotonic_ns(), time.process_time_ns()
        self._waiting_ns = waiting_ns()

    def adapt(self) -> None:
        """Judge by the time since the last call; an idle process changes nothing."""
        before, self._times = self._times, (time.monotonic_ns(), time.process_time_ns())
        passed, running = (now - then for now, then in zip(self._times, before, strict=True))
        if running < passed * _IDLE:
            return
        waited_before, self._waiting_ns = self._waiting_ns, waiting_ns()
        is_short = self._waiting_ns - waited_before > passed * _SHORT
        self._free_intervals = 0 if is_short else self._free_intervals + 1
        if is_short and self._team is None:
            self._libc.sem_init(self._semaphore, 0, 0)
            self._team = threading.Thread(
                target=self._libgomp.GOMP_parallel,
                args=(self._libc.sem_wait, self._semaphore, self._size, 0),
                daemon=True,
            )
            self._team.start()
        elif self._team is not None and self._free_intervals == _FREE_INTERVALS:
            for _ in range(self._size):
                self._libc.sem_post(self._semaphore)
            self._team.join()  # libgomp ends a team's threads with the thread that started it.
            self._team = None


def loaded_libgomp() -> ctypes.CDLL | None:
    """Return the libgomp of this process, which some builds bring under a name of their own."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "/libgomp" in line}
    return ctypes.CDLL(paths.pop()) if paths else None


def has_waiting_ns() -> bool:
    """Whether the kernel counts how long threads run and wait (Linux, ``CONFIG_SCHED_INFO``)."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[0]) > 0
    except (OSError, ValueError, IndexError):
        return False


def waiting_ns() -> int:
    """Return for how long all threads were ready to run and had no processor, in nanoseconds."""
    total = 0
    for thread in os.listdir("/proc/self/task"):
        path = f"/proc/self/task/{thread}/schedstat"
        with contextlib.suppress(OSError), open(path, "rb") as file:  # The thread may have ended.
            total += int(file.read().split()[1])
    return total


if __name__ == "__main__":
    main()
