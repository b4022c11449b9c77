"""The space: alignment, combinations, candidates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.domain.setting import Setting
from tuner.errors import ProfileError
from tuner.profile import parse_profile
from tuner.space.alignment import can_reuse_prefix, is_aligned, nearest_aligned
from tuner.space.search_space import Choices, Range, search_space, spread

BASE = """\
version: 1
name: chat
model: m
workload: {kind: shared-prefix, system_prompt_tokens: 64, user_prompt_tokens: 8, output_tokens: 4,
  concurrency: 2, requests: 4}
space:
  max_num_batched_tokens: [128, 256]
"""


def space(*overrides: str):  # type: ignore[no-untyped-def]
    return search_space(parse_profile(BASE, overrides=list(overrides)))


def test_published_examples_of_prefix_reuse() -> None:
    assert can_reuse_prefix(512, 128)
    assert not can_reuse_prefix(512, 100)
    assert can_reuse_prefix(64, 100)  # one chunk holds it all


@given(st.integers(1, 20_000), st.sampled_from([1, 16, 32, 64]))
def test_the_nearest_aligned_is_aligned_and_near(chunk: int, block: int) -> None:
    near = nearest_aligned(chunk, block)
    assert is_aligned(near, block)
    assert abs(near - chunk) <= block / 2 or near == block


def test_an_unaligned_chunk_names_its_neighbours() -> None:
    with pytest.raises(ProfileError, match="96 or 112"):
        space("space.max_num_batched_tokens=[100]")


def test_the_engines_block_size_decides() -> None:
    with pytest.raises(ProfileError, match="block of 32"):
        space("space.max_num_batched_tokens=[48]", "engine.args.block_size=32")


def test_combinations_cover_the_space_once() -> None:
    found = space("space.max_num_seqs=[1, 2, 3]")
    combinations = [tuple(c.items()) for c in found.combinations()]
    assert found.size == 6
    assert len(set(combinations)) == 6


def test_budgets_that_are_all_off_are_no_budget() -> None:
    found = space("space.reuse_budget={max_cached_blocks: [0, 64], max_hold_ms: [100, 200]}")
    candidates = [found.candidate(c) for c in found.combinations()]
    assert Setting(knobs={"max_num_batched_tokens": 128}) in candidates
    assert sum(c.reuse_budget is None for c in candidates) == 4


def test_a_log_range_of_chunks_becomes_whole_blocks() -> None:
    knob = space("space.max_num_batched_tokens={low: 64, high: 4096, log: true}").knobs[0]
    assert isinstance(knob, Choices)
    assert knob.values[0] == 64
    assert knob.values[-1] == 4096
    assert all(isinstance(v, int) and v % 16 == 0 for v in knob.values)


def test_a_plain_range_of_chunks_steps_by_blocks() -> None:
    knob = space("space.max_num_batched_tokens={low: 64, high: 128}").knobs[0]
    assert isinstance(knob, Range)
    assert knob.values == (64, 80, 96, 112, 128)


def test_a_budget_outside_its_bounds_is_refused() -> None:
    with pytest.raises(ProfileError, match="min_reuse_ratio"):
        space("space.reuse_budget={min_reuse_ratio: [0, 1.5]}")


@given(st.lists(st.integers(), unique=True, max_size=40))
def test_spread_is_a_permutation(values: list[int]) -> None:
    assert sorted(spread(tuple(values))) == sorted(values)  # type: ignore[type-var]


@pytest.mark.parametrize(
    "text", ["{low: 1, high: 1.0e12}", "{low: 1, high: 900_000}", "{low: 0, high: 1, step: 1.0e-9}"]
)
def test_a_range_too_large_to_list_is_sampled(text: str) -> None:
    assert space(f"space.max_num_seqs={text}").size is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{low: 0, high: 9, step: 0}", "above 0"),
        ("{low: 0, high: 9, step: -1}", "above 0"),
        ("{low: 0, high: 1, step: 1.0e-300}", "above 0"),
        ("{low: 1, high: 1.0e+300}", "at most"),
    ],
)
def test_a_range_without_sense_is_refused(text: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        space(f"space.max_num_seqs={text}")


def test_a_range_of_chunks_is_in_whole_tokens() -> None:
    with pytest.raises(ProfileError, match="whole numbers of tokens"):
        space("space.max_num_batched_tokens={low: 128, high: 256, step: 16.5}")
