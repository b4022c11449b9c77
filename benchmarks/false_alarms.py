"""How often two measurements of one configuration seem to differ, and how often a real slowdown is seen.

The simulated engine's scheduler runs in virtual time on the step times of a 70B model on four H100. Pairs
are measured within one engine start, rounds interleaved: a side, the same again, and sides whose every step
takes 5 % and 10 % longer, which in a closed loop is as much in time to first token. Each round's steps
scatter by 2 % as a whole; requests differ by length and queueing as they naturally do. `tuner.measure` gives
the intervals. Beside them: one fresh start a side, where starts differ by 3 %, and several.

    python benchmarks/false_alarms.py [--pairs N] [--rounds N] [--jobs N] [--json]

Needs the extra `sim`. Exit code 1 when a bar that the project holds itself to is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing import get_context

from tuner.domain.measurement import Measurement
from tuner.domain.observation import (
    ClientStats,
    CounterDelta,
    MemoryBreakdown,
    MemoryTimeline,
    RequestRecord,
    RoundObservation,
)
from tuner.measure import measure_round, relative_change, summarize
from tuner.sim.core import Core, SchedulerConfig
from tuner.sim.cost import MeasuredCost, StepCost
from tuner.sim.pipeline import Timing
from tuner.sim.virtual import Answer, Ask, run_closed_loop

CONCURRENCY, SYSTEM_TOKENS, USER_TOKENS, OUTPUT_TOKENS = 32, 512, (32, 128), (8, 24)
ENGINE = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=128, max_model_len=8192, num_blocks=30_000)
ROUND_NOISE, START_NOISE = 0.02, 0.03
SLOWDOWNS = {"the same again": 1.0, "5 % slower": 1.05, "10 % slower": 1.10}
BARS = {"the same again": ("<=", 0.05), "5 % slower": (">=", 0.80), "10 % slower": (">=", 0.99)}
JUDGED = "ttft_ms.p50"
METRICS = ("ttft_ms.p50", "ttft_ms.p90", "ttft_ms.mean", "request_throughput")
ROUNDS_OF_A_TRIAL = 3
STARTS, ROUNDS_A_START = 6, 2


@dataclass
class Rounds:
    """One side's rounds."""

    measurements: list[Measurement] = field(default_factory=list)
    observations: list[RoundObservation] = field(default_factory=list)

    def first(self, count: int) -> Rounds:
        return Rounds(self.measurements[:count], self.observations[:count])


class Engine:
    """One start of the engine; prefixes of earlier rounds stay in its cache, as they would."""

    def __init__(self, cost: StepCost, rng: random.Random, speed: float = 1.0) -> None:
        self._core = Core(ENGINE)
        self._cost = cost
        self._rng = rng
        self._speed = speed

    def round(self, side: Rounds, requests: int, slowdown: float = 1.0) -> None:
        """Measure one round on a prefix never used before."""
        scale = self._speed * slowdown * math.exp(self._rng.gauss(0, ROUND_NOISE))
        asks = _asks(self._rng, CONCURRENCY + requests)
        observation = _observed(
            run_closed_loop(self._core, self._cost, asks, concurrency=CONCURRENCY, timing=Timing(scale=scale))
        )
        nothing = MemoryTimeline("unavailable", [], {}, "virtual time")
        side.observations.append(observation)
        side.measurements.append(
            measure_round(observation, CounterDelta(), nothing, MemoryBreakdown(), [], block_size=ENGINE.block_size)
        )


def _asks(rng: random.Random, count: int) -> Iterator[Ask]:
    system = [rng.randrange(900) for _ in range(SYSTEM_TOKENS)]
    words = [rng.randrange(900) for _ in range(8192)]
    for _ in range(count):
        at = rng.randrange(len(words) - USER_TOKENS[1])
        yield Ask(system + words[at : at + rng.randint(*USER_TOKENS)], rng.randint(*OUTPUT_TOKENS))


