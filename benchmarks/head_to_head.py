"""The same five chunk sizes by `chunktune sweep` and by `vllm bench sweep serve`, on the paced engine.

    python benchmarks/head_to_head.py --out DIR [--runs 3] [--tools chunktune,vllm] [--report] [--json]

Chunks of 32 (which vLLM refuses: it is below max_num_seqs), 128, 512, 2048 and 8192 tokens, three rounds of each, the
load of profiles/default.yaml. In each run both tools go one after the other, in turn first. Told are the seconds until
the search start ended and those of the whole, whether the refused chunk was named, and what SIGTERM in the middle of a
load leaves behind. The figures are medians over the runs. DIR keeps each run; one that is there is not made again.
Chunktune also makes its finals, three starts with repeated measurement and one with the literal command; the other has
no such thing. Exit code 1 when chunktune misses a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import machine  # noqa: E402
from tuner.domain.profile import Profile  # noqa: E402
from tuner.domain.workload import SharedPrefixWorkload  # noqa: E402
from tuner.engine.launch import free_port  # noqa: E402
from tuner.experiment.store import Store  # noqa: E402
from tuner.profile import load_profile  # noqa: E402
from tuner.sim.tiny_model import make_tiny_model  # noqa: E402

CHUNKS = (32, 128, 512, 2048, 8192)
REFUSED = 32
ROUNDS = 3
RUN_LIMIT_S = 1200.0
SEARCH_LIMIT_S = 120.0
WHOLE_LIMIT_S = 330.0
MARK = "CHUNKTUNE_HEAD_TO_HEAD"
"""Set to a word of the run's own in the environment of everything that it starts, so that it is found again."""


@dataclass
class Outcome:
    """One run of one tool."""

    tool: str
    whole_s: float
    exit_code: int
    starts: int = 0
    search_s: float | None = None
    """Until the last search start had ended; None where there is no search apart from the rest."""
    refused_named: bool = False
    answer: str = ""
    left: list[str] = field(default_factory=list)
    """Processes that outlived it."""


@dataclass(frozen=True)
class Tool:
    """How a tool is run, and how its result is read."""

    name: str
    command: Callable[[Path, int], list[str]]
    """Of a folder and a seed."""
    under_load: Callable[[Path], bool]
    """Whether the first measured round has begun."""
    read: Callable[[Path, Outcome, float], None]
    """Fills the outcome; the last argument is when it began, in seconds since the epoch."""


def overrides(profile: Profile) -> list[str]:
    """The task as overrides of the profile."""
    return [
        f"space.max_num_batched_tokens={list(CHUNKS)}",
        "space.reuse_budget={}",
        "space.refine=false",
        "references=[stock]",
        f"rounds={ROUNDS}",
        "engine.args.tensor_parallel_size=null",
        "engine.args.gpu_memory_utilization=null",
        "engine.args.block_size=32",
        f"hardware.count={profile.hardware.count}",
    ]


def serve_command(profile: Profile) -> list[str]:
    """The paced engine, up to `serve`."""
    return [sys.executable, str(ROOT / "benchmarks/paced/serve.py"), "--count", str(profile.hardware.count)]


def chunktune(profile: Profile) -> Tool:
    def command(folder: Path, seed: int) -> list[str]:
        sets = [part for each in overrides(profile) for part in ("--set", each)]
        vllm = shlex.join(serve_command(profile))
        argv = [sys.executable, "-m", "tuner", "sweep", str(ROOT / "profiles/default.yaml"), "--vllm", vllm]
        return [*argv, "--out", str(folder), "--study", "task", "--seed", str(seed), *sets]

    def read(folder: Path, outcome: Outcome, began_s: float) -> None:
        store = Store(folder / "task")
        results, summary = store.results(), store.summary()
        outcome.starts = len(results.starts)
        ended = [store.start_file(n).stat().st_mtime for n in results.numbers("search")]
        outcome.search_s = max(ended) - began_s if ended else None
        if summary is not None:
            lines = {line.knobs.get("max_num_batched_tokens"): line for line in summary.settings}
            refused = lines.get(REFUSED)
            outcome.refused_named = refused is not None and refused.state == "infeasible" and bool(refused.cause)
            outcome.answer = summary.sentence

    def under_load(folder: Path) -> bool:
        return (folder / "task" / "rounds.jsonl").exists()

    return Tool("chunktune", command, under_load, read)


