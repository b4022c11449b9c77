"""vLLM's scheduling rules."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.sim.core import Core, Request, SchedulerConfig, Step


def config(**changes: object) -> SchedulerConfig:
    fields: dict[str, object] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 512,
        "num_blocks": 200,
        "block_size": 16,
    }
    return SchedulerConfig(**{**fields, **changes})  # type: ignore[arg-type]


def request(name: str, prompt: int, output: int = 4, *, shared: int = 0) -> Request:
    rng = random.Random(name)
    tokens = [7] * shared + [rng.randrange(3, 900) for _ in range(prompt - shared)]
    return Request(name, tokens, output, 0.0)


def plan(core: Core) -> Step:
    step = core.plan(0.0)
    assert step is not None
    return step


def shares(step: Step) -> dict[str, int]:
    return {part.request.id: part.tokens for part in step.parts}


def run_out(core: Core, limit: int = 10_000) -> int:
    """Steps until nothing is left; fails when that does not come."""
    for steps in range(limit):
        step = core.plan(float(steps))
        if step is None:
            assert not core.unfinished, f"stuck with {len(core.waiting)} waiting, {len(core.running)} running"
            return steps
        core.finish(step, float(steps))
    raise AssertionError("no end")


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    core = Core(config())
    core.add(request("a", 150))
    taken = []
    while core.running or core.waiting:
        step = plan(core)
        taken.append(shares(step)["a"])
        core.finish(step, 0.0)
    assert taken == [64, 64, 22, 1, 1, 1]


def test_running_requests_come_before_waiting_ones() -> None:
    core = Core(config())
    core.add(request("old", 100))
    core.finish(plan(core), 0.0)
    core.add(request("new", 100))
    assert shares(plan(core)) == {"old": 36, "new": 28}


def test_no_step_computes_more_than_the_budget() -> None:
    core = Core(config())
    for name in "abcdef":
        core.add(request(name, 90))
    while core.unfinished:
        step = plan(core)
        assert sum(part.tokens for part in step.parts) <= 64
        core.finish(step, 0.0)


def test_at_most_max_num_seqs_run() -> None:
    core = Core(config(max_num_seqs=2, max_num_batched_tokens=512))
    for name in "abcd":
        core.add(request(name, 20))
    assert list(shares(plan(core))) == ["a", "b"]


def test_the_long_prefill_threshold_holds_until_the_request_is_alone() -> None:
    core = Core(config(long_prefill_token_threshold=16, max_num_batched_tokens=200))
    core.add(request("a", 150))
    core.add(request("b", 150))
    assert shares(plan(core)) == {"a": 16, "b": 16}
    alone = Core(config(long_prefill_token_threshold=16, max_num_batched_tokens=200))
    alone.add(request("a", 150))
    assert shares(plan(alone)) == {"a": 150}


def test_the_adaptive_threshold_is_at_least_a_fair_share() -> None:
    core = Core(
        config(long_prefill_token_threshold=16, long_prefill_token_threshold_adaptive=True, max_num_batched_tokens=200)
    )
    core.add(request("a", 150))
    core.add(request("b", 150))
    assert shares(plan(core)) == {"a": 100, "b": 100}


def test_blocks_are_found_by_the_step_that_plans_them() -> None:
    core = Core(config(max_num_batched_tokens=512))
    core.add(request("a", 100, shared=64))
    core.add(request("b", 100, shared=64))
    step = plan(core)
    assert shares(step) == {"a": 100, "b": 36}
    assert [part.request.cached_tokens for part in step.parts] == [0, 64]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    core = Core(config())
    core.add(request("a", 64, shared=64))
    run_out(core)
    core.add(request("b", 64, shared=64))
    assert shares(plan(core)) == {"b": 16}
    assert core.totals.prefix_hits == 48


def test_a_prefix_shorter_than_a_block_is_never_found() -> None:
    core = Core(config())
    core.add(request("a", 40, shared=15))
    run_out(core)
    core.add(request("b", 40, shared=15))
    plan(core)
    assert core.totals.prefix_hits == 0


def test_without_prefix_caching_everything_is_computed_and_nothing_asked() -> None:
    core = Core(config(enable_prefix_caching=False, max_num_batched_tokens=512))
    core.add(request("a", 100, shared=64))
    core.add(request("b", 100, shared=64))
    assert shares(plan(core)) == {"a": 100, "b": 100}
    assert core.totals.prefix_queries == 0


def test_with_chunked_prefill_off_a_prompt_waits_until_it_fits_whole() -> None:
    core = Core(config(enable_chunked_prefill=False, max_num_batched_tokens=100))
    core.add(request("a", 60))
    core.add(request("b", 60))
    step = plan(core)
    assert shares(step) == {"a": 60}
    core.finish(step, 0.0)
    assert shares(plan(core)) == {"a": 1, "b": 60}


def test_a_prompt_is_admitted_only_when_it_fits_the_pool_whole() -> None:
    # 10 usable blocks of 16: the first takes 4 now and grows to 7, the second needs 7 and finds 6.
    core = Core(config(num_blocks=11))
    core.add(request("a", 100))
    core.add(request("b", 100))
    assert shares(plan(core)) == {"a": 64}
    assert shares(plan(core)) == {"a": 36}
    eager = Core(config(num_blocks=11, scheduler_reserve_full_isl=False, max_num_batched_tokens=128))
    eager.add(request("a", 100))
    eager.add(request("b", 100))
    assert shares(plan(eager)) == {"a": 100, "b": 28}


def test_the_watermark_keeps_blocks_back_from_those_who_wait() -> None:
    core = Core(config(num_blocks=11, watermark=0.5, max_num_batched_tokens=128))
    core.add(request("a", 40))
    core.add(request("b", 40))
    assert shares(plan(core)) == {"a": 40}


def test_the_youngest_gives_way_when_blocks_run_out_and_comes_back_first() -> None:
    core = Core(config(num_blocks=5, max_num_batched_tokens=128, enable_prefix_caching=False))
    core.add(request("a", 31, 30))
    core.add(request("b", 31, 30))
    core.add(request("c", 31, 30))
    run_out(core)
    assert core.totals.preemptions > 0
    assert core.totals.prefills == 3
    core = Core(config(num_blocks=5, max_num_batched_tokens=128, enable_prefix_caching=False))
    core.add(request("a", 31, 30))
    core.add(request("b", 31, 30))
    while core.totals.preemptions == 0:
        core.finish(plan(core), 0.0)
    assert [r.id for r in core.running] == ["a"]
    assert core.waiting[0].id == "b"
    assert core.waiting[0].computed == 0


def test_an_aborted_request_gives_its_blocks_back() -> None:
    core = Core(config())
    gone = request("a", 100)
    core.add(gone)
    core.plan(0.0)
    assert core.pool.usage > 0
    core.abort(gone, 0.0)
    assert core.pool.usage == 0
    assert not core.unfinished


def test_a_step_under_way_may_end_after_its_request_is_gone() -> None:
    core = Core(config())
    gone = request("a", 10)
    core.add(gone)
    step = plan(core)
    core.abort(gone, 0.0)
    assert core.finish(step, 0.0) == []


def test_generation_ends_at_the_model_s_length() -> None:
    core = Core(config(max_model_len=32))
    short = request("a", 30, 100)
    core.add(short)
    run_out(core)
    assert short.finished == "length"
    assert short.output_tokens == 2


def test_a_request_stops_at_its_end_token() -> None:
    core = Core(config())
    talker = Request("a", [5] * 10, 100, 0.0, stop_after=3)
    core.add(talker)
    run_out(core)
    assert (talker.finished, talker.output_tokens) == ("stop", 3)


def test_a_step_can_be_planned_while_one_is_under_way() -> None:
    core = Core(config())
    core.add(request("a", 10, 2))
    first, second = plan(core), plan(core)
    assert shares(second) == {"a": 1}
    # Both tokens are on their way: a third step would be for nothing.
    assert core.plan(0.0) is None
    assert [t.number for t in core.finish(first, 0.0)] == [1]
    assert [(t.number, t.finished) for t in core.finish(second, 0.0)] == [(2, "length")]


def test_steps_without_a_token_are_not_counted_as_vllm_counts() -> None:
    core = Core(config())
    core.add(request("a", 150, 2))
    run_out(core)
    assert (core.totals.all_steps, core.totals.steps) == (4, 2)
    assert core.totals.step_tokens == 150 + 2
    assert (core.totals.prefill_chunks, core.totals.prefills) == (3, 1)


def test_answers_to_the_same_prompt_are_the_same() -> None:
    def answer() -> list[int]:
        core = Core(config())
        asked = request("a", 20, 8)
        core.add(asked)
        run_out(core)
        return asked.tokens[20:]

    assert answer() == answer()
    assert min(answer()) >= 3


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 30), st.integers(0, 64)), min_size=1, max_size=14),
    chunk=st.sampled_from([8, 16, 40, 64, 500]),
    blocks=st.integers(12, 40),
    depth=st.sampled_from([1, 2]),
    threshold=st.sampled_from([0, 16]),
)
def test_every_request_gets_all_its_tokens_and_every_block_comes_back(
    prompts: list[tuple[int, int, int]], chunk: int, blocks: int, depth: int, threshold: int
) -> None:
    core = Core(
        config(
            max_num_batched_tokens=chunk,
            max_model_len=160,
            num_blocks=blocks,
            long_prefill_token_threshold=threshold,
        )
    )
    asked = [request(f"r{i}", p, o, shared=min(s, p)) for i, (p, o, s) in enumerate(prompts)]
    for each in asked:
        core.add(each)
    under_way: list[Step] = []
    for _ in range(20_000):
        step = core.plan(0.0) if len(under_way) < depth else None
        if step is not None:
            under_way.append(step)
        elif under_way:
            core.finish(under_way.pop(0), 0.0)
        else:
            break
    assert not core.unfinished
    for each, (prompt, output, _) in zip(asked, prompts, strict=True):
        assert each.output_tokens == min(output, 160 - prompt)
    assert core.pool.usage == pytest.approx(0.0)
    assert core.totals.prefix_hits <= core.totals.prefix_queries == sum(p for p, _, _ in prompts)