def _observed(answers: list[Answer]) -> RoundObservation:
    """What a client that is never late would have seen."""
    records = []
    for index, answer in enumerate(answers):
        times = answer.token_times_s
        records.append(
            RequestRecord(
                index=index,
                phase="cold" if index < CONCURRENCY else "measured",
                intended_s=answer.sent_s,
                sent_s=answer.sent_s,
                first_token_s=answer.first_token_s,
                first_answer_s=answer.first_token_s,
                last_token_s=times[-1],
                finished_s=answer.finished_s,
                token_gaps_ms=[(b - a) * 1e3 for a, b in pairwise(times)],
                deltas=len(times),
                prompt_tokens=len(answer.ask.prompt),
                output_tokens=len(times),
                cached_tokens=answer.cached_tokens,
            )
        )
    measured = records[CONCURRENCY:]
    return RoundObservation(
        records=records,
        client=ClientStats(0.0, CONCURRENCY, CONCURRENCY, 0.0, False),
        started_s=0.0,
        measured_from_s=min(r.sent_s for r in measured),
        measured_to_s=max(r.finished_s or 0.0 for r in measured),
    )


Tally = Counter[tuple[str, str, int]]
"""(case, metric, rounds a side) to pairs whose interval leaves out 'no change', in the right direction."""


def _differs(before: Rounds, after: Rounds, path: str, case: str, starts: list[int] | None = None) -> bool:
    change = relative_change(
        before.measurements,
        after.measurements,
        path,
        baseline_observations=before.observations,
        now_observations=after.observations,
        baseline_starts=starts,
        now_starts=starts,
    )
    worse = (change.change or 0.0) < 0 if path == "request_throughput" else (change.change or 0.0) > 0
    return bool(change.differs) and (worse or SLOWDOWNS.get(case, 1.0) == 1.0)


