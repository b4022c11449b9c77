"""Settings switched within one start against fresh starts, on the paced engine (a real vLLM with a GPU's timing).

    python benchmarks/live.py --out DIR [--loads chat,mixed,tenants] [--blocks 8] [--rounds N] [--minutes 60]
    python benchmarks/live.py --out DIR --report [--json]

A block has one fresh start of each setting and one live start on which all of them are switched, in an order drawn
anew. The rounds of a block share arrivals and lengths, the contents are always new. Fresh starts run vLLM's own
scheduler, or the plug-in where the setting has a reuse budget. Everything goes through the product's runner, session
and store: DIR keeps every start and round, a run continues where the last one ended, and after --minutes no new start
begins. --report only analyses what is there.

Reported for each load: whether the ratios to stock are the same within 5 % (two one-sided t tests over blocks), how far
the level itself is off, and Kendall's tau of the order over the pairs of settings that one half of the fresh starts
tells apart, against the other half. Exit code 1 when something of it is not shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import PACED_ARGS, machine, paced  # noqa: E402
from benchmarks.live_model import (  # noqa: E402
    Blocks,
    Order,
    differences,
    equivalence,
    interval,
    levels,
    offset_of_round,
    order,
    ratio_differences,
    together,
)
from tuner.clock import SYSTEM_CLOCK  # noqa: E402
from tuner.domain.experiment import STOCK_ID, Results, Round, Start  # noqa: E402
from tuner.domain.measurement import metric  # noqa: E402
from tuner.domain.profile import Profile  # noqa: E402
from tuner.domain.setting import CHUNK_KNOB, STOCK, ReuseBudget, Setting  # noqa: E402
from tuner.experiment.design import Named, StudyStopped  # noqa: E402
from tuner.experiment.events import Silent  # noqa: E402
from tuner.experiment.runner import run  # noqa: E402
from tuner.experiment.session import engine_opener  # noqa: E402
from tuner.experiment.store import Store  # noqa: E402
from tuner.profile import load_profile  # noqa: E402

WANTED_PAIRS = 15
WANTED_TAU = 0.9


@dataclass(frozen=True)
class Load:
    """A load, the settings to compare under it, and the metrics that are tested."""

    profile: str
    settings: dict[str, Setting]
    """Without stock."""
    ranked_by: str
    """The metric whose order is compared."""
    rounds: int
    """Of each setting on each start."""
    overrides: tuple[str, ...] = ()
    equivalent: tuple[str, ...] = ("ttft_ms.p50", "ttft_ms.p90")
    """Metrics whose ratios to stock have to be equivalent."""


def _chunks(*sizes: int) -> dict[str, Setting]:
    return {f"chunk {size}": Setting(knobs={CHUNK_KNOB: size}) for size in sizes}


def _budgets(**budgets: dict[str, float]) -> dict[str, Setting]:
    return {name: Setting(reuse_budget=ReuseBudget.model_validate(values)) for name, values in budgets.items()}


_RETENTION = {"max_cached_blocks": 640}
_ADMISSION = {**_RETENTION, "min_reuse_ratio": 0.8}

LOADS = {
    "chat": Load("default", _chunks(128, 192, 256, 512, 1024, 8192), ranked_by="ttft_ms.p90", rounds=4),
    "mixed": Load(
        "mixed",
        _chunks(256, 512, 1024, 4096),
        ranked_by="ttft_ms.p90",
        rounds=2,
        overrides=("workload.requests=100",),
        equivalent=(),
    ),
    # Tenants in turn beside prompts of nobody's: with all of them in the pool, most of the prompts are found cached.
    # One round a start: the plug-in of a fresh one would go on keeping the last round's prompts, which never come back.
    "tenants": Load(
        "tenants",
        _budgets(retention=_RETENTION, admission=_ADMISSION, yielding={**_ADMISSION, "yield_chunk_tokens": 256}),
        ranked_by="groups.visitor.p50",
        rounds=1,
        overrides=(
            "workload.concurrency=6",
            "engine.args.num_gpu_blocks_override=1024",
            f"engine.args.{CHUNK_KNOB}=512",
            "workload.classes=[{name: busy, weight: 1, user_prompt_tokens: 3000, output_tokens: [16, 48]}, "
            "{name: visitor, weight: 2, tenants: 8, system_prompt_tokens: 2000, user_prompt_tokens: [32, 128], "
            "output_tokens: [8, 24]}]",
        ),
    ),
}


def profile_of(load: Load) -> Profile:
    """The load's profile with what the paced engine needs."""
    paced_options = [f"engine.args.{name}={json.dumps(value)}" for name, value in PACED_ARGS.items()]
    return load_profile(load.profile, [*paced_options, *load.overrides])