def vllm_bench(profile: Profile) -> Tool:
    vllm = ROOT / ".venv-vllm/bin/vllm"
    load = profile.workload
    assert isinstance(load, SharedPrefixWorkload)
    assert load.concurrency is not None

    def middle(pair: tuple[int, int]) -> str:
        return str(sum(pair) // 2)

    def command(folder: Path, seed: int) -> list[str]:
        port = str(free_port())
        # It resets caches between runs only where the server's command ends in "vllm".
        launcher = folder / "paced-vllm"
        launcher.write_text(f'#!/bin/sh\nexec {shlex.join(serve_command(profile))} "$@"\n')
        launcher.chmod(0o755)
        settings = [{"max_num_batched_tokens": chunk} for chunk in CHUNKS]
        (folder / "chunks.json").write_text(json.dumps(settings))
        args = {**profile.engine.args, "block_size": 32}
        serve = [str(launcher), "serve", profile.model, "--host", "127.0.0.1", "--port", port]
        serve += ["--max-model-len", str(args["max_model_len"]), "--max-num-seqs", str(args["max_num_seqs"])]
        serve += ["--block-size", "32", "--enable-prefix-caching", "--max-num-batched-tokens", "8192"]
        concurrency = load.concurrency or 1
        bench = [str(vllm), "bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"]
        bench += ["--endpoint", "/v1/completions", "--model", profile.model]
        bench += ["--tokenizer", str(make_tiny_model(folder / "tokenizer")), "--seed", str(seed)]
        bench += ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "1"]
        bench += ["--prefix-repetition-prefix-len", middle(load.system_prompt_tokens)]
        bench += ["--prefix-repetition-suffix-len", middle(load.user_prompt_tokens)]
        bench += ["--prefix-repetition-output-len", middle(load.output_tokens), "--ignore-eos"]
        bench += ["--num-prompts", str(load.requests + concurrency), "--max-concurrency", str(concurrency)]
        bench += ["--metric-percentiles", "50,90,99", "--disable-tqdm"]
        argv = [
            str(vllm),
            "bench",
            "sweep",
            "serve",
            "--serve-cmd",
            shlex.join(serve),
            "--bench-cmd",
            shlex.join(bench),
        ]
        argv += ["--serve-params", str(folder / "chunks.json"), "--num-runs", str(ROUNDS), "--continue-on-error"]
        return [*argv, "--warmup-num-prompts", str(concurrency), "-o", str(folder), "-e", "task"]

    def read(folder: Path, outcome: Outcome, began_s: float) -> None:
        log = (folder / "log").read_text(errors="replace")
        outcome.starts = log.count("[BEGIN SERVER]")
        outcome.refused_named = any(
            "[FAILED SERVER COMBINATION]" in line and str(REFUSED) in line for line in log.splitlines()
        )
        p90 = {}
        for summary in (folder / "task").glob("*/summary.json"):
            rows = json.loads(summary.read_text())
            p90[rows[0]["max_num_batched_tokens"]] = statistics.median(row["p90_ttft_ms"] for row in rows)
        outcome.answer = ", ".join(f"{chunk}: P90 {p90[chunk]:.0f} ms" for chunk in sorted(p90))

    def under_load(folder: Path) -> bool:
        log = folder / "log"
        return log.exists() and "[BEGIN BENCHMARK]" in log.read_text(errors="replace")

    return Tool("vllm", command, under_load, read)


