"""What each policy of the reuse budget does, against vLLM's own scheduler, on the paced engine.

    python benchmarks/reuse_budget.py --out DIR [--workload NAME]... [--stage NAME]... [--pairs 8] [--seconds 26]
    python benchmarks/reuse_budget.py --out DIR --table [--json]

Five loads (benchmarks/reuse/workloads.py). The stages `retention`, `admission` (with retention) and `yielding` (with
both) build on one another; `eviction` and `merging` stand alone. Merging needs a step budget above the chunk: it has
an engine of its own with 2,048 tokens a step and chunks of 512, and a stock of its own. Each round runs stock and all
stages once, in an order that turns from round to round, on the same contents; a stage and the stock of its round are
a pair. One engine start serves all rounds of a load: the live scheduler takes a new budget and an empty cache between
runs, and without a budget it runs vLLM's own schedule(). `--fresh` starts an engine for each run instead, with vLLM's
own class for stock. Each run is a JSON file in DIR, and those that are there are not run again.
The loads do not share anything: on a machine with cores to spare they may run beside each other, a process each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.reuse.workloads import LOADS, Load, Run, ask_one_token  # noqa: E402
from tuner.clock import SYSTEM_CLOCK  # noqa: E402
from tuner.engine.launch import free_port  # noqa: E402
from tuner.engine.live import LiveControl  # noqa: E402
from tuner.scheduler.folder import make_folder  # noqa: E402
from tuner.scheduler.messages import FOLDER_VARIABLE, LIVE_CLASS  # noqa: E402

MODEL = "meta-llama/Meta-Llama-3.1-70B"
START_LIMIT_S = 240.0
LEASE_S = 3600.0
STOCK = "stock"
MERGING_STOCK = "merging-stock"
STAGES = (STOCK, "retention", "admission", "yielding", "eviction")
MERGING_STAGES = (MERGING_STOCK, "merging")
AIM = {"retention": -0.15, "admission": -0.60, "yielding": -0.80}
OTHERS_LIMIT = 0.05
WANTED_PAIRS = 8


def budget(stage: str, load: Load) -> dict[str, float]:
    """The plug-in's settings for a stage; empty for stock."""
    retention = {"max_cached_blocks": load.max_cached_blocks}
    admission = {**retention, "min_reuse_ratio": 0.8, "max_hold_ms": 1000.0}
    return {
        STOCK: {},
        MERGING_STOCK: {},
        "retention": retention,
        "admission": admission,
        "yielding": {**admission, "yield_chunk_tokens": 256},
        "eviction": {"evict_above": 0.4},
        "merging": {"merge_below": 0.6},
    }[stage]


def get(url: str, *, post: bool = False, timeout: float = 10.0) -> bytes:
    request = urllib.request.Request(url, method="POST" if post else "GET")
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return bytes(response.read())