@dataclass(frozen=True)
class Plan:
    """One worker's share."""

    pairs: int
    start_pairs: int
    rounds: int
    requests: int
    seed: int

    @property
    def steps(self) -> list[int]:
        """Rounds a side to look at: those of a trial, and up to all."""
        return sorted({r for r in (ROUNDS_OF_A_TRIAL, self.rounds // 2, self.rounds) if r >= 2})


def _work(plan: Plan) -> tuple[Tally, float]:
    began = time.process_time()
    rng = random.Random(plan.seed)
    cost = MeasuredCost("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", 4)
    tally: Tally = Counter()
    engine = Engine(cost, rng)
    for _ in range(plan.pairs):
        before, sides = Rounds(), {case: Rounds() for case in SLOWDOWNS}
        for _ in range(plan.rounds):
            engine.round(before, plan.requests)
            for case, slowdown in SLOWDOWNS.items():
                engine.round(sides[case], plan.requests, slowdown)
        for case, after in sides.items():
            for count in plan.steps:
                for path in METRICS:
                    tally[case, path, count] += _differs(before.first(count), after.first(count), path, case)
        few = before.first(ROUNDS_OF_A_TRIAL)
        doubted = summarize(few.measurements, few.observations).warnings
        tally["rounds said to disagree", JUDGED, ROUNDS_OF_A_TRIAL] += any("rounds disagree" in w for w in doubted)
    for _ in range(plan.start_pairs):
        one = [_starts(cost, rng, plan, 1, plan.rounds) for _ in range(2)]
        several = [_starts(cost, rng, plan, STARTS, ROUNDS_A_START) for _ in range(2)]
        starts = [s for s in range(STARTS) for _ in range(ROUNDS_A_START)]
        for path in METRICS:
            tally["one start a side", path, plan.rounds] += _differs(*one, path, "")
            tally["several starts", path, STARTS * ROUNDS_A_START] += _differs(*several, path, "", starts)
    return tally, time.process_time() - began


def _starts(cost: StepCost, rng: random.Random, plan: Plan, starts: int, rounds: int) -> Rounds:
    side = Rounds()
    for _ in range(starts):
        engine = Engine(cost, rng, speed=math.exp(rng.gauss(0, START_NOISE)))
        for _ in range(rounds):
            engine.round(side, plan.requests)
    return side


@dataclass(frozen=True)
class Row:
    """A line of the table: shares of pairs that were said to differ."""

    case: str
    rounds: int
    pairs: int
    shares: dict[str, float]
    bar: str = ""
    met: bool | None = None


def _rows(tally: Tally, plan: Plan) -> list[Row]:
    rows = []
    for count in plan.steps:
        for case, (sign, limit) in BARS.items():
            shares = {path: tally[case, path, count] / plan.pairs for path in METRICS}
            held = count == plan.rounds or sign == "<="
            ok = shares[JUDGED] <= limit if sign == "<=" else shares[JUDGED] >= limit
            rows.append(
                Row(case, count, plan.pairs, shares, f"{sign} {limit:.0%}" if held else "", ok if held else None)
            )
    if plan.start_pairs:
        named = {
            ("one start a side", plan.rounds): f"same, one start a side, starts ±{START_NOISE:.0%}",
            ("several starts", STARTS * ROUNDS_A_START): f"same, {STARTS} starts a side, starts ±{START_NOISE:.0%}",
        }
        for (case, count), label in named.items():
            shares = {path: tally[case, path, count] / plan.start_pairs for path in METRICS}
            rows.append(Row(label, count, plan.start_pairs, shares))
    doubted = tally["rounds said to disagree", JUDGED, ROUNDS_OF_A_TRIAL] / plan.pairs
    rows.append(Row("warned: 'rounds disagree'", ROUNDS_OF_A_TRIAL, plan.pairs, {JUDGED: doubted}))
    return rows


def _print(rows: list[Row], seconds: float, plan: Plan) -> None:
    print(
        f"Share of pairs whose 95 % interval leaves out 'no change'; {plan.requests} measured requests a round, "
        f"round noise {ROUND_NOISE:.0%}, {seconds:.0f} s of CPU\n"
    )
    heads = "".join(f"{path.replace('_ms', ''):>20}" for path in METRICS)
    print(f"{'case':<42}{'rounds a side':>14}{'pairs':>7}{heads}   bar on {JUDGED.replace('_ms', '')}")
    for row in rows:
        shares = "".join(f"{row.shares[p]:>20.1%}" if p in row.shares else f"{'':>20}" for p in METRICS)
        verdict = "" if row.met is None else f"   {row.bar}: {'met' if row.met else 'MISSED'}"
        print(f"{row.case:<42}{row.rounds:>14}{row.pairs:>7}{shares}{verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--start-pairs", type=int, default=60, help="pairs on fresh starts (default 60)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds a side (default 12)")
    parser.add_argument("--requests", type=int, default=100, help="measured requests a round (default 100)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    jobs = max(1, min(asked.jobs, asked.pairs))
    plans = [
        Plan(
            pairs=asked.pairs // jobs + (job < asked.pairs % jobs),
            start_pairs=asked.start_pairs // jobs + (job < asked.start_pairs % jobs),
            rounds=asked.rounds,
            requests=asked.requests,
            seed=asked.seed * 1000 + job,
        )
        for job in range(jobs)
    ]
    tally: Tally = Counter()
    seconds = 0.0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for found, took in pool.map(_work, plans):
            tally += found
            seconds += took
    whole = Plan(asked.pairs, asked.start_pairs, asked.rounds, asked.requests, asked.seed)
    rows = _rows(tally, whole)
    if asked.json:
        print(json.dumps({"rows": [asdict(r) for r in rows], "cpu_s": seconds, "plan": asdict(whole)}, indent=2))
    else:
        _print(rows, seconds, whole)
    return 0 if all(row.met is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
