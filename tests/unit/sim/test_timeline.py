"""Steps on a time line, and whole loads in virtual time."""

import random

import pytest

from tuner.sim.core import Core, Request, SchedulerConfig
from tuner.sim.cost import LinearCost, StepShape
from tuner.sim.pipeline import Pipeline, Timing
from tuner.sim.virtual import Ask, run_closed_loop, run_open

COST = LinearCost(floor_ms=10.0, per_token_ms=0.1)


def core(**changes: int) -> Core:
    fields = {"max_num_batched_tokens": 64, "max_num_seqs": 32, "max_model_len": 4096, "num_blocks": 2000}
    return Core(SchedulerConfig(**{**fields, **changes}))


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 900) for _ in range(length)]


def test_a_lone_request_takes_the_time_of_its_steps() -> None:
    [answer] = run_open(core(), COST, [Ask(prompt(1, 64), 3)])
    assert answer.ttft_ms == pytest.approx(16.4)
    assert answer.token_times_s == pytest.approx([0.0164, 0.0265, 0.0366])
    assert answer.finished_s == answer.token_times_s[-1]


def test_a_late_request_waits_for_the_step_under_way() -> None:
    asks = [Ask(prompt(1, 64), 50), Ask(prompt(2, 30), 1, at_s=0.020)]
    in_step = run_open(core(), COST, asks, Timing(depth=1))[1]
    # The step that runs at 20 ms ends at 26.5; the next one computes both.
    assert in_step.first_token_s == pytest.approx(0.0265 + 0.0131)


def test_a_step_planned_ahead_makes_a_late_request_wait_one_step_longer() -> None:
    asks = [Ask(prompt(1, 64), 50), Ask(prompt(2, 30), 1, at_s=0.020)]
    ahead = run_open(core(), COST, asks, Timing(depth=2))[1]
    assert ahead.first_token_s == pytest.approx(0.0366 + 0.0131)


def test_the_overhead_between_steps_is_hidden_when_one_is_planned_ahead() -> None:
    def last(depth: int) -> float:
        [answer] = run_open(core(), COST, [Ask(prompt(1, 10), 4)], Timing(depth=depth, step_overhead_ms=2.0))
        return answer.token_times_s[-1] - answer.token_times_s[0]

    assert last(1) == pytest.approx(3 * 0.0121)
    assert last(2) == pytest.approx(3 * 0.0101)


def test_steps_that_follow_each_other_do_not_drift_when_looked_at_late() -> None:
    engine = core()
    line = Pipeline(engine, COST, Timing(depth=1))
    engine.add(Request("a", prompt(1, 10), 5, 0.0))
    line.advance(0.0)
    ends = [end for end, _ in line.advance(10.0)]
    assert ends == pytest.approx([0.011, 0.0211, 0.0312, 0.0413, 0.0514])
    assert line.due_s is None


def test_noise_is_the_same_for_the_same_seed_and_leaves_the_middle_alone() -> None:
    def times(seed: int, noise: float) -> list[float]:
        [answer] = run_open(core(), COST, [Ask(prompt(1, 10), 200)], Timing(noise=noise, seed=seed))
        return answer.token_times_s

    assert times(1, 0.1) == times(1, 0.1)
    assert times(1, 0.1) != times(2, 0.1)
    assert times(1, 0.1)[-1] == pytest.approx(times(1, 0.0)[-1], rel=0.05)


def test_the_closed_loop_keeps_its_concurrency() -> None:
    asks = [Ask(prompt(i, 40), 5) for i in range(40)]
    answers = run_closed_loop(core(), COST, asks, concurrency=4)
    assert len(answers) == 40
    assert all(a.finished_s is not None for a in answers)
    for answer in answers:
        at_s = answer.sent_s
        in_flight = sum(1 for a in answers if a.sent_s <= at_s < (a.finished_s or 0))
        assert in_flight <= 4


def test_requests_that_share_a_prefix_find_it() -> None:
    shared = prompt(0, 160)
    asks = [Ask([*shared, *prompt(i, 20)], 2, at_s=i * 1.0) for i in range(1, 4)]
    answers = run_open(core(), COST, asks)
    assert [a.cached_tokens for a in answers] == [0, 160, 160]
    assert (answers[1].ttft_ms or 0) < (answers[0].ttft_ms or 0)


def test_small_chunks_make_a_burst_slow() -> None:
    asks = [Ask(prompt(i, 300), 4) for i in range(16)]
    small = run_closed_loop(core(max_num_batched_tokens=32), COST, asks, concurrency=16)
    large = run_closed_loop(core(max_num_batched_tokens=2048), COST, asks, concurrency=16)
    assert max(a.ttft_ms or 0 for a in small) > 2 * max(a.ttft_ms or 0 for a in large)


def test_an_empty_step_costs_nothing() -> None:
    assert COST.step_ms(StepShape((), ())) == 0.0
