"""The clients that `ruler.py` compares: how each is installed, called, and what it says of the first token."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
CACHE = Path(os.environ.get("CHUNKTUNE_BENCH_CACHE", Path.home() / ".cache" / "chunktune-bench"))
PROMPT_TOKENS = 600
OUTPUT_TOKENS = 16


@dataclass(frozen=True)
class Said:
    """What a client says of the time to first token, ms; `limited`: why it refuses its own numbers."""

    p50_ms: float
    p99_ms: float
    failed: int = 0
    limited: str | None = None


@dataclass(frozen=True)
class Peer:
    """A client: `command(url, concurrency, requests, folder)`, and `read(folder, stdout)`."""

    name: str
    command: Callable[[str, int, int, Path], list[str]]
    read: Callable[[Path, str], Said]
    missing: str = ""
    """Why it cannot run here, and how to install it; '' when it can."""
    python: bool = True
    slow: bool = False
    """Takes so long that fewer requests have to do."""


def percentile(values: list[float], q: float) -> float:
    """Nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def _from_list(_: Path, stdout: str) -> Said:
    said = json.loads(stdout.strip().splitlines()[-1])
    times = said["ttft_ms"]
    return Said(percentile(times, 0.5), percentile(times, 0.99), said.get("failed", 0), said.get("limited"))


def ours() -> Peer:
    return Peer(
        "chunktune", lambda url, c, n, _: [sys.executable, str(HERE / "ours.py"), url, str(c), str(n)], _from_list
    )


def lean_loop() -> Peer:
    return Peer(
        "lean aiohttp loop",
        lambda url, c, n, _: [sys.executable, str(HERE / "lean_loop.py"), url, str(c), str(n)],
        _from_list,
    )


def floor(binary: Path) -> Peer:
    return Peer(
        "C floor",
        lambda url, c, n, _: [str(binary), url.rsplit(":", 1)[1], str(c), str(n)],
        _from_list,
        python=False,
    )


def vllm_bench() -> Peer:
    vllm = REPOSITORY / ".venv-vllm" / "bin" / "vllm"

    def command(url: str, c: int, n: int, folder: Path) -> list[str]:
        return [
            str(vllm), "bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions",
            "--model", "mock-model", "--tokenizer", str(tokenizer()), "--dataset-name", "random",
            "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS),
            "--num-prompts", str(n), "--max-concurrency", str(c), "--percentile-metrics", "ttft",
            "--metric-percentiles", "50,99", "--ready-check-timeout-sec", "0", "--disable-tqdm", "--save-result",
            "--result-dir", str(folder), "--result-filename", "vllm.json",
        ]  # fmt: skip

    def read(folder: Path, _: str) -> Said:
        said = json.loads((folder / "vllm.json").read_text())
        return Said(said["p50_ttft_ms"], said["p99_ttft_ms"], int(said.get("failed", 0)))

    return Peer(
        "vllm bench serve", command, read, "" if vllm.exists() else "no .venv-vllm here: `make test-vllm` makes it"
    )


def guidellm() -> Peer:
    binary = CACHE / "guidellm" / "bin" / "guidellm"

    def command(url: str, c: int, n: int, folder: Path) -> list[str]:
        return [
            str(binary), "run",
            "--backend", f"kind=openai_http,target={url},model=mock-model,request_format=/v1/completions",
            "--profile", f"kind=concurrent,streams={c}", "--constraint", f"kind=max_requests,count={n}",
            "--tokenizer", f"kind=hf_auto,model={tokenizer()}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            "--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-console",
        ]  # fmt: skip

    def read(folder: Path, _: str) -> Said:
        said = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]
        ttft = said["metrics"]["time_to_first_token_ms"]["successful"]["percentiles"]
        return Said(ttft["p50"], ttft["p99"], said["metrics"]["request_totals"]["errored"])

    return Peer("GuideLLM", command, read, _missing(binary, "guidellm"), slow=True)


def aiperf() -> Peer:
    binary = CACHE / "aiperf" / "bin" / "aiperf"

    def command(url: str, c: int, n: int, folder: Path) -> list[str]:
        return [
            str(binary), "profile", "--model-names", "mock-model", "--url", url, "--endpoint-type", "completions",
            "--streaming", "--concurrency", str(c), "--request-count", str(n), "--isl", str(PROMPT_TOKENS),
            "--osl", str(OUTPUT_TOKENS), "--tokenizer", "chunktune/tiny", "--ui", "none",
            "--artifact-dir", str(folder / "aiperf"),
        ]  # fmt: skip

    def read(folder: Path, _: str) -> Said:
        said = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
        ttft = said["time_to_first_token"]
        return Said(ttft["p50"], ttft["p99"])

    return Peer("AIPerf", command, read, _missing(binary, "aiperf"))


def servebench() -> Peer:
    binary = CACHE / "servebench" / "bin" / "servebench"

    def command(url: str, c: int, n: int, folder: Path) -> list[str]:
        return [
            str(binary), "run", "--url", f"{url}/v1", "--model", "mock-model", "--endpoint", "completions",
            "--concurrency", str(c), "--num-requests", str(n), "--input-len", str(PROMPT_TOKENS),
            "--output-len", str(OUTPUT_TOKENS), "--warmup", "0", "--csv", str(folder / "servebench.csv"),
        ]  # fmt: skip

    def read(folder: Path, _: str) -> Said:
        with (folder / "servebench.csv").open() as file:
            row = next(csv.DictReader(file))
        return Said(float(row["ttft_p50_ms"]), float(row["ttft_p99_ms"]), int(row["failed"]))

    return Peer("servebench", command, read, _missing(binary, "servebench"))


def _missing(binary: Path, package: str) -> str:
    if binary.exists():
        return ""
    venv = CACHE / package
    return f"not installed: python -m venv {venv} && {venv}/bin/pip install {package}  (or run with --install)"


def install(package: str) -> None:
    """A virtual environment of its own for a peer; says so when that fails."""
    venv = CACHE / package
    if (venv / "bin" / package).exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False)
    subprocess.run([str(venv / "bin" / "pip"), "install", "-q", package], check=False)


def tokenizer() -> Path:
    """A tiny tokenizer for peers that insist on one, laid out as the hub's cache so that they find it offline."""
    from tuner.sim.tiny_model import make_tiny_model

    repository = CACHE / "hub" / "hub" / "models--chunktune--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    if not (snapshot / "tokenizer.json").exists():
        make_tiny_model(snapshot)
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def environment() -> dict[str, str]:
    """For the children: the hub offline, with our tiny tokenizer in its cache."""
    tokenizer()
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(CACHE / "hub"), "VLLM_CPU_KVCACHE_SPACE": "1"}
