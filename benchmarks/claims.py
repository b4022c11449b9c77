"""Published claims about chunked prefill and prefix reuse, measured on a real vLLM with a GPU's timing.

    python benchmarks/claims.py [--only chunks,mixed] [--engine paced|sim] [--rounds 3] [--out FILE] [--json]
    python benchmarks/claims.py --docs docs/claims.md      # writes the tables of FILE into the page, measures nothing

Each experiment is a load and a few configurations; docs/claims.md says which claim it speaks to. FILE (default
benchmarks/claims.json) keeps every configuration when it is done, and one that is there is not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import PACED_ARGS, measure_start, paced, simulated  # noqa: E402
from tuner.domain.measurement import metric  # noqa: E402
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Scalar, Setting  # noqa: E402
from tuner.errors import ChunktuneError  # noqa: E402
from tuner.files import write_json  # noqa: E402
from tuner.measure import summarize  # noqa: E402
from tuner.profile import load_profile  # noqa: E402
from tuner.report.numbers import metric_title, metric_unit, percent, short  # noqa: E402

TTFT = ("ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99")
OPTIONS_OF_ARTICLES = (
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    "block_size",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "num_lookahead_slots",
    "scheduler_policy",
)
"""The options that articles give to copy."""
_SINGLE_HIT = re.compile(r"prefix cache hit(?! rate)", re.IGNORECASE)
"""vLLM logs a hit rate now and then, which is not what articles tell people to look for."""


@dataclass(frozen=True)
class Variant:
    """One configuration under the experiment's load."""

    name: str
    args: dict[str, Scalar]
    budget: ReuseBudget | None = None


@dataclass(frozen=True)
class Experiment:
    """A load, the configurations to compare under it, and the metrics to show."""

    profile: str
    variants: tuple[Variant, ...]
    metrics: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    args: dict[str, Scalar] = field(default_factory=dict)
    rounds: int | None = None


def chunk(size: int, **more: Scalar) -> Variant:
    """A chunk size, with whatever else."""
    return Variant(str(size), {CHUNK_KNOB: size, **more})


def no_chunking(length: int) -> Variant:
    """Every prompt in one step."""
    return Variant("no chunking", {"enable_chunked_prefill": False, CHUNK_KNOB: length})


_FEW_SEQS: dict[str, Scalar] = {"max_num_seqs": 64}
"""vLLM refuses a chunk below max_num_seqs."""

_IN_CHUNKS: dict[str, Scalar] = {CHUNK_KNOB: 2048, "long_prefill_token_threshold": 512}
"""Merging needs steps that hold more than one chunk."""

EXPERIMENTS: dict[str, Experiment] = {
    "chunks": Experiment(
        "default",
        (*(chunk(size) for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)), no_chunking(8192)),
        (*TTFT, "cold_ttft_ms.p90", "itl_ms.p99", "prefix_hit_rate", "prefill_chunks_per_request"),
        args=_FEW_SEQS,
    ),
    "alignment": Experiment(
        "default",
        (chunk(96), chunk(100), chunk(112), chunk(128)),
        (*TTFT, "prefix_hit_rate", "engine_steps"),
        args=_FEW_SEQS,
    ),
    "mixed": Experiment(
        "mixed",
        (chunk(512), chunk(2048), chunk(8192), no_chunking(20480)),
        ("groups.chat.p50", "groups.chat.p90", "groups.chat.p99", "groups.document.p90", "itl_ms.p99"),
        overrides=("workload.requests=150",),
    ),
    "short": Experiment(
        "default",
        (chunk(512), chunk(8192), no_chunking(8192)),
        (*TTFT, "itl_ms.p99"),
        overrides=("workload.system_prompt_tokens=0", "workload.user_prompt_tokens=[16, 64]"),
    ),
    "pressure": Experiment(
        "tenants",
        (
            Variant("stock", {}),
            Variant("retention", {}, ReuseBudget(max_cached_blocks=80)),
            Variant("and admission at 0.8", {}, ReuseBudget(max_cached_blocks=80, min_reuse_ratio=0.8)),
            Variant(
                "and yielding to 256 tokens",
                {},
                ReuseBudget(max_cached_blocks=80, min_reuse_ratio=0.8, yield_chunk_tokens=256),
            ),
            Variant("stock, 2048 tokens a step, chunks of 512", _IN_CHUNKS),
            Variant(
                "hybrid: the same, merge below 60 %, evict above 70 %",
                _IN_CHUNKS,
                ReuseBudget(merge_below=0.6, evict_above=0.7),
            ),
        ),
        ("groups.visitor.p50", "groups.visitor.p90", "groups.busy.p90", "prefix_hit_rate", "kv_cache_usage_peak"),
        args={CHUNK_KNOB: 512, "num_gpu_blocks_override": 640},
    ),
    "no-pressure": Experiment(
        "default",
        (
            chunk(512),
            Variant("512, admission at 0.8", {CHUNK_KNOB: 512}, ReuseBudget(max_cached_blocks=80, min_reuse_ratio=0.8)),
        ),
        (*TTFT, "prefix_hit_rate"),
    ),
    "rounds": Experiment("default", (chunk(512),), TTFT, rounds=9),
}


