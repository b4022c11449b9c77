"""The comparison of live switching with fresh starts: its design, and what it makes of rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from tuner.domain.experiment import Results, Round, SettingId, Start
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.setting import STOCK, ReuseBudget, Setting
from tuner.experiment.design import Named, StartPlan, StudyStopped

model: Any = pytest.importorskip("benchmarks.live_model", reason="run as python -m pytest from the checkout")

CHUNK = Named("chunk 512", Setting(knobs={"max_num_batched_tokens": 512}))
BUDGET = Named("admission", Setting(reuse_budget=ReuseBudget(min_reuse_ratio=0.8)))
NAMED = (Named("stock", STOCK), CHUNK, BUDGET)
PATH = "ttft_ms.p90"


def design(**changes: object) -> Any:
    return model.Blocks(**{"base_args": {"max_num_seqs": 64}, "named": NAMED, "blocks": 4, "rounds": 2} | changes)


def measurement(ms: float) -> Measurement:
    return Measurement(ttft_ms=Latency(p50=ms, p90=ms, p99=ms, mean=ms, n=200))


def run(blocks: Any, level_ms: Callable[[SettingId, StartPlan, int], float]) -> Results:
    """What a run of the design measures; `level_ms` of a setting, a start and a cycle."""
    results = Results()
    while (plan := blocks.next_start(results)) is not None:
        start = Start(
            number=len(results.starts) + 1,
            purpose=plan.purpose,
            label=plan.label,
            state="completed",
            engine_args=plan.engine_args,
            live=plan.live,
            settings=[named.id for named in plan.settings],
        )
        results.starts.append(start)
        while (step := blocks.next_step(results, start)) is not None:
            results.rounds.append(
                Round(
                    start=start.number,
                    round=len(results.rounds) + 1,
                    cycle=step.cycle,
                    position=step.position,
                    setting=step.named.id,
                    state="kept",
                    measurement=measurement(level_ms(step.named.id, plan, step.cycle)),
                )
            )
    return results


def found(results: Results, *, live: bool) -> Any:
    blocks = {start.number: design().block_of(start) for start in results.starts}
    return model.levels(results, PATH, blocks, live=live, rounds=2)


LEVEL_MS = {"stock": 100.0, "chunk 512": 80.0, "admission": 60.0}


def same(name: SettingId, plan: StartPlan, cycle: int) -> float:
    return LEVEL_MS[str(name)] * (1 + 0.1 * cycle)


def test_a_block_has_a_fresh_start_of_every_setting_and_a_live_one_with_the_same_arrivals() -> None:
    results = run(design(), same)
    labels = [start.label for start in results.starts]
    assert len(labels) == len(set(labels)) == 16
    assert sum(start.live for start in results.starts) == 4
    for block in range(4):
        numbers = [start.number for start in results.starts if start.label.startswith(f"block {block}:")]
        for name in LEVEL_MS:
            for switched in (True, False):
                rows = [
                    row.cycle
                    for row in results.kept(name, starts=numbers)
                    if results.starts[row.start - 1].live is switched
                ]
                assert sorted(rows) == [2 * block, 2 * block + 1]


def test_a_live_start_takes_the_largest_chunk_with_stock_s_and_a_fresh_one_its_setting() -> None:
    plans = {plan.label: plan for plan in design().plans()}
    live = plans["block 1: live"]
    assert (live.engine_args["max_num_batched_tokens"], live.live_budget, live.reuse_budget) == (2048, True, None)
    plan = next(p for p in design(base_args={"max_num_batched_tokens": 256}).plans() if p.live)
    assert plan.engine_args["max_num_batched_tokens"] == 512
    assert "max_num_batched_tokens" not in plans["block 1: stock"].engine_args
    assert plans["block 1: admission"].reuse_budget == BUDGET.setting.reuse_budget


def test_an_interrupted_start_is_made_again_and_one_that_always_fails_ends_the_run() -> None:
    blocks = design()
    plan = blocks.next_start(Results())
    start = Start(number=1, purpose=plan.purpose, label=plan.label, state="interrupted", engine_args={})
    assert blocks.next_start(Results([start])) == plan
    failed = start.model_copy(update={"state": "engine_failed"})
    assert blocks.next_start(Results([failed] * 2)) == plan
    with pytest.raises(StudyStopped):
        blocks.next_start(Results([failed] * 3))


def test_no_start_begins_after_the_time_is_up() -> None:
    assert design(stop_after_s=60.0).next_start(Results(elapsed_s=61.0)) is None


def test_an_offset_of_the_level_does_not_touch_the_ratios() -> None:
    rng = random.Random(1)

    def offset(name: SettingId, plan: StartPlan, cycle: int) -> float:
        return same(name, plan, cycle) * (0.93 if plan.live else 1.0) * math.exp(rng.gauss(0, 0.002))

    results = run(design(), offset)
    live, fresh = found(results, live=True), found(results, live=False)
    off = model.interval(model.differences(live["stock"], fresh["stock"]))
    assert off.low < math.log(0.93) < off.high < math.log(0.95)
    test = model.equivalence(model.ratio_differences(live, fresh, "chunk 512", "stock"))
    assert test.verdict == "equivalent"
    assert test.difference.low > -model.MARGIN
    assert test.difference.high < model.MARGIN


def test_a_slow_first_round_of_fresh_starts_shows_in_the_offset_of_that_round() -> None:
    def slow_first(name: SettingId, plan: StartPlan, cycle: int) -> float:
        return same(name, plan, cycle) * (1.1 if not plan.live and cycle % 2 == 0 else 1.0)

    results = run(design(), slow_first)
    blocks = {start.number: design().block_of(start) for start in results.starts}
    offsets = [
        model.offset_of_round(
            *(model.levels(results, PATH, blocks, live=live, rounds=2, only=number) for live in (True, False))
        )
        for number in (0, 1)
    ]
    assert offsets[0] == pytest.approx([-math.log(1.1)] * 4)
    assert offsets[1] == pytest.approx([0.0] * 4)
    assert model.offset_of_round({}, {}) == []


def test_ratios_that_differ_or_scatter_are_not_equivalent() -> None:
    far = model.equivalence([0.2, 0.21, 0.19, 0.2])
    assert far.verdict == "different"
    loose = model.equivalence([0.1, -0.1, 0.08, -0.09])
    assert loose.verdict == "not shown"
    assert model.equivalence([0.0]).p == 1.0


def test_the_p_value_and_the_interval_say_the_same() -> None:
    rng = random.Random(2)
    for _ in range(50):
        values = [rng.gauss(rng.uniform(-0.06, 0.06), 0.02) for _ in range(8)]
        test = model.equivalence(values)
        inside = max(-test.difference.low, test.difference.high) < model.MARGIN
        assert (test.p < model.ALPHA) == inside


def test_pairs_are_chosen_by_one_half_and_judged_by_the_other() -> None:
    rng = random.Random(3)

    def noisy(name: SettingId, plan: StartPlan, cycle: int) -> float:
        return same(name, plan, cycle) * math.exp(rng.gauss(0, 0.01))

    results = run(design(blocks=8), noisy)
    order = model.order(found(results, live=True), found(results, live=False))
    assert (order.pairs, order.tau, order.tau_fresh, order.disagree) == (3, 1.0, 1.0, ())


def test_a_live_order_that_is_turned_round_is_seen() -> None:
    rng = random.Random(4)

    def turned(name: SettingId, plan: StartPlan, cycle: int) -> float:
        name = {"stock": "admission", "admission": "stock"}.get(str(name), name) if plan.live else name
        return same(name, plan, cycle) * math.exp(rng.gauss(0, 0.01))

    results = run(design(blocks=8), turned)
    order = model.order(found(results, live=True), found(results, live=False))
    assert (order.pairs, order.tau, order.tau_fresh) == (3, -1.0, 1.0)
    assert len(order.disagree) == 3
    both = model.together([order, model.Order(1, 1.0, 1.0, ())])
    assert (both.pairs, both.tau) == (4, -0.5)
    assert model.together([]).tau is None


def test_a_start_with_too_few_rounds_is_left_out() -> None:
    results = run(design(), same)
    last = results.rounds.pop()
    short = results.starts[last.start - 1]
    levels = found(results, live=short.live)
    assert design().block_of(short) not in levels.get(last.setting, {})
    assert len(levels["stock"]) >= 3
