"""The space: values of each knob, alignment, combinations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.profiles import SMALL
from tuner.domain.setting import Setting
from tuner.errors import ProfileError
from tuner.profile import parse_profile
from tuner.space.alignment import can_reuse_prefix, is_aligned, nearest_aligned
from tuner.space.search_space import SearchSpace, search_space, setting_of, spread


def space(*overrides: str) -> SearchSpace:
    return search_space(parse_profile(SMALL, overrides=list(overrides)))


def values(*overrides: str) -> tuple[object, ...]:
    """Of the only knob, or of the one that the overrides add."""
    return space(*overrides).dimensions[-1].values


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


def test_the_profiles_own_block_size_decides() -> None:
    with pytest.raises(ProfileError, match="block of 32"):
        space("space.max_num_batched_tokens=[48]", "engine.args.block_size=32")
    assert values("space.max_num_batched_tokens=[40]", "engine.args.block_size=8") == (40,)


def test_combinations_cover_the_space_once() -> None:
    found = space("space.max_num_seqs=[1, 2]")
    combinations = [tuple(c.items()) for c in found.combinations()]
    assert found.size == 6
    assert len(set(combinations)) == 6


def test_a_budget_that_is_all_off_is_no_budget() -> None:
    found = space("space.reuse_budget={max_cached_blocks: [0, 64], max_hold_ms: [100, 200]}")
    settings = [setting_of(c) for c in found.combinations()]
    assert Setting(knobs={"max_num_batched_tokens": 128}) in settings
    assert sum(s.reuse_budget is None for s in settings) == 6


def test_refine_is_no_knob() -> None:
    profile = parse_profile(SMALL, overrides=["space.refine=false"])
    assert not profile.space.refine
    assert [d.name for d in search_space(profile).dimensions] == ["max_num_batched_tokens"]
    assert type(profile).model_validate(profile.to_json()) == profile


@pytest.mark.parametrize(("refine", "count"), [("true", 13), ("false", 49)])
def test_a_log_range_of_chunks_is_coarser_where_it_is_refined(refine: str, count: int) -> None:
    found = values("space.max_num_batched_tokens={low: 64, high: 4096, log: true}", f"space.refine={refine}")
    assert (found[0], found[-1]) == (64, 4096)
    assert all(isinstance(v, int) and v % 16 == 0 for v in found)
    assert list(found) == sorted(set(found))  # type: ignore[type-var]
    assert count - 8 < len(found) <= count


def test_a_plain_range_of_chunks_is_spread_in_whole_blocks() -> None:
    assert values("space.max_num_batched_tokens={low: 64, high: 128, step: 16}") == (64, 80, 96, 112, 128)
    found = values("space.max_num_batched_tokens={low: 128, high: 8192}")
    assert len(found) == 17
    assert all(isinstance(v, int) and v % 16 == 0 for v in found)


@pytest.mark.parametrize(
    ("text", "first", "last", "most"),
    [
        ("{low: 1, high: 1.0e12}", 1, 10**12, 17),
        ("{low: 0, high: 10}", 0, 10, 11),
        ("{low: 0, high: 1, step: 0.25}", 0, 1, 5),
        ("{low: 0, high: 0.5}", 0, 0.5, 17),
        ("{low: 1, high: 256, log: true}", 1, 256, 16),
        ("{low: 7, high: 7}", 7, 7, 1),
    ],
)
def test_a_range_is_a_list_in_the_end(text: str, first: float, last: float, most: int) -> None:
    found = values(f"space.some_option={text}")
    assert (found[0], found[-1], len(found)) == (first, last, most)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "reuse_budget={min_reuse_ratio: [0, 1.5]}",
            r"min_reuse_ratio: 1\.5 is refused; it takes a number from 0 to 1",
        ),
        ("reuse_budget={max_cached_blocks: [0.5]}", "a whole number from 0"),
        ("max_num_batched_tokens=[true]", "a whole number from 1"),
        ("long_prefill_token_threshold=[-1]", "a whole number from 0"),
        ("enable_chunked_prefill=[0]", "true or false"),
        ("watermark=[0, 1]", "from 0 to 0.999"),
        ("some_option={low: 0, high: 1, step: 1.0e-9}", "Give a larger step"),
        ("some_option={low: 0, high: 9, step: 0}", "above 0"),
        ("some_option={low: 0, high: 9, step: -1}", "above 0"),
        ("some_option={low: 1, high: 1.0e+300}", "at most"),
        ("max_num_batched_tokens={low: 128, high: 256, step: 16.5}", "whole numbers of tokens"),
    ],
)
def test_what_a_knob_does_not_take_is_refused(override: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        space(f"space.{override}")


@given(st.lists(st.integers(), unique=True, max_size=40))
def test_spread_is_a_permutation(given: list[int]) -> None:
    assert sorted(spread(tuple(given))) == sorted(given)  # type: ignore[type-var]