class Progress(Silent):
    """A line on stderr for each round, and each start that failed."""

    def __init__(self, load: Load) -> None:
        self._metrics = (*load.equivalent, load.ranked_by)

    def round_ended(self, row: Round, named: Named) -> None:
        shown = ", ".join(f"{path} {_shown(metric(row.measurement, path))}" for path in dict.fromkeys(self._metrics))
        print(f"start {row.start}, cycle {row.cycle}, {named.id}: {row.reason or shown}", file=sys.stderr, flush=True)

    def start_ended(self, start: Start) -> None:
        if start.state != "completed":
            print(f"start {start.number}, {start.label}: {start.state}: {start.message}", file=sys.stderr, flush=True)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


async def measure(name: str, design: Blocks, folder: Path) -> None:
    """Every start of one load that is not there yet."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    load, store = LOADS[name], Store(folder)
    store.settle()
    profile, progress = profile_of(load), Progress(load)
    opener = engine_opener(
        profile,
        paced(profile),
        seed=design.seed,
        log_path=store.engine_log,
        record_dir=store.record_dir,
        events=progress,
    )
    try:
        await run(design, store, opener, SYSTEM_CLOCK, progress)
    except StudyStopped as stopped:
        raise SystemExit(f"{name}: {stopped} (see {store.start_dir(stopped.start.number)})") from None


def design_of(load: Load, options: argparse.Namespace) -> Blocks:
    named = (Named(STOCK_ID, STOCK), *(Named(name, setting) for name, setting in load.settings.items()))
    return Blocks(
        dict(profile_of(load).engine.args), named, options.blocks, options.rounds or load.rounds, options.seed
    )


@dataclass(frozen=True)
class Findings:
    """What one load has shown."""

    ratios: list[dict[str, Any]]
    levels: list[dict[str, Any]]
    by_round: list[dict[str, Any]]
    """The offset of the level by the round of a fresh start, over all settings: are its first ones slower?"""
    order: Order

    @property
    def shown(self) -> bool:
        return bool(self.ratios) and all(row["verdict"] == "equivalent" for row in self.ratios if row["required"])


def analyse(load: Load, results: Results, design: Blocks) -> Findings:
    """Everything that the rounds of one load say."""
    blocks = {start.number: design.block_of(start) for start in results.starts}
    ratios: list[dict[str, Any]] = []
    offsets: list[dict[str, Any]] = []
    found_order = Order(0, None, None, ())
    for path in dict.fromkeys((*load.equivalent, "ttft_ms.p50", "ttft_ms.p90", load.ranked_by)):
        live, fresh = (levels(results, path, blocks, live=switched, rounds=design.rounds) for switched in (True, False))
        if path == load.ranked_by:
            found_order = order(live, fresh)
        for named in design.named:
            name = named.id
            off = differences(live.get(name, {}), fresh.get(name, {}))
            if not off:
                continue
            at = {how: _mean_ms(each[name]) for how, each in (("fresh", fresh), ("live", live))}
            offsets.append({"metric": path, "setting": name, **at, "offset": asdict(interval(off))})
            apart = ratio_differences(live, fresh, name, STOCK_ID)
            if name == STOCK_ID or not apart:
                continue
            test = equivalence(apart)
            ratio = {how: _mean_ratio(each, name) for how, each in (("fresh", fresh), ("live", live))}
            ratios.append(
                {"metric": path, "setting": name, **ratio, "difference": asdict(test.difference)}
                | {"p": test.p, "verdict": test.verdict, "required": path in load.equivalent}
            )
    return Findings(ratios, offsets, _by_round(load, results, design, blocks), found_order)


def _by_round(load: Load, results: Results, design: Blocks, blocks: dict[int, int]) -> list[dict[str, Any]]:
    found = []
    for path in dict.fromkeys((*load.equivalent, load.ranked_by)):
        for number in range(design.rounds):
            live, fresh = (
                levels(results, path, blocks, live=switched, rounds=design.rounds, only=number)
                for switched in (True, False)
            )
            off = offset_of_round(live, fresh)
            if off:
                found.append({"metric": path, "round": number + 1, "offset": asdict(interval(off))})
    return found


def _mean_ms(by_block: dict[int, float]) -> float:
    return math.exp(interval(list(by_block.values())).mean)


def _mean_ratio(found: dict[Any, dict[int, float]], name: Any) -> float:
    return math.exp(interval(differences(found[name], found[STOCK_ID])).mean)


def table(name: str, found: Findings) -> str:
    """One load for people."""
    lines = [f"{name}: ratio to stock, fresh and live, and the difference of the two with its 90 % interval"]
    for row in found.ratios:
        difference = _percent(row["difference"])
        mark = "" if row["required"] else " (not required)"
        lines.append(
            f"  {row['metric']:20} {row['setting']!s:12} {row['fresh']:6.3f} {row['live']:6.3f}  {difference:28}"
            f" p {row['p']:.4f}  {row['verdict']}{mark}"
        )
    lines.append(f"{name}: level in ms, fresh and live, and the offset with its 95 % interval")
    for row in found.levels:
        offset = _percent(row["offset"])
        lines.append(
            f"  {row['metric']:20} {row['setting']!s:12} {row['fresh']:7.1f} {row['live']:7.1f}  {offset:28}"
            f" {row['offset']['n']} blocks"
        )
    lines.append(f"{name}: offset of the level by the round of the fresh start, over all settings")
    lines += [f"  {row['metric']:20} {row['round']:12}  {_percent(row['offset'])}" for row in found.by_round]
    return "\n".join([*lines, f"{name}: {_order_text(found.order)}"])


def _percent(row: dict[str, Any]) -> str:
    mean, low, high = (100 * math.expm1(row[key]) for key in ("mean", "low", "high"))
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def _order_text(found: Order) -> str:
    if found.tau is None or found.tau_fresh is None:
        return "order: no pair of settings is told apart"
    disagree = f"; ranked otherwise: {found.disagree}" if found.disagree else ""
    return f"order: {found.pairs} pairs, tau {found.tau:.2f}, fresh halves {found.tau_fresh:.2f}{disagree}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the starts and rounds")
    parser.add_argument("--loads", default=",".join(LOADS), help=f"of {', '.join(LOADS)}")
    parser.add_argument("--settings", help="only these besides stock, by name (for a short try)")
    parser.add_argument("--blocks", type=int, default=8, help="fresh starts of each setting, and live starts")
    parser.add_argument("--rounds", type=int, help="of each setting on each start, instead of the load's own number")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no start after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="only analyse what is there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began_s = time.monotonic()
    findings: dict[str, Findings] = {}
    versions: set[str] = set()
    for name in options.loads.split(","):
        if name not in LOADS:
            parser.error(f"no load {name!r}; there are {', '.join(LOADS)}")
        load = LOADS[name]
        if options.settings:
            chosen = {key: value for key, value in load.settings.items() if key in options.settings.split(",")}
            load = LOADS[name] = replace(load, settings=chosen)
        design, folder = design_of(load, options), options.out / name
        left_s = 60 * options.minutes - (time.monotonic() - began_s)
        if not options.report:
            try:
                asyncio.run(measure(name, replace(design, stop_after_s=left_s), folder))
            except (KeyboardInterrupt, asyncio.CancelledError):
                print("stopped; the same command continues", file=sys.stderr)
                return 130
        results = Store(folder).results()
        versions |= {start.vllm_version for start in results.starts if start.vllm_version}
        findings[name] = analyse(load, results, design)
    total = together([found.order for found in findings.values()])
    passed = {
        "equivalent": all(found.shown for name, found in findings.items() if LOADS[name].equivalent),
        "order": total.pairs >= WANTED_PAIRS and (total.tau or 0.0) >= WANTED_TAU,
    }
    if options.json:
        record = machine() | {"vllm": sorted(versions)}
        record |= {"loads": {name: asdict(found) for name, found in findings.items()}}
        print(json.dumps(record | {"order": asdict(total), "passed": passed}, indent=2))
    else:
        print("\n\n".join(table(name, found) for name, found in findings.items()))
        print(f"\nall loads: {_order_text(total)}\n{passed}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
