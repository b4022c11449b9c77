"""What a start of vLLM on a GPU node prints, forks and allocates. Standard library only.

The lines follow the format strings of vLLM 0.32 (`gpu_worker.py`, `gpu_model_runner.py`, `kv_cache_utils.py`,
`core.py`): each engine and each tensor-parallel worker is a process of its own that writes with its own prefix, between
progress bars and colours. The script's key `node`:

    nvml            the file that the fake NVML library reads; a start adds what it allocates, an orderly end takes it
                    away
    weights_gib     of a worker; default 32.88
    share           of each device that vLLM allocates, default `--gpu-memory-utilization`, else 0.92
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

GIB = 1 << 30
LONGEST_S = 180.0
"""No process of a test lives longer, whatever the test does."""


class Node:
    """The processes and the memory of one start."""

    def __init__(self, options: dict[str, Any], script: dict[str, Any]) -> None:
        self._tp = options.get("tensor-parallel-size", 1)
        self._dp = options.get("data-parallel-size", 1)
        self._length = options.get("max-model-len", 8192)
        self._share = script.get("share", options.get("gpu-memory-utilization", 0.92))
        self._weights_gib = script.get("weights_gib", 32.88)
        self._nvml = Path(script["nvml"]) if "nvml" in script else None
        self._cores: list[int] = []

    def start(self) -> int:
        """Fork every engine with its workers; the pid of the first engine."""
        self._allocate(self._share)
        for engine in range(self._dp):
            pid = os.fork()
            if pid == 0:
                self._engine(f"EngineCore_DP{engine}" if self._dp > 1 else "EngineCore")
            self._cores.append(pid)
        return self._cores[0]

    def announce(self, engine: Any) -> None:
        """What the engines say once their caches are sized."""
        for number in range(self._dp):
            name = f"EngineCore_DP{number}" if self._dp > 1 else "EngineCore"
            say(
                name,
                "kv_cache_utils.py:2327",
                f"GPU KV cache size: {engine.kv_tokens:,} tokens, Maximum concurrency for "
                f"{self._length:,} tokens per request: {engine.kv_tokens / self._length:.2f}x",
            )
            say(name, "core.py:403", "init engine (profile, create kv cache, warmup model) took 25.31 s")

    def end(self) -> None:
        """An orderly end: no process and no memory is left."""
        for pid in self._cores:
            os.kill(pid, signal.SIGTERM)
        self._allocate(None)

    def _allocate(self, share: float | None) -> None:
        """Write what the used devices hold into NVML's file; None: nothing any more."""
        if self._nvml is None:
            return
        lines = [line.split() for line in self._nvml.read_text().splitlines() if line]
        devices = [(words[1], int(words[2])) for words in lines if words[0] == "device"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        mine = [devices[int(i)] for i in visible.split(",")] if visible else devices
        taken = dict(mine[: self._tp * self._dp])
        kept = [words for words in lines if not (words[0] == "used" and words[1] in taken)]
        kept += [["used", uuid, str(int((share or 0.01) * total))] for uuid, total in taken.items()]
        new = self._nvml.with_name(f"{self._nvml.name}.{os.getpid()}")
        new.write_text("\n".join(" ".join(words) for words in kept) + "\n")
        new.replace(self._nvml)

    def _engine(self, name: str) -> None:
        """An engine process; its workers end with it. With one GPU it is its own worker."""
        become(f"VLLM::{name}")
        workers = []
        for rank in range(self._tp if self._tp > 1 else 0):
            pid = os.fork()
            if pid == 0:
                become(f"VLLM::Worker_TP{rank}")
                self._load(f"Worker_TP{rank}", rank)
                live(os.getppid())
            workers.append(pid)
        if not workers:
            self._load(name, 0)
        live(os.getppid())

    def _load(self, name: str, rank: int) -> None:
        if rank == 0:
            say(name, "gpu_model_runner.py:5040", "Starting to load model ...")
            for percent, done in ((0, 0), (50, 15), (100, 30)):
                bar = f"Loading safetensors checkpoint shards: {percent:3d}% Completed | {done}/30 [00:02<00:02]"
                raw(f"\r({name} pid={os.getpid()}) \x1b[36m{bar}\x1b[0m")
            raw("\n")
            say(
                name, "gpu_worker.py:760", f"Available KV cache memory: {0.9 * 79.2 - self._weights_gib - 3.64:.2f} GiB"
            )
        say(
            name, "gpu_model_runner.py:5150", f"Model loading took {self._weights_gib} GiB memory and 12.345678 seconds"
        )
        say(
            name,
            "gpu_worker.py:768",
            "CUDA graph memory profiling is enabled (default since v0.21.0). The current "
            f"--gpu-memory-utilization={self._share:.4f} is equivalent to --gpu-memory-utilization="
            f"{self._share - 0.01:.4f} without CUDA graph memory profiling.",
        )
        raw(
            f"({name} pid={os.getpid()}) \rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|█████| 51/51\n"
        )
        say(name, "gpu_model_runner.py:6582", "Graph capturing finished in 5 secs, took 0.81 GiB")
        say(
            name,
            "gpu_worker.py:971",
            "CUDA graph pool memory: 0.81 GiB (actual), 0.75 GiB (estimated), difference: 0.06 GiB (7.4%).",
        )
        say(
            name,
            "gpu_worker.py:1040",
            "Free memory on device (78.6/79.2 GiB) on startup. Desired GPU memory utilization "
            f"is ({self._share}, 71.28 GiB). Actual usage is {self._weights_gib} GiB for consumed memory (weights + "
            "non-torch), 3.64 GiB for peak activation, and 0.81 GiB for CUDAGraph memory.",
        )


def become(title: str) -> None:
    """The process's name, as far as the kernel keeps it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(15, title.encode(), 0, 0, 0)


def live(parent: int) -> None:
    """Until the parent has ended."""
    end_s = time.monotonic() + LONGEST_S
    while os.getppid() == parent and time.monotonic() < end_s:
        time.sleep(0.1)
    os._exit(0)


def raw(text: str) -> None:
    """Bytes at once, so that lines of several processes do not mix."""
    os.write(sys.stdout.fileno(), text.encode())


def say(process: str, where: str, text: str) -> None:
    """One line as vLLM writes it, with its colours."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    raw(f"\x1b[0;36m({process} pid={os.getpid()})\x1b[0;0m INFO {stamp} [{where}] {text}\n")