@contextlib.contextmanager
def engine(load: Load, stages: tuple[str, ...], log: Path, scheduler: list[str], env: dict[str, str]) -> Iterator[str]:
    """A paced engine for one load; its base URL. Ended, its whole group, on every way out."""
    port = free_port()
    step = ["--max-num-batched-tokens", "512"]
    if stages == MERGING_STAGES:
        step = ["--max-num-batched-tokens", "2048", "--long-prefill-token-threshold", "512"]
    argv = [sys.executable, str(ROOT / "benchmarks/paced/serve.py"), "--kv-tokens", str(load.kv_tokens)]
    argv += ["serve", MODEL, "--tensor-parallel-size", "4", "--max-model-len", "4096", "--max-num-seqs", "64", *step]
    argv += ["--host", "127.0.0.1", "--port", str(port), *scheduler]
    with log.open("ab") as sink:
        process = subprocess.Popen(
            argv, cwd=ROOT, env={**os.environ, **env}, stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the engine did not start: see {log}")
                with contextlib.suppress(OSError):
                    get(f"http://127.0.0.1:{port}/health")
                    break
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            for sign, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
            process.wait(10.0)


def hit_tokens(base_url: str) -> tuple[float, float]:
    """Prompt tokens found in the cache, and asked for, so far."""
    totals = {"vllm:prefix_cache_hits_total": 0.0, "vllm:prefix_cache_queries_total": 0.0}
    for line in get(f"{base_url}/metrics").decode().splitlines():
        name = line.partition("{")[0]
        if name in totals:
            totals[name] += float(line.rpartition(" ")[2])
    return totals["vllm:prefix_cache_hits_total"], totals["vllm:prefix_cache_queries_total"]


def one_run(load: Load, base_url: str, key: str, seconds: float) -> dict[str, Any]:
    """Drive the load once and sum it up."""
    reset = json.loads(get(f"{base_url}/reset_prefix_cache", post=True) or b"{}")
    if reset.get("success") is False:
        raise SystemExit("the prefix cache was not emptied: something still runs")
    hits, queries = hit_tokens(base_url)
    run = Run(load, base_url, MODEL, key, seconds)
    asyncio.run(run.drive())
    hits_after, queries_after = hit_tokens(base_url)
    visitors = [each.ttft_ms for each in run.answers if each.who == "visitor"]
    others = [each.ttft_ms for each in run.answers if each.who == "client"]
    if len(visitors) < 2 or len(others) < 2 or run.failures:
        raise SystemExit(f"a run without enough answers: {len(visitors)}, {len(others)}, {run.failures[:3]}")
    return {
        "visitor_median_ms": statistics.median(visitors),
        "visitor_p90_ms": statistics.quantiles(visitors, n=10, method="inclusive")[8],
        "others_median_ms": statistics.median(others),
        "others_p90_ms": statistics.quantiles(others, n=10, method="inclusive")[8],
        "others_done": len(others),
        "hit_rate": (hits_after - hits) / max(1.0, queries_after - queries),
        "answers": [asdict(each) for each in run.answers],
    }


def measure(name: str, stages: tuple[str, ...], options: argparse.Namespace) -> None:
    """Every run of a load that is not there yet."""
    load = LOADS[name]
    wanted = [stage for stage in stages if stage in options.stage or stage in (STOCK, MERGING_STOCK)]
    if len(wanted) < 2:
        return
    missing = [
        (number, stage)
        for number in range(options.pairs)
        for stage in wanted[number % len(wanted) :] + wanted[: number % len(wanted)]
        if not (options.out / f"{name}.{stage}.{number}.json").exists()
    ]
    log = options.out / f"{name}.log"
    env = {"VLLM_SERVER_DEV_MODE": "1"}

    def save(number: int, stage: str, base_url: str) -> None:
        result = one_run(load, base_url, f"{name}/{number}", options.seconds)
        result |= {"workload": name, "stage": stage, "pair": number, "budget": budget(stage, load)}
        result |= {"seconds": options.seconds, "fresh": options.fresh}
        (options.out / f"{name}.{stage}.{number}.json").write_text(json.dumps(result) + "\n")
        print(
            f"{name:11} {stage:13} {number}  visitor {result['visitor_median_ms']:6.0f}  "
            f"others' P90 {result['others_p90_ms']:6.0f}  hit rate {result['hit_rate']:.3f}",
            file=sys.stderr,
            flush=True,
        )

    if options.fresh:
        for number, stage in missing:
            chosen = budget(stage, load)
            scheduler = ["--scheduler-cls", "tuner.scheduler.ReuseBudgetScheduler"]
            scheduler += ["--additional-config", json.dumps({"chunktune": chosen})]
            with engine(load, stages, log, scheduler if chosen else [], env) as base_url:
                save(number, stage, base_url)
    elif missing:
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_folder(Path(scratch) / "live")
            env[FOLDER_VARIABLE] = str(folder)
            with engine(load, stages, log, ["--scheduler-cls", LIVE_CLASS], env) as base_url:
                control = LiveControl(folder, 1, lambda _: ask_one_token(base_url, MODEL), SYSTEM_CLOCK)
                for number, stage in missing:
                    asyncio.run(control.apply({"reuse_budget": budget(stage, load)}, LEASE_S))
                    save(number, stage, base_url)


def change(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Mean relative change from the first to the second of at least two pairs, and its 95 % interval (t over pairs)."""
    ratios = [after / before - 1 for before, after in pairs]
    mean = statistics.fmean(ratios)
    half = float(stats.t.ppf(0.975, len(ratios) - 1)) * statistics.stdev(ratios) / len(ratios) ** 0.5
    return mean, mean - half, mean + half


def rows(out: Path) -> list[dict[str, Any]]:
    """A row for each load and stage with at least two pairs of runs."""
    runs: dict[tuple[str, str, int], dict[str, Any]] = {}
    for path in sorted(out.glob("*.*.*.json")):
        result = json.loads(path.read_text())
        runs[result["workload"], result["stage"], result["pair"]] = result
    found = []
    for name in LOADS:
        for stage in (*STAGES[1:], *MERGING_STAGES[1:]):
            stock = MERGING_STOCK if stage in MERGING_STAGES else STOCK
            numbers = sorted(n for (w, s, n) in runs if (w, s) == (name, stage) and (name, stock, n) in runs)
            if len(numbers) < 2:
                continue
            pairs = [(runs[name, stock, n], runs[name, stage, n]) for n in numbers]
            row: dict[str, Any] = {"workload": name, "stage": stage, "pairs": len(pairs)}
            for metric in ("visitor_median_ms", "others_p90_ms"):
                both = [(before[metric], after[metric]) for before, after in pairs]
                mean, low, high = change(both)
                before, after = (statistics.median(each[side] for each in both) for side in (0, 1))
                row[metric] = {"stock": before, "now": after, "change": mean, "ci95": [low, high]}
            row["hit_rate"] = [statistics.fmean(run["hit_rate"] for run in side) for side in zip(*pairs, strict=True)]
            row["verdict"] = f"too few pairs, {WANTED_PAIRS} are wanted"
            if len(pairs) >= WANTED_PAIRS:
                row["verdict"] = verdict(name, stage, row["visitor_median_ms"], row["others_p90_ms"])
            found.append(row)
    return found


def table(found: list[dict[str, Any]]) -> None:
    """Print the rows for people."""
    print(
        f"{'workload':11} {'stage':10} {'pairs':>5} {'visitor ms':>14} {'change [95 %]':>24} "
        f"{'others P90 ms':>14} {'change [95 %]':>24} {'hit rate':>14}  verdict"
    )
    for row in found:
        cells = []
        for metric in ("visitor_median_ms", "others_p90_ms"):
            each = row[metric]
            low, high = each["ci95"]
            cells += [f"{each['stock']:.0f} -> {each['now']:.0f}", f"{each['change']:+.1%} [{low:+.1%}, {high:+.1%}]"]
        rate = " -> ".join(f"{value:.3f}" for value in row["hit_rate"])
        print(
            f"{row['workload']:11} {row['stage']:10} {row['pairs']:5} {cells[0]:>14} {cells[1]:>24} "
            f"{cells[2]:>14} {cells[3]:>24} {rate:>14}  {row['verdict']}"
        )


def verdict(name: str, stage: str, visitor: dict[str, Any], others: dict[str, Any]) -> str:
    """What the figures say of a stage on a load: MISSED for an aim of the shared-prompt load or a limit."""
    worse = [who for who, each in (("visitor", visitor), ("others", others)) if each["ci95"][1] > OTHERS_LIMIT]
    if name == "one-tenant" and stage in AIM:
        if visitor["change"] > AIM[stage] or "others" in worse:
            return f"MISSED (aim {AIM[stage]:+.0%}, others at most {OTHERS_LIMIT:+.0%})"
        return f"met (aim {AIM[stage]:+.0%})"
    if name == "none":
        return f"MISSED ({' and '.join(worse)} may be worse)" if worse else "nothing worse"
    if visitor["ci95"][1] < 0 or others["ci95"][1] < 0:
        return "helps" + (f", but {' and '.join(worse)} may be worse" if worse else "")
    return "does not help" + (f", and {' and '.join(worse)} may be worse" if worse else "")


def main() -> int:
    every = (*STAGES[1:], *MERGING_STAGES[1:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, one JSON file a run")
    parser.add_argument("--workload", action="append", choices=LOADS)
    parser.add_argument("--stage", action="append", choices=every)
    parser.add_argument("--pairs", type=int, default=WANTED_PAIRS)
    parser.add_argument("--seconds", type=float, default=26.0)
    parser.add_argument("--fresh", action="store_true", help="an engine start for each run")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of the table")
    options = parser.parse_args()
    options.stage = options.stage or list(every)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        for name in options.workload or LOADS:
            for stages in (STAGES, MERGING_STAGES):
                measure(name, stages, options)
    found = rows(options.out)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        table(found)
    return 1 if any(row["verdict"].startswith("MISSED") for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
