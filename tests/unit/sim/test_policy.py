"""The reuse budget on the simulated scheduler."""

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.scheduler.decisions import Budget
from tuner.sim.core import Core, SchedulerConfig
from tuner.sim.cost import LinearCost
from tuner.sim.pipeline import Timing
from tuner.sim.policy import BudgetPolicy
from tuner.sim.virtual import Ask, run_open

COST = LinearCost(floor_ms=10.0, per_token_ms=0.06)
SHARED = 320
BLOCKS = 120


def config(chunk: int = 128, blocks: int = BLOCKS) -> SchedulerConfig:
    return SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=32, max_model_len=1024, num_blocks=blocks)


def tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 900) for _ in range(length)]


def load(seed: int = 1) -> list[Ask]:
    """Four long prompts at a time, more than the pool holds, and one among them that shares a system prompt."""
    rng = random.Random(seed)
    system = tokens(rng, SHARED)
    asks = [Ask(tokens(rng, 480), 4, at_s=0.45 * (i // 4), group="others") for i in range(80)]
    asks += [Ask([*system, *tokens(rng, 32)], 4, at_s=0.05 + 0.45 * i, group="sharing") for i in range(20)]
    return asks


def ttft(budget: Budget | None, group: str) -> float:
    core = Core(config(), None if budget is None else BudgetPolicy(budget, BLOCKS))
    answers = run_open(core, COST, load(), Timing(depth=1))
    assert all(a.finished_s is not None for a in answers)
    times = sorted(a.ttft_ms or 0.0 for a in answers if a.ask.group == group)
    return times[len(times) // 2]


def test_an_empty_budget_changes_nothing() -> None:
    assert ttft(Budget(), "sharing") == ttft(None, "sharing")
    assert ttft(Budget(), "others") == ttft(None, "others")


def test_each_policy_helps_the_sharing_request_further() -> None:
    stock = ttft(None, "sharing")
    retention = ttft(Budget(max_cached_blocks=20), "sharing")
    admission = ttft(Budget(max_cached_blocks=20, min_reuse_ratio=0.8), "sharing")
    yielding = ttft(Budget(max_cached_blocks=20, min_reuse_ratio=0.8, yield_chunk_tokens=32), "sharing")
    assert retention < 0.95 * stock
    assert admission < 0.8 * retention
    assert yielding <= admission
    assert ttft(Budget(max_cached_blocks=20, min_reuse_ratio=0.8), "others") < 1.1 * ttft(None, "others")


def test_a_retained_prefix_is_found_after_unrelated_traffic() -> None:
    policy = BudgetPolicy(Budget(max_cached_blocks=20), BLOCKS)
    core = Core(config(), policy)
    answers = run_open(core, COST, load(), Timing(depth=1))
    cached = [a.cached_tokens for a in answers if a.ask.group == "sharing"]
    assert cached[-1] == SHARED
    assert policy.counters.spared_blocks > 0
    stock = Core(config())
    forgotten = [a.cached_tokens for a in run_open(stock, COST, load(), Timing(depth=1)) if a.ask.group == "sharing"]
    assert forgotten[-1] == 0


def test_nobody_is_held_longer_than_allowed_by_much() -> None:
    policy = BudgetPolicy(Budget(max_cached_blocks=20, min_reuse_ratio=0.8, max_hold_ms=200), BLOCKS)
    run_open(Core(config(), policy), COST, load(), Timing(depth=1))
    assert policy.counters.preferred_requests > 0
    assert policy.counters.held_requests > 0


def test_merging_cuts_long_prompts_only_while_the_cache_is_warm() -> None:
    rng = random.Random(3)
    long_prompt = tokens(rng, 2000)
    big = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=8, max_model_len=4096, num_blocks=1000)

    def chunks(warm: bool) -> float:
        core = Core(big, BudgetPolicy(Budget(merge_below=0.6), 1000))
        asks = [Ask(long_prompt, 1, at_s=float(i)) for i in range(10)] if warm else []
        asks += [Ask(tokens(rng, 1500), 1, at_s=20.0), Ask(tokens(rng, 40), 1, at_s=20.0)]
        run_open(core, COST, asks)
        return core.totals.prefill_chunks - len(asks)

    assert chunks(warm=True) > chunks(warm=False)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.integers(40, 90),
    budget=st.builds(
        Budget,
        max_cached_blocks=st.sampled_from([0, 8, 200]),
        min_reuse_ratio=st.sampled_from([0.0, 0.5, 1.0]),
        max_hold_ms=st.sampled_from([0.0, 100.0]),
        yield_chunk_tokens=st.sampled_from([0, 16]),
        merge_below=st.sampled_from([0.0, 0.6]),
        evict_above=st.sampled_from([0.0, 0.3]),
    ),
)
def test_no_policy_starves_anybody(seed: int, blocks: int, budget: Budget) -> None:
    rng = random.Random(seed)
    systems = [tokens(rng, 64), tokens(rng, 200)]
    numbers = count()
    asks = []
    for _ in range(40):
        head = rng.choice([[], *systems])
        asks.append(Ask([*head, *tokens(rng, rng.randint(1, 300))], rng.randint(1, 12), at_s=0.02 * next(numbers)))
    core = Core(config(chunk=64, blocks=blocks), BudgetPolicy(budget, blocks))
    answers = run_open(core, COST, asks, Timing(depth=rng.choice([1, 2])))
    assert all(a.finished_s is not None for a in answers)
    assert [len(a.token_times_s) for a in answers] == [a.output_tokens for a in asks]
    assert core.pool.usage == pytest.approx(0.0)


def test_prompts_of_before_a_reset_are_not_kept() -> None:
    """Else blocks are held back for prompts that nobody sends any more, and the round after a reset is slower."""
    core = Core(config(), BudgetPolicy(Budget(max_cached_blocks=20), BLOCKS))
    first = run_open(core, COST, load(1), Timing(depth=1))
    assert core.reset_prefix_cache()
    again = run_open(core, COST, load(2), Timing(depth=1))
    fresh = run_open(Core(config(), BudgetPolicy(Budget(max_cached_blocks=20), BLOCKS)), COST, load(2), Timing(depth=1))
    assert len(first) == len(again)
    assert [a.cached_tokens for a in again] == [a.cached_tokens for a in fresh]