async def measure(experiment: Experiment, variant: Variant, engine: str, rounds: int, folder: Path) -> dict[str, Any]:
    """One configuration: its metrics, the P90 of each round, and what its log says of hits."""
    profile = load_profile(experiment.profile, list(experiment.overrides))
    # The simulated engine gets the blocks of the paced one, for the same pool.
    of_engine = PACED_ARGS if engine == "paced" else {"block_size": PACED_ARGS["block_size"]}
    args: dict[str, Scalar] = {**profile.engine.args, **of_engine, **experiment.args}
    choice = (paced if engine == "paced" else simulated)(profile)
    setting = Setting(knobs=variant.args, reuse_budget=variant.budget)
    store, results = await measure_start(profile, choice, args, setting, rounds, folder)
    rows, number = results.kept(), results.starts[0].number
    observations = [store.read_observation(number, row.round) for row in rows]
    summary = summarize([row.measurement for row in rows], observations)
    return {
        "metrics": {name: metric(summary.median, name) for name in experiment.metrics},
        "ci95": {name: summary.ci95.get(name) for name in experiment.metrics},
        "round_p90_ms": [metric(row.measurement, "ttft_ms.p90") for row in rows],
        "log_names_single_hits": bool(_SINGLE_HIT.search(store.engine_log(number).read_text(errors="replace"))),
        "vllm_version": results.starts[0].vllm_version,
        "cpus": os.cpu_count(),
    }


async def run(names: list[str], engine: str, rounds: int, out: Path) -> dict[str, Any]:
    """All configurations of the experiments that `out` does not hold yet."""
    known: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name in names:
        experiment = EXPERIMENTS[name]
        done = known.setdefault(engine, {}).setdefault(name, {})
        for variant in experiment.variants:
            if variant.name in done and "error" not in done[variant.name]:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    done[variant.name] = await measure(
                        experiment, variant, engine, experiment.rounds or rounds, Path(scratch)
                    )
                except ChunktuneError as error:
                    done[variant.name] = {"error": error.message}
            write_json(out, known)
            print(_line(experiment, variant.name, done[variant.name]), file=sys.stderr, flush=True)
    return known


async def check_options(vllm: str) -> dict[str, bool]:
    """Which of the options that articles give to copy the installed vLLM has."""
    from tuner.engine.installed import inspect_installed

    installed = await inspect_installed((vllm,), {})
    return {name: name in installed.options for name in OPTIONS_OF_ARTICLES}


def shown(path: str, value: float | None) -> str:
    """A cell: three figures, a dash for what was not measured."""
    if value is None:
        return "–"
    return percent(value) if metric_unit(path) == "%" else short(value)


def _line(experiment: Experiment, name: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{name}: {row['error']}"
    cells = ", ".join(f"{metric_title(m)} {shown(m, row['metrics'].get(m))}" for m in experiment.metrics)
    return f"{name}: {cells}"


def markdown(name: str, rows: dict[str, Any]) -> str:
    """The experiment as a Markdown table."""
    experiment = EXPERIMENTS[name]
    if name == "rounds":
        return _markdown_rounds(rows)
    units = [metric_unit(m) for m in experiment.metrics]
    titles = [f"{metric_title(m)}{', ms' if u == 'ms' else ''}" for m, u in zip(experiment.metrics, units, strict=True)]
    lines = [f"| configuration | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
    for variant in experiment.variants:
        row = rows.get(variant.name)
        if row is None:
            continue
        if "error" in row:
            lines.append(f"| {variant.name} | {row['error']} |{' |' * (len(titles) - 1)}")
            continue
        lines.append(f"| {variant.name} | {' | '.join(_cell(row, m) for m in experiment.metrics)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], path: str) -> str:
    """The median of the rounds; for the TTFT figures that claims are about, with its 95 % interval."""
    text = shown(path, row["metrics"].get(path))
    interval = row["ci95"].get(path)
    if interval is None or not path.startswith(("ttft_ms.", "groups.")):
        return text
    return f"{text} ({shown(path, interval[0])} – {shown(path, interval[1])})"


def _markdown_rounds(rows: dict[str, Any]) -> str:
    row: dict[str, Any] = next(iter(rows.values()), {})
    values = [v for v in row.get("round_p90_ms", []) if v is not None]
    if not values:
        return str(row.get("error", "not measured"))
    head = " | ".join(str(n) for n in range(1, len(values) + 1))
    cells = " | ".join(short(v) for v in values)
    return f"| round | {head} |\n|---|{'---|' * len(values)}\n| TTFT P90, ms | {cells} |"


def fill(page: str, results: dict[str, Any]) -> str:
    """The page with each `<!-- table: NAME -->` ... `<!-- end -->` filled from the paced engine's results."""

    def table(match: re.Match[str]) -> str:
        rows = results.get("paced", {}).get(match[1])
        body = markdown(match[1], rows) if rows else "*Not measured yet.*"
        return f"<!-- table: {match[1]} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", table, page, flags=re.S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--engine", choices=("paced", "sim"), default="paced")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "claims.json")
    parser.add_argument("--docs", type=Path, help="fill this page's tables from --out; measure nothing")
    parser.add_argument("--options", metavar="VLLM", help="only say which options of articles this vllm has")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.options:
        print(json.dumps(asyncio.run(check_options(arguments.options)), indent=2))
        return 0
    if arguments.docs:
        results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        arguments.docs.write_text(fill(arguments.docs.read_text(), results))
        return 0
    names = arguments.only.split(",")
    for name in names:
        if name not in EXPERIMENTS:
            parser.error(f"no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    results = asyncio.run(run(names, arguments.engine, arguments.rounds, arguments.out))
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name in names:
            print(f"\n{name} ({arguments.engine})\n{markdown(name, results[arguments.engine][name])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
