"""The prefix tree against the definition: who had which block, by brute force."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tuner.scheduler.prefixes import HALF_LIFE_VISITS, IN_PART, NOBODY, WHOLE, PrefixTree

Chain = tuple[tuple[int, ...], ...]


def chain(*blocks: int) -> Chain:
    """Hashes as vLLM chains them: each stands for all blocks up to its own."""
    return tuple(blocks[: depth + 1] for depth in range(len(blocks)))


prompts = st.lists(st.lists(st.integers(0, 2), max_size=7).map(lambda blocks: chain(*blocks)), max_size=30)


@given(prompts)
def test_knows_how_much_of_a_prompt_came_before(arrivals: list[Chain]) -> None:
    tree: PrefixTree[tuple[int, ...]] = PrefixTree(10_000)
    before: set[tuple[int, ...]] = set()
    for prompt in arrivals:
        assert tree.visit(prompt) == sum(1 for block in prompt if block in before)
        before.update(prompt)
    assert tree.blocks == len(before)


@given(prompts)
def test_a_block_is_shared_when_two_had_it_and_whole_when_a_prompt_with_it_came_back_whole(
    arrivals: list[Chain],
) -> None:
    tree: PrefixTree[tuple[int, ...]] = PrefixTree(10_000)
    for prompt in arrivals:
        tree.visit(prompt)
    visitors = Counter(block for prompt in arrivals for block in prompt)
    reused_whole = {
        block
        for number, earlier in enumerate(arrivals)
        for later in arrivals[number + 1 :]
        if earlier and later[: len(earlier)] == earlier
        for block in earlier
    }
    for block, count in visitors.items():
        expected = WHOLE if block in reused_whole else IN_PART if count > 1 else NOBODY
        assert tree.reuse.get(block, NOBODY) == expected


@given(prompts, st.integers(0, 12))
def test_what_is_kept_is_shared_bounded_and_can_be_found(arrivals: list[Chain], room: int) -> None:
    tree: PrefixTree[tuple[int, ...]] = PrefixTree(10_000)
    for prompt in arrivals:
        tree.visit(prompt)
    visitors = Counter(block for prompt in arrivals for block in prompt)
    kept = [block for run in tree.most_shared(room) for block in run]
    assert len(kept) == len(set(kept)) == min(room, sum(1 for count in visitors.values() if count > 1))
    assert all(visitors[block] > 1 for block in kept)
    for position, block in enumerate(kept):
        assert len(block) == 1 or block[:-1] in kept[:position]


@given(prompts, st.integers(1, 12))
def test_memory_is_bounded_by_the_limit_and_one_prompt(arrivals: list[Chain], limit: int) -> None:
    tree: PrefixTree[tuple[int, ...]] = PrefixTree(limit)
    for number, prompt in enumerate(arrivals):
        tree.visit(prompt)
        assert tree.blocks <= max(limit, *(len(each) for each in arrivals[: number + 1]))


def test_the_system_prompt_of_many_comes_before_a_prompt_that_two_had() -> None:
    tree: PrefixTree[tuple[int, ...]] = PrefixTree(10_000)
    for _ in range(2):
        tree.visit(chain(7, 7, 7, 7))
    for own in range(10):
        tree.visit(chain(1, 2, 100 + own))
    assert tree.most_shared(2) == [chain(1, 2)]


def test_yesterdays_system_prompt_makes_room_for_todays() -> None:
    tree: PrefixTree[tuple[int, ...]] = PrefixTree(10**6)
    for own in range(50):
        tree.visit(chain(1, 100 + own))
    for own in range(6 * HALF_LIFE_VISITS):
        tree.visit(chain(2, 100 + own) if own % 50 == 0 else chain(10_000 + own))
    assert tree.most_shared(1) == [chain(2)]


def test_scores_survive_very_many_visits() -> None:
    tree: PrefixTree[tuple[int, ...]] = PrefixTree(50)
    for own in range(250_000):
        tree.visit(((1,), (1, own)))
    assert tree.most_shared(1) == [chain(1)]


def test_runs_that_stayed_as_they_were_are_the_same_objects() -> None:
    tree: PrefixTree[tuple[int, ...]] = PrefixTree(10_000)
    for own in range(3):
        tree.visit(chain(1, 2, 100 + own))
        tree.visit(chain(7, 8, 200 + own))
    before = tree.most_shared(10)
    tree.visit(chain(1, 2, 300))
    assert set(map(id, tree.most_shared(10))) == set(map(id, before))