def living(word: str) -> list[int]:
    """Processes that were started with this word in their environment."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={word}".encode() in environ.split(b"\0") and state not in "ZX":
            found.append(int(entry))
    return found


def name_of(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}"
    except OSError:
        return str(pid)


def one(tool: Tool, folder: Path, seed: int, *, terminate: bool = False) -> Outcome:
    """One run, to its end or to a SIGTERM three seconds into its first load; nothing of it is left after."""
    folder.mkdir(parents=True)
    word = uuid.uuid4().hex
    # One thread and no downloads, as for the engine itself.
    env = {**os.environ, MARK: word, "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    command = tool.command(folder, seed)
    began_s, clock_s = time.time(), time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            if terminate:
                while process.poll() is None and not tool.under_load(folder):
                    if time.monotonic() - clock_s > RUN_LIMIT_S:
                        break
                    time.sleep(0.2)
                time.sleep(3)
                clock_s = time.monotonic()
                process.send_signal(signal.SIGTERM)
            code = process.wait(RUN_LIMIT_S)
            outcome = Outcome(tool.name, time.monotonic() - clock_s, code)
            if terminate:
                time.sleep(2)
        finally:
            left = living(word)
            names = [name_of(pid) for pid in left]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            process.wait(30)
    outcome.left = names
    if not terminate:
        tool.read(folder, outcome, began_s)
    return outcome


def kept(path: Path, make: Callable[[], Outcome], *, only_read: bool) -> Outcome | None:
    """What `make` gives, from `path` where it is there."""
    if path.exists():
        return Outcome(**json.loads(path.read_text()))
    if only_read:
        return None
    outcome = make()
    path.write_text(json.dumps(asdict(outcome)) + "\n")
    print(f"{path.stem}: {outcome}", file=sys.stderr, flush=True)
    return outcome


def rows(runs: dict[str, list[Outcome]], terminated: dict[str, Outcome]) -> list[dict[str, Any]]:
    """A row for each tool, medians over its runs."""
    found = []
    for name, outcomes in runs.items():
        searches = [each.search_s for each in outcomes if each.search_s is not None]
        row: dict[str, Any] = {"tool": name, "runs": len(outcomes)}
        row |= {"whole_s": statistics.median(each.whole_s for each in outcomes)}
        row |= {"search_s": statistics.median(searches) if searches else None}
        row |= {"starts": statistics.median(each.starts for each in outcomes)}
        row |= {"refused_named": all(each.refused_named for each in outcomes)}
        row |= {"exit_codes": sorted({each.exit_code for each in outcomes})}
        row |= {"left": sum(len(each.left) for each in outcomes), "answers": [each.answer for each in outcomes]}
        stop = terminated.get(name)
        row |= {"sigterm": None if stop is None else {"seconds": stop.whole_s, "left": stop.left}}
        found.append(row)
    return found


def missed(row: dict[str, Any]) -> list[str]:
    """The limits that chunktune's row breaks."""
    checks = {
        "search start ended": row["search_s"] is not None and row["search_s"] <= SEARCH_LIMIT_S,
        "whole": row["whole_s"] <= WHOLE_LIMIT_S,
        "refused chunk named": row["refused_named"],
        "exit code": row["exit_codes"] == [0],
        "nothing left": not row["left"] and row["sigterm"] is not None and not row["sigterm"]["left"],
    }
    return [name for name, met in checks.items() if not met]


def table(found: list[dict[str, Any]]) -> str:
    """For people."""
    form = "{:10} {:>4} {:>6} {:>9} {:>8} {:>14}  {}"
    lines = [form.format("tool", "runs", "starts", "search s", "whole s", "refused named", "after SIGTERM")]
    for row in found:
        search = "-" if row["search_s"] is None else f"{row['search_s']:.0f}"
        stop = row["sigterm"]
        stopped = "not tried" if stop is None else f"{len(stop['left'])} processes left, {stop['seconds']:.1f} s"
        named = "yes" if row["refused_named"] else "no"
        whole = f"{row['whole_s']:.0f}"
        lines.append(form.format(row["tool"], row["runs"], f"{row['starts']:.0f}", search, whole, named, stopped))
        lines += [f"    {answer}" for answer in row["answers"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that keeps the runs")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tools", default="chunktune,vllm")
    parser.add_argument("--report", action="store_true", help="only tell what is there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    profile = load_profile(str(ROOT / "profiles/default.yaml"))
    tools = [t for t in (chunktune(profile), vllm_bench(profile)) if t.name in options.tools.split(",")]
    runs: dict[str, list[Outcome]] = {tool.name: [] for tool in tools}
    terminated: dict[str, Outcome] = {}
    for number in range(options.runs):
        for tool in tools if number % 2 == 0 else tools[::-1]:
            name = f"{tool.name}-{number}"
            made = kept(
                out / f"{name}.json", lambda t=tool, n=name, s=number: one(t, out / n, s), only_read=options.report
            )
            runs[tool.name] += [made] if made else []
    for tool in tools:
        name = f"{tool.name}-sigterm"
        stop = kept(
            out / f"{name}.json",
            lambda t=tool, n=name: one(t, out / n, 0, terminate=True),
            only_read=options.report,
        )
        if stop is not None:
            terminated[tool.name] = stop
    found = rows({name: each for name, each in runs.items() if each}, terminated)
    broken = [name for row in found if row["tool"] == "chunktune" for name in missed(row)]
    if options.json:
        limits = {"search_s": SEARCH_LIMIT_S, "whole_s": WHOLE_LIMIT_S}
        print(json.dumps(machine() | {"limits": limits, "rows": found, "missed": broken}, indent=2))
    else:
        print(table(found))
        if broken:
            print(f"MISSED: {', '.join(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
