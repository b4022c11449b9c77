"""How often the nightly verdict is wrong: false alarms and missed regressions, by starts.

No engine runs. Metric values are drawn from the hierarchical model (a standard deviation from start to
start, another from round to round), and whole runs are judged by the verdict's own functions, further stages
included. A plain threshold of 10 % on the planned starts stands beside them.

    python benchmarks/nightly.py [--freezes N] [--json]

Exit code 1 when a bar that the project holds itself to is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from nightly_model import GATE, ROUNDS, World, one_run, plain_alarm, two_runs

from tuner.regress.history import HistoryRow
from tuner.regress.plan import default_starts
from tuner.regress.verdict import Rules

AT_FREEZE = (1, 2, 3, 6, 12)
RUN = (1, 3, 6)


@dataclass
class Rate:
    """A share with its count."""

    hits: int = 0
    of: int = 0

    def add(self, hit: bool) -> None:
        self.hits += hit
        self.of += 1

    @property
    def percent(self) -> float:
        return 100.0 * self.hits / self.of if self.of else math.nan

    @property
    def error(self) -> float:
        """Standard error in percentage points."""
        share = self.hits / self.of if self.of else 0.0
        return 100.0 * math.sqrt(share * (1 - share) / self.of) if self.of else math.nan


@dataclass
class Cell:
    """One plan: starts at the freeze, and of a run."""

    at_freeze: int
    a_run: int
    false_alarm: Rate = field(default_factory=Rate)
    inconclusive: Rate = field(default_factory=Rate)
    five_first: Rate = field(default_factory=Rate)
    five_two: Rate = field(default_factory=Rate)
    ten_first: Rate = field(default_factory=Rate)
    ten_two: Rate = field(default_factory=Rate)
    plain_false: Rate = field(default_factory=Rate)
    plain_five: Rate = field(default_factory=Rate)
    plain_ten: Rate = field(default_factory=Rate)
    same_starts: int = 0
    same_runs: int = 0
    alarm_starts: int = 0
    alarm_runs: int = 0

    @property
    def starts_same(self) -> float:
        """Engine starts of a run in which nothing has changed, further stages included."""
        return self.same_starts / max(1, self.same_runs)

    @property
    def starts_ten(self) -> float:
        """Engine starts of a run with a regression of 10 %."""
        return self.alarm_starts / max(1, self.alarm_runs)


def measure_cell(
    at_freeze: int,
    a_run: int,
    freezes: int,
    rules: Rules,
    world: World,
    seed: int,
    *,
    both: bool = False,
    same_runs: int = 4,
) -> Cell:
    """Independent freezes; runs without a change for the false alarms, two runs after each regression.

    With `both` False only the first metric of the gate gets worse, the harder case.
    """
    rng = random.Random(f"{seed}/{at_freeze}/{a_run}/{both}/{world}")
    cell = Cell(at_freeze, a_run)
    hit = GATE if both else GATE[:1]
    for _ in range(freezes):
        then = world.starts(rng, at_freeze)
        history: list[HistoryRow] = []
        for _ in range(same_runs):
            verdict, line, starts = one_run(world, rng, then, history, a_run, rules)
            history.append(line)
            cell.false_alarm.add(verdict.verdict == "regressed")
            cell.inconclusive.add(verdict.verdict == "inconclusive")
            cell.plain_false.add(plain_alarm(then, world.starts(rng, a_run)))
            cell.same_starts += starts
            cell.same_runs += 1
        for size, first, two, plain in (
            (0.05, cell.five_first, cell.five_two, cell.plain_five),
            (0.10, cell.ten_first, cell.ten_two, cell.plain_ten),
        ):
            worse = dict.fromkeys(hit, size)
            found, starts = two_runs(world, rng, then, [], a_run, rules, worse)
            first.add(found == 1)
            two.add(found > 0)
            plain.add(plain_alarm(then, world.starts(rng, a_run, worse)))
            if size == 0.10:
                cell.alarm_starts += starts
                cell.alarm_runs += 1
    return cell


@dataclass
class AfterBroken:
    """Three broken runs, then a regression, or nothing."""

    at_freeze: int
    a_run: int
    false_alarm: Rate = field(default_factory=Rate)
    five_two: Rate = field(default_factory=Rate)
    ten_first: Rate = field(default_factory=Rate)
    rolling_ten: Rate = field(default_factory=Rate)
    """The peer that judges against the mean of the last three runs, threshold 10 %."""


def measure_broken(at_freeze: int, a_run: int, freezes: int, rules: Rules, world: World, seed: int) -> AfterBroken:
    """The three runs are 25 % slower throughout, with starts that scatter three times as much."""
    rng = random.Random(f"{seed}/contaminated/{at_freeze}/{a_run}")
    rough = World(start_sd=3 * world.start_sd, round_sd=world.round_sd)
    result = AfterBroken(at_freeze, a_run)
    for _ in range(freezes):
        then = world.starts(rng, at_freeze)
        history: list[HistoryRow] = []
        for _ in range(3):
            _, line, _ = one_run(rough, rng, then, history, a_run, rules, dict.fromkeys(GATE, 0.25))
            history.append(line)
        verdict, _, _ = one_run(world, rng, then, history, a_run, rules)
        result.false_alarm.add(verdict.verdict == "regressed")
        found, _ = two_runs(world, rng, then, history, a_run, rules, {GATE[0]: 0.05})
        result.five_two.add(found > 0)
        found, _ = two_runs(world, rng, then, history, a_run, rules, {GATE[0]: 0.10})
        result.ten_first.add(found == 1)
        rolled = {name: [start for n in history for start in n.values[name]] for name in GATE}
        result.rolling_ten.add(plain_alarm(rolled, world.starts(rng, a_run, {GATE[0]: 0.10})))
    return result


@dataclass
class LongRun:
    """Once a history has grown: runs 15 to 24."""

    at_freeze: int
    a_run: int
    day_sd: float
    with_stock: bool
    false_alarm: Rate = field(default_factory=Rate)
    five_two: Rate = field(default_factory=Rate)
    ten_two: Rate = field(default_factory=Rate)


def measure_long(
    at_freeze: int, a_run: int, freezes: int, rules: Rules, day_sd: float, seed: int, *, with_stock: bool
) -> LongRun:
    """Runs without a change, then a regression. Whole days may differ, which changes stock alike."""
    rng = random.Random(f"{seed}/long/{at_freeze}/{a_run}/{day_sd}/{with_stock}")
    world = World(day_sd=day_sd)
    result = LongRun(at_freeze, a_run, day_sd, with_stock)
    for _ in range(freezes):
        day = world.day(rng)
        then = world.starts(rng, at_freeze, None, day)
        stock_then = world.starts(rng, at_freeze, None, day) if with_stock else None
        history: list[HistoryRow] = []
        for number in range(24):
            verdict, line, _ = one_run(world, rng, then, history, a_run, rules, None, stock_then)
            history.append(line.model_copy(update={"verdict": verdict.verdict}))
            if number >= 14:
                result.false_alarm.add(verdict.verdict == "regressed")
        found, _ = two_runs(world, rng, then, history, a_run, rules, {GATE[0]: 0.05}, stock_then)
        result.five_two.add(found > 0)
        found, _ = two_runs(world, rng, then, history, a_run, rules, {GATE[0]: 0.10}, stock_then)
        result.ten_two.add(found > 0)
    return result


@dataclass(frozen=True)
class Bar:
    """One figure that has to be reached."""

    name: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def bars(cells: Sequence[Cell], broken: Sequence[AfterBroken]) -> list[Bar]:
    """What `regress` promises."""
    by_plan = {(c.at_freeze, c.a_run): c for c in cells}
    clean = by_plan[(12, 6)]
    after = next(b for b in broken if (b.at_freeze, b.a_run) == (12, 6))
    return [
        Bar("false alarms a run, worst plan, %", max(c.false_alarm.percent for c in cells), 1.0, at_most=True),
        Bar("12 at the freeze, 6 a run: 5 % found within two runs, %", clean.five_two.percent, 90.0),
        Bar("3 at the freeze, 3 a run: 10 % found in the first run, %", by_plan[(3, 3)].ten_first.percent, 90.0),
        Bar("the first of these after three broken runs, %", after.five_two.percent, 90.0),
        Bar("false alarms after three broken runs, %", after.false_alarm.percent, 1.0, at_most=True),
    ]


def plan_by_table(cells: Sequence[Cell]) -> dict[int, int]:
    """By starts at the freeze: the fewest a run that find 10 % at once in 90 % of cases, else the most tried.

    This is what `tuner.regress.plan.default_starts` answers.
    """
    chosen = {}
    for at_freeze in AT_FREEZE:
        rows = sorted((c for c in cells if c.at_freeze == at_freeze), key=lambda c: c.a_run)
        good = [c.a_run for c in rows if c.ten_first.percent >= 90.0]
        chosen[at_freeze] = good[0] if good else 3
    return chosen


def print_cells(title: str, cells: Sequence[Cell], *, plain: bool) -> None:
    print(f"\n{title}")
    head = "at the  planned | starts of a run   | false    incon- | 5 % found       | 10 % found"
    print(head + ("      | plain 10 % threshold" if plain else ""))
    line = "freeze  a run   | same   10 % worse | alarms % clusive| 1st   within 2  | 1st   within 2"
    print(line + (" | false   5 %   10 %" if plain else ""))
    for c in cells:
        row = (
            f"{c.at_freeze:8d} {c.a_run:7d} | {c.starts_same:4.1f}   {c.starts_ten:10.1f} "
            f"| {c.false_alarm.percent:5.2f}    {c.inconclusive.percent:5.1f}  "
            f"| {c.five_first.percent:5.1f} {c.five_two.percent:9.1f} | {c.ten_first.percent:5.1f} "
            f"{c.ten_two.percent:9.1f}"
        )
        if plain:
            row += f" | {c.plain_false.percent:5.2f} {c.plain_five.percent:5.1f} {c.plain_ten.percent:6.1f}"
        print(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--freezes", type=int, default=2000, help="independent freezes for every plan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    rules, world, count, seed = Rules(), World(), options.freezes, options.seed
    plans = [(b, n) for b in AT_FREEZE for n in RUN]
    few = max(200, count // 4)
    cells = [measure_cell(b, n, count, rules, world, seed) for b, n in plans]
    fixed = [measure_cell(b, n, few, Rules(stages=1), world, seed) for b, n in plans]
    both = [measure_cell(b, n, few, rules, world, seed, both=True) for b, n in ((3, 3), (12, 6))]
    fixed_both = [measure_cell(b, n, few, Rules(stages=1), world, seed, both=True) for b, n in ((3, 3), (12, 6))]
    broken = [measure_broken(b, n, count, rules, world, seed) for b, n in ((3, 3), (12, 6))]
    others = {
        "starts differ by 1.5 %": World(start_sd=0.015),
        "starts differ by 6 %": World(start_sd=0.06),
        "rounds differ by 10 %": World(round_sd=0.10),
        "each start runs at 0.9 or 1.15": World(two_speeds=True),
    }
    elsewhere = {
        name: [measure_cell(b, n, few, rules, other, seed) for b, n in ((1, 1), (3, 3), (12, 6))]
        for name, other in others.items()
    }
    lasting = [
        measure_long(b, n, few, rules, sd, seed, with_stock=stock)
        for b, n in ((3, 3), (12, 6))
        for sd in (0.0, 0.02)
        for stock in (False, True)
    ]
    promised, chosen = bars(cells, broken), plan_by_table(cells)
    follows = all(default_starts(at_freeze) == a_run for at_freeze, a_run in chosen.items())
    if options.json:
        document = {
            "model": asdict(world),
            "freezes": count,
            "cells": [_row(c) for c in cells],
            "planned_starts_only": [_row(c) for c in fixed],
            "both_metrics_worse": [_row(c) for c in both],
            "both_metrics_worse_planned_starts_only": [_row(c) for c in fixed_both],
            "broken_runs": [_row(c) for c in broken],
            "after_14_runs": [_row(c) for c in lasting],
            "elsewhere": {name: [_row(c) for c in found] for name, found in elsewhere.items()},
            "default_starts": chosen,
            "default_follows": follows,
            "bars": [asdict(b) | {"met": b.met} for b in promised],
        }
        print(json.dumps(document, indent=2))
        return 0 if follows and all(b.met for b in promised) else 1
    print(
        f"{count} independent freezes a plan; start to start {world.start_sd:.0%}, round to round "
        f"{world.round_sd:.0%}, {ROUNDS} rounds a start; gate: {', '.join(GATE)}; only the first gets worse"
    )
    print_cells(
        f"Up to {rules.stages} stages a run (the default: a suspicion takes more fresh starts)", cells, plain=True
    )
    print_cells("Planned starts only (one stage)", fixed, plain=False)
    print_cells("Both metrics get worse, up to 3 stages", both, plain=False)
    print_cells("Both metrics get worse, planned starts only", fixed_both, plain=False)
    print("\nAfter three broken runs (25 % slower); the peer judges against their mean, threshold 10 %")
    print("                          | false alarms % | 5 % in two | 10 % first | the peer, 10 %")
    for b in broken:
        print(
            f"{b.at_freeze:4d} then, {b.a_run} a run        | {b.false_alarm.percent:14.2f} "
            f"| {b.five_two.percent:10.1f} | {b.ten_first.percent:10.1f} | {b.rolling_ten.percent:10.1f}"
        )
    print("\nWith a history (runs 15 to 24), where whole days differ too, with stock measured and without it")
    print("freeze  planned  days differ    stock | false alarms % | 5 % in two | 10 % in two")
    for run in lasting:
        print(
            f"{run.at_freeze:6d} {run.a_run:8d} {run.day_sd:12.0%} {'yes' if run.with_stock else 'no':>8s} "
            f"| {run.false_alarm.percent:14.2f} | {run.five_two.percent:10.1f} | {run.ten_two.percent:10.1f}"
        )
    for name, found in elsewhere.items():
        print_cells(f"Where {name}", found, plain=True)
    print(f"\nDefault starts of a run by starts at the freeze: {chosen}; the code's default follows: {follows}")
    print(f"{time.monotonic() - began:.0f} s\n")
    for bar in promised:
        sign = "<=" if bar.at_most else ">="
        print(f"{'met   ' if bar.met else 'MISSED'} {bar.name}: {bar.value:.2f} ({sign} {bar.limit:g})")
    return 0 if follows and all(b.met for b in promised) else 1


def _row(cell: Cell | AfterBroken | LongRun) -> dict[str, float]:
    row: dict[str, float] = {}
    for name, value in vars(cell).items():
        if isinstance(value, Rate):
            row[f"{name}_percent"] = round(value.percent, 3)
        elif name in ("at_freeze", "a_run", "day_sd", "with_stock"):
            row[name] = value
    if isinstance(cell, Cell):
        row |= {"starts_same": round(cell.starts_same, 2), "starts_ten_percent_worse": round(cell.starts_ten, 2)}
    return row


if __name__ == "__main__":
    sys.exit(main())
