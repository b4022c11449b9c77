r"""A drop-in `vllm` that has the timing of a GPU: the real `vllm serve` on the CPU with a worker that waits.

    python benchmarks/paced/serve.py [--gpu h100_sxm] [--count 4] [--cost-model NAME] [--vllm COMMAND] serve MODEL ...

For the tuner, which checks that the engine runs what it asked for (one worker runs here, and blocks of 32 tokens):

    chunktune sweep --vllm 'python benchmarks/paced/serve.py --count 4' \
        --set engine.args.tensor_parallel_size=null --set engine.args.block_size=32

It takes the argv of `vllm serve`, serves a tiny model under the asked name, reads --tensor-parallel-size as the
number of pretended GPUs, and sets the KV capacity that the real model has there. It replaces itself with vLLM, so
that signals, logs and exit codes are vLLM's own. What differs from a GPU: CPU attention wants blocks of a multiple
of 32 tokens, and vLLM switches async scheduling off on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tuner.errors import UsageError  # noqa: E402
from tuner.sim.tables import cost_model_name, plan_memory  # noqa: E402
from tuner.sim.tiny_model import make_tiny_model  # noqa: E402

CPU_BLOCK = 32
TINY_KV_BYTES_PER_TOKEN = 128
TAKEN_OVER = {
    "--tensor-parallel-size": "tensor_parallel_size",
    "-tp": "tensor_parallel_size",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--block-size": "block_size",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--num-gpu-blocks-override": "num_gpu_blocks_override",
    "--kv-cache-memory-bytes": "kv_cache_memory_bytes",
    "--load-format": "load_format",
    "--served-model-name": "served_model_name",
    "--dtype": "dtype",
}
PASSED_ON = {"max_model_len", "max_num_seqs", "max_num_batched_tokens"}


def default_vllm() -> str:
    """The command of CHUNKTUNE_PACED_VLLM, the project's vLLM environment, or `vllm` on PATH."""
    own = ROOT / ".venv-vllm" / "bin" / "vllm"
    return os.environ.get("CHUNKTUNE_PACED_VLLM") or (str(own) if own.exists() else "vllm")


OWN_UTILIZATION = 0.1
"""What the tiny model's vLLM is given of the host's memory."""


def split_options(rest: list[str]) -> tuple[list[str], dict[str, str]]:
    """The argv without the options that are answered here, and those."""
    kept: list[str] = []
    taken: dict[str, str] = {}
    i = 0
    while i < len(rest):
        flag, eq, value = rest[i].partition("=")
        name = TAKEN_OVER.get(flag.replace("_", "-") if flag.startswith("--") else flag)
        if name is None:
            kept.append(rest[i])
        else:
            if not eq:
                i += 1
                value = rest[i] if i < len(rest) else ""
            if name == "served_model_name":
                while i + 1 < len(rest) and not rest[i + 1].startswith("-"):
                    i += 1
                    value += f" {rest[i]}"
            taken[name] = value
            if name in PASSED_ON:
                kept.extend([flag, value])
        i += 1
    return kept, taken


def command(arguments: argparse.Namespace, model: str, rest: list[str]) -> tuple[list[str], dict[str, str]]:
    """The argv of the real vLLM, and its environment."""
    kept, taken = split_options(rest)
    tp = int(arguments.count or taken.get("tensor_parallel_size") or arguments.env_count or 1)
    cost_model = arguments.cost_model or cost_model_name(model)
    chunk = int(taken.get("max_num_batched_tokens", 8192))
    max_num_seqs = int(taken.get("max_num_seqs", 256))
    block = int(taken.get("block_size", CPU_BLOCK))
    if block % CPU_BLOCK:
        print(f"paced: block size {block} -> {CPU_BLOCK}, CPU attention takes multiples of it", file=sys.stderr)
        block = CPU_BLOCK
    if "num_gpu_blocks_override" in taken:
        tokens = int(taken["num_gpu_blocks_override"]) * int(taken.get("block_size", block))
    elif arguments.kv_tokens:
        tokens = arguments.kv_tokens
    else:
        utilization = float(taken.get("gpu_memory_utilization", OWN_UTILIZATION))
        if utilization == OWN_UTILIZATION:
            # Also in a command that was made from what an engine reported of itself.
            utilization = 0.9
        plan = plan_memory(
            cost_model, arguments.gpu, tp, chunk=chunk, max_num_seqs=max_num_seqs, utilization=utilization
        )
        tokens = plan.kv_tokens
        if "kv_cache_memory_bytes" in taken:
            tokens = int(taken["kv_cache_memory_bytes"]) // plan.kv_bytes_per_token
    blocks = max(tokens // block, 1)
    directory = make_tiny_model(Path(tempfile.gettempdir()) / f"chunktune-tiny-{os.getuid()}")
    argv = [*shlex.split(arguments.vllm), "serve", str(directory), *kept]
    argv += ["--served-model-name", *taken.get("served_model_name", model).split(), "--load-format", "dummy"]
    argv += ["--enforce-eager", "--block-size", str(block), "--num-gpu-blocks-override", str(blocks)]
    argv += ["--gpu-memory-utilization", str(OWN_UTILIZATION), "--worker-cls", "benchmarks.paced.worker.PacedWorker"]
    argv += ["--distributed-executor-backend", "benchmarks.paced.executor.PacedExecutor"]
    settings: dict[str, Any] = {
        "cost_model": cost_model,
        "gpu": arguments.gpu,
        "tp": tp,
        "step_time_scale": arguments.step_time_scale,
        "log": arguments.step_log,
    }
    gib = 1 << 30
    environment = {
        **os.environ,
        "CHUNKTUNE_PACED": json.dumps(settings),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(-(-(blocks + 1) * block * TINY_KV_BYTES_PER_TOKEN // gib)),
        # First, so that the `tuner` found is the whole one, with the cost model.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    return argv, environment


def become(argv: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process; exit 127 with one line when there is no such command."""
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        print(f"{argv[0]} does not start: {error.strerror}; name vLLM with --vllm", file=sys.stderr)
        sys.exit(127)


def main() -> int:
    simulated = json.loads(os.environ.get("CHUNKTUNE_SIM") or "{}")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu", default=simulated.get("gpu", "h100_sxm"))
    parser.add_argument("--count", type=int, help="pretended GPUs, whatever --tensor-parallel-size says")
    parser.set_defaults(env_count=simulated.get("count"))
    parser.add_argument("--cost-model", default=simulated.get("cost_model"))
    parser.add_argument("--kv-tokens", type=int, help="KV capacity in tokens instead of the real model's")
    parser.add_argument("--step-time-scale", type=float, default=1.0)
    parser.add_argument("--step-log", help="file that gets one JSON line a step")
    parser.add_argument("--vllm", default=default_vllm())
    parser.add_argument("--print", action="store_true", help="print the command instead of becoming it")
    arguments, rest = parser.parse_known_args()
    if rest[:1] != ["serve"] or len(rest) < 2 or rest[1].startswith("-"):
        argv = [*shlex.split(arguments.vllm), *rest]
        become(argv, {**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        argv, environment = command(arguments, rest[1], rest[2:])
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.print:
        print(shlex.join(argv))
        return 0
    print(f"paced: {shlex.join(argv)}", file=sys.stderr, flush=True)
    become(argv, environment)


if __name__ == "__main__":
    sys.exit(main())
