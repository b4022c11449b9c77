"""What a sweep finds, what it costs, and how often it is wrong: simulated sweeps on recorded landscapes.

    python benchmarks/search.py [--seeds N] [--nulls N] [--gains N] [--only NAME,NAME] [--jobs N] [--json]

The landscapes are rounds that the simulated engine served in virtual time (`search_landscapes.py`), resampled by
cycle, so that settings of a cycle keep what they have in common. Starts differ by 3 % as a whole, and each setting in
each start by 1 % of its own; a start takes four minutes. The product's own search design measures them with a runner
in memory. Beside it: the list, random search and Optuna's TPE, with an engine start for each setting.

- finds: the leader of the finals is feasible and within 3 % of the best feasible setting of a grid of 128 tokens.
- null: every setting is equal to stock, yet something else is frozen.
- gain: one setting of the list is 10 % or 5 % better than stock, and is frozen; beside it the smallest gain that is
  frozen in 90 %.
- over: one setting is 20 % better than stock but 5 % over a limit that stock meets, and is frozen.

Exit code 1 when a bar that the project holds itself to is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from statistics import mean
from typing import Any

import numpy as np
from search_model import Landscape, load_landscapes, one_by_one, sweep

PEERS = ("grid", "random", "tpe")
GAINS = (0.10, 0.05)
LOW_SPREAD = 0.05
"""Paired spread of rounds up to which the bars on gains hold."""
DEFAULT_STARTS, DEFAULT_MINUTES, FINDS, NULL, OVER = 6, 45.0, 0.95, 25 / 500, 0.02
GAIN_BARS = {0.10: 0.90, 0.05: 0.60}
LARGER_GAINS = (0.15, 0.20, 0.25, 0.30, 0.40)


def _finds(landscape: Landscape, seed: int) -> dict[str, Any]:
    outcome = sweep(landscape, seed)
    leader = outcome.leader
    return {
        "starts": outcome.starts,
        "minutes": outcome.minutes,
        "rounds": len(outcome.results.rounds),
        "near": leader is not None and landscape.is_near_best(leader),
        "feasible": leader is not None and bool(landscape.feasible[landscape.of(leader)]),
        "leader": None if leader is None else leader.label,
        "verdict": outcome.decision.verdict,
    }


def _peer(landscape: Landscape, seed: int, *, sampler: str) -> dict[str, Any]:
    starts, minutes, best = one_by_one(landscape, sampler, seed)
    near = best is not None and landscape.is_near_best(best)
    feasible = best is not None and bool(landscape.feasible[landscape.of(best)])
    return {"starts": starts, "minutes": minutes, "near": near, "feasible": feasible}


def _null(landscape: Landscape, seed: int) -> bool:
    return sweep(landscape.level_ground(), seed).decision.verdict == "better"


def _gain(landscape: Landscape, seed: int, *, gain: float) -> bool:
    """Another listed setting for each seed."""
    ground = landscape.level_ground()
    listed = ground.problem.groups[0].settings
    target = listed[seed % len(listed)]
    outcome = sweep(ground.with_gain(target, gain), seed)
    frozen = outcome.frozen if outcome.decision.verdict == "better" else None
    return frozen is not None and ground.of(frozen) == ground.of(target)


def _over(landscape: Landscape, seed: int) -> bool:
    """Stock and all others 30 % below the limit, one setting 5 % above it."""
    limit = landscape.limits()[-1]
    ground = landscape.level_ground(limits=True)
    listed = ground.problem.groups[0].settings
    target = listed[seed % len(listed)]
    for each in ground.limits():
        ground = ground.with_level(each.metric, np.full(len(ground.settings), 0.7 * each.limit))
    levels = np.full(len(ground.settings), 0.7 * limit.limit)
    levels[ground.of(target)] = 1.05 * limit.limit
    outcome = sweep(ground.with_level(limit.metric, levels).with_gain(target, 0.2), seed)
    return outcome.frozen is not None and ground.of(outcome.frozen) == ground.of(target)


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else 0.0


@dataclass
class Row:
    """One landscape."""

    name: str
    paired_spread: float
    finds: float
    feasible: float
    starts: float
    minutes: float
    rounds: float
    verdicts: dict[str, int]
    peers: dict[str, dict[str, float]]
    nulls: int
    null_runs: int
    gains: dict[str, float]
    sure_gain: float | None
    """The smallest gain that is frozen in 90 %."""
    over: float | None
    missed: list[str]


def measure(name: str, run: Callable[..., list[Any]], arguments: argparse.Namespace) -> Row:
    landscape = load_landscapes([name])[name]
    found = run(_finds, landscape, arguments.seeds)
    peers = {}
    for sampler in PEERS:
        theirs = run(partial(_peer, sampler=sampler), landscape, arguments.seeds)
        peers[sampler] = {key: mean(float(r[key]) for r in theirs) for key in ("near", "feasible", "starts", "minutes")}
    nulls = run(_null, landscape, arguments.nulls)
    gains = {f"{gain:g}": _share(run(partial(_gain, gain=gain), landscape, arguments.gains)) for gain in GAINS}
    sure_gain = next((g for g in sorted(GAINS) if gains[f"{g:g}"] >= GAIN_BARS[0.10]), None)
    for gain in LARGER_GAINS if sure_gain is None and arguments.gains else ():
        if _share(run(partial(_gain, gain=gain), landscape, arguments.gains)) >= GAIN_BARS[0.10]:
            sure_gain = gain
            break
    over = _share(run(_over, landscape, arguments.gains)) if landscape.limits() else None
    row = Row(
        name,
        landscape.paired_spread(),
        mean(float(r["near"]) for r in found),
        mean(float(r["feasible"]) for r in found),
        mean(r["starts"] for r in found),
        mean(r["minutes"] for r in found),
        mean(r["rounds"] for r in found),
        {v: sum(r["verdict"] == v for r in found) for v in ("better", "stock", "none")},
        peers,
        sum(nulls),
        len(nulls),
        gains,
        sure_gain,
        over,
        [],
    )
    worst = max(r["starts"] for r in found), max(r["minutes"] for r in found)
    row.missed = list(_missed(row, worst))
    return row


def _missed(row: Row, worst: tuple[int, float]) -> Sequence[str]:
    missed = []
    if row.name == "default" and (worst[0] > DEFAULT_STARTS or worst[1] > DEFAULT_MINUTES):
        missed.append(
            f"{worst[0]} starts and {worst[1]:.0f} min at most, not {DEFAULT_STARTS} and {DEFAULT_MINUTES:.0f}"
        )
    if row.finds < FINDS:
        missed.append(f"finds {row.finds:.0%}, not {FINDS:.0%}")
    if row.nulls > NULL * row.null_runs:
        missed.append(f"null {row.nulls} of {row.null_runs}")
    for gain, bar in GAIN_BARS.items():
        if row.paired_spread <= LOW_SPREAD and row.gains[f"{gain:g}"] < bar:
            missed.append(f"gain {gain:.0%} frozen in {row.gains[f'{gain:g}']:.0%}, not {bar:.0%}")
    if row.over is not None and row.over > OVER:
        missed.append(f"over the limit {row.over:.1%}")
    return missed


def _print(rows: list[Row], arguments: argparse.Namespace, seconds: float) -> None:
    print(
        f"{arguments.seeds} sweeps of each landscape, {arguments.nulls} without a difference, {arguments.gains} with a "
        f"gain; starts of 4 min; {seconds:.0f} s\n"
    )
    peers = "".join(f"{name + ' near / min':>20}" for name in PEERS)
    print(
        f"{'landscape':<16}{'spread':>7}{'near':>6}{'feas.':>6}{'starts':>7}{'min':>5}{'rounds':>7}{peers}"
        f"{'null':>9}{'gain 10 %':>10}{'gain 5 %':>9}{'90 % at':>8}{'over':>6}  verdicts"
    )
    for row in rows:
        beside = "".join(f"{row.peers[p]['near']:>13.0%} / {row.peers[p]['minutes']:>4.0f}" for p in PEERS)
        over = "" if row.over is None else f"{row.over:.1%}"
        sure = "" if row.sure_gain is None else f"{row.sure_gain:.0%}"
        print(
            f"{row.name:<16}{row.paired_spread:>7.1%}{row.finds:>6.0%}{row.feasible:>6.0%}{row.starts:>7.1f}"
            f"{row.minutes:>5.0f}{row.rounds:>7.0f}{beside}{f'{row.nulls}/{row.null_runs}':>9}"
            f"{row.gains['0.1']:>10.0%}{row.gains['0.05']:>9.0%}{sure:>8}{over:>6}  "
            + ", ".join(f"{v} {n}" for v, n in row.verdicts.items() if n)
        )
    for row in rows:
        for missed in row.missed:
            print(f"MISSED on {row.name}: {missed}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--nulls", type=int, default=500)
    parser.add_argument("--gains", type=int, default=200)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    began = time.monotonic()
    names = arguments.only.split(",") if arguments.only else list(load_landscapes())
    rows = []
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:

        def run(task: Callable[..., Any], landscape: Landscape, count: int) -> list[Any]:
            step = max(1, min(10, count // arguments.jobs))
            return list(pool.map(partial(task, landscape), range(count), chunksize=step)) if count else []

        for name in names:
            rows.append(measure(name, run, arguments))
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        _print(rows, arguments, time.monotonic() - began)
    return 1 if any(row.missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
