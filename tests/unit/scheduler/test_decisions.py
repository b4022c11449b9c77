"""Order, holding and thresholds of the reuse budget."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.domain.setting import ReuseBudget
from tuner.scheduler.decisions import (
    FILLED_UP_BELOW,
    HIT_WINDOW_ADMISSIONS,
    LONG_PROMPT_CHUNK,
    MOST_AT_THE_FRONT,
    Budget,
    Counters,
    HitWindow,
    WaitingLine,
    merging_threshold,
    needed_blocks,
    overtakers,
    spare,
    yield_threshold,
)

HOLD_S = 1.0
Chain = tuple[tuple[str, int], ...]


def chain(name: str, blocks: int = 10) -> Chain:
    return tuple((name, depth) for depth in range(1, blocks + 1))


def test_the_settings_are_those_of_the_tuner() -> None:
    assert Budget.from_mapping(ReuseBudget().model_dump(exclude={"schema_version"})) == Budget()
    assert {each.name for each in fields(Budget)} == set(ReuseBudget.model_fields) - {"schema_version"}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_cached_block": 1},
        {"max_cached_blocks": -1},
        {"max_cached_blocks": 1.5},
        {"max_cached_blocks": True},
        {"min_reuse_ratio": 1.1},
        {"min_reuse_ratio": "0.5"},
        {"max_hold_ms": -1},
        {"max_hold_ms": math.inf},
        {"yield_chunk_tokens": "many"},
        {"evict_above": math.nan},
    ],
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Budget.from_mapping(settings)


@pytest.mark.parametrize("name", ["max_cached_blocks", "min_reuse_ratio", "merge_below", "evict_above"])
def test_one_policy_is_enough_to_be_on(name: str) -> None:
    assert Budget().off
    assert not Budget.from_mapping({name: 1}).off


@given(st.builds(Counters, *[st.integers(0, 10**9), st.floats(0, 1e6), *[st.integers(0, 10**9)] * 6]))
def test_counters_come_back_from_the_log(counters: Counters) -> None:
    back = Counters.from_line(f"INFO 11-29 [plugin.py:1] chunktune counters: {counters.line()}")
    assert back.hold_seconds == pytest.approx(counters.hold_seconds, abs=1e-3)
    back.hold_seconds = counters.hold_seconds
    assert back == counters


def test_counters_that_are_not_all_there_are_refused() -> None:
    with pytest.raises(ValueError, match="early_evictions"):
        Counters.from_line(Counters().line().rpartition(" ")[0])


@given(st.integers(1, 5000), st.floats(0.001, 1))
def test_needed_blocks_is_the_fewest_that_reach_the_ratio(total: int, ratio: float) -> None:
    needed = needed_blocks(total, ratio)
    assert 1 <= needed <= total
    assert needed / total >= ratio - 1e-9
    assert needed == 1 or (needed - 1) / total < ratio


@given(st.lists(st.integers(0, 3), max_size=40))
def test_spared_blocks_leave_in_order_of_rank_and_each_rank_in_its_own(ranks: list[int]) -> None:
    moved = spare(ranks)
    assert sorted(moved) == [index for index, rank in enumerate(ranks) if rank > min(ranks)]
    assert [(ranks[index], index) for index in moved] == sorted((ranks[index], index) for index in moved)


def test_overtakers_are_cached_blocks_of_nobody_behind_a_spared_one() -> None:
    assert overtakers([0, 0, 2, 0, 0, 1, 0], [True, True, True, True, False, True, True]) == 2
    assert overtakers([0, 0], [True, True]) == 0


@given(st.integers(1, 4096), st.integers(0, 64), st.sampled_from([16, 32]))
def test_all_who_yield_together_take_what_was_left_to_them_or_a_block_each(
    tokens: int, running: int, size: int
) -> None:
    each = yield_threshold(tokens, running, size)
    assert each >= size
    assert each * running <= max(tokens, size * running)


def test_merging_changes_nothing_while_off() -> None:
    assert merging_threshold(300, 0.0, 0.0, long_prompts=True) == (300, False)


@pytest.mark.parametrize(
    ("configured", "rate", "long_prompts", "expected"),
    [
        (0, None, True, (LONG_PROMPT_CHUNK, False)),
        (256, None, True, (256, False)),
        (256, 0.6, True, (256, False)),
        (256, 0.59, True, (0, True)),
        (256, 0.59, False, (0, False)),
        (256, 0.9, False, (0, False)),
    ],
)
def test_merging_lifts_the_threshold_below_the_hit_rate(
    configured: int, rate: float | None, long_prompts: bool, expected: tuple[int, bool]
) -> None:
    assert merging_threshold(configured, rate, 0.6, long_prompts=long_prompts) == expected


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(50, 100)), min_size=1, max_size=200))
def test_the_hit_rate_is_that_of_the_last_admissions(admissions: list[tuple[int, int]]) -> None:
    window = HitWindow()
    assert window.hit_rate is None
    for cached, prompt in admissions:
        window.admit(cached, prompt)
    last = admissions[-HIT_WINDOW_ADMISSIONS:]
    assert window.hit_rate == sum(cached for cached, _ in last) / sum(prompt for _, prompt in last)


def everything(_: object) -> bool:
    return True


def nothing(_: object) -> bool:
    return False


def line() -> WaitingLine[str, tuple[str, int]]:
    return WaitingLine(0.8, HOLD_S)


def test_a_cold_cache_leaves_the_order_of_arrival() -> None:
    waiting = line()
    for name in "abc":
        waiting.arrive(name, chain(name), 10)
    assert waiting.front(0.0, nothing).keys == []


def test_blocks_that_nobody_else_had_are_not_looked_up() -> None:
    waiting = line()
    waiting.arrive("a", chain("a"), 7)
    waiting.arrive("b", chain("b"), 0)
    waiting.arrive("tiny", (), 0)
    assert waiting.front(0.0, lambda block: pytest.fail(f"looked up {block}")).keys == []


def test_the_one_block_that_decides_is_looked_up_once_for_all_who_share_it() -> None:
    waiting = line()
    for name in "abc":
        waiting.arrive(name, chain("system"), 10)
    asked: list[tuple[str, int]] = []
    waiting.front(0.0, lambda block: asked.append(block) or True)
    assert asked == [("system", 8)]


def test_the_cached_go_first_and_who_was_overtaken_is_held() -> None:
    waiting = line()
    waiting.arrive("cold", chain("cold"), 0)
    waiting.arrive("warm", chain("system"), 10)
    waiting.arrive("later", chain("later"), 0)
    assert waiting.front(5.0, everything).keys == ["warm"]
    assert waiting.leave("warm", 5.5) is None
    assert waiting.leave("cold", 5.5) == pytest.approx(0.5)
    assert waiting.leave("later", 5.5) is None
    assert len(waiting) == 0


def test_a_hold_ends_in_time_and_is_not_renewed() -> None:
    waiting = line()
    waiting.arrive("cold", chain("cold"), 0)
    waiting.arrive("warm-0", chain("system"), 10)
    assert waiting.front(0.0, everything).keys == ["warm-0"]
    waiting.arrive("warm-1", chain("system"), 10)
    assert waiting.front(HOLD_S - 0.01, everything).keys == ["warm-0", "warm-1"]
    assert waiting.front(HOLD_S, everything).keys == ["cold", "warm-0", "warm-1"]
    waiting.leave("warm-0", HOLD_S)
    waiting.arrive("warm-2", chain("system"), 10)
    assert waiting.front(9.0, everything).keys == ["cold", "warm-1", "warm-2"]


def test_evicted_again_means_back_in_line() -> None:
    waiting = line()
    waiting.arrive("cold", chain("cold"), 0)
    waiting.arrive("warm", chain("system"), 10)
    assert waiting.front(0.0, everything).keys == ["warm"]
    assert waiting.front(0.1, nothing).keys == []


def test_leaving_twice_or_unknown_is_nothing() -> None:
    waiting = line()
    waiting.arrive("a", chain("a"), 10)
    waiting.leave("a", 0.0)
    assert waiting.leave("a", 0.0) is None
    assert waiting.leave("never", 0.0) is None
    assert waiting.front(0.0, everything).keys == []


def test_no_more_are_put_in_order_than_a_step_admits() -> None:
    waiting = line()
    for number in range(3 * MOST_AT_THE_FRONT):
        waiting.arrive(f"r{number}", chain("system"), 10)
    assert waiting.front(0.0, everything).keys == [f"r{number}" for number in range(MOST_AT_THE_FRONT)]


class Event:
    """What happens in a simulated queue: an arrival, or a step that admits one."""

    def __init__(self, warm: bool, wait_s: float) -> None:
        self.warm = warm
        self.wait_s = wait_s


events = st.lists(
    st.one_of(st.builds(Event, st.booleans(), st.just(0.0)), st.builds(Event, st.just(None), st.floats(0.0, 0.4))),
    max_size=80,
)


@given(events)
def test_nobody_is_overtaken_by_one_that_came_after_the_hold_was_over(happened: list[Event]) -> None:
    waiting = line()
    queue: list[str] = []
    warm: set[str] = set()
    arrived: dict[str, int] = {}
    first_overtaken_s: dict[str, float] = {}
    now_s = 0.0
    for number, event in enumerate(happened):
        if event.warm is not None:
            name = f"r{number}"
            arrived[name] = number
            queue.append(name)
            if event.warm:
                warm.add(name)
            waiting.arrive(name, chain("system" if event.warm else name), 10 if event.warm else 0)
            continue
        now_s += event.wait_s
        front = waiting.front(now_s, lambda block: block[0] == "system")
        assert len(set(front.keys)) == len(front.keys)
        assert set(front.keys) <= set(queue)
        queue = [*front.keys, *(each for each in queue if each not in front.keys)]
        if not queue:
            continue
        admitted = queue.pop(0)
        for other in queue:
            if arrived[other] < arrived[admitted]:
                assert now_s - first_overtaken_s.setdefault(other, now_s) < HOLD_S
        waiting.leave(admitted, now_s)
    while queue:
        now_s += 0.1
        front = waiting.front(now_s, lambda block: block[0] == "system")
        queue = [*front.keys, *(each for each in queue if each not in front.keys)]
        waiting.leave(queue.pop(0), now_s)
    assert len(waiting) == 0


@given(st.lists(st.integers(-FILLED_UP_BELOW, MOST_AT_THE_FRONT), max_size=20))
def test_the_front_is_long_enough_and_in_order_of_arrival_whoever_comes_and_goes(changes: list[int]) -> None:
    waiting = line()
    queue: list[str] = []
    arrivals = 0
    for change in changes:
        for _ in range(max(0, change)):
            queue.append(f"r{arrivals}")
            waiting.arrive(queue[-1], chain("system"), 10)
            arrivals += 1
        for key in waiting.front(0.0, everything).keys[: max(0, -change)]:
            waiting.leave(key, 0.0)
            queue.remove(key)
        front = waiting.front(0.0, everything)
        assert front.keys == front.preferred == queue[: len(front.keys)]
        assert len(front.keys) >= min(FILLED_UP_BELOW, len(queue))


def test_a_front_stays_the_same_object_while_it_is_long_enough() -> None:
    waiting = line()
    for number in range(2 * MOST_AT_THE_FRONT):
        waiting.arrive(f"r{number}", chain("system"), 10)
    front = waiting.front(0.0, everything)
    waiting.arrive("later", chain("system"), 10)
    waiting.arrive("cold", chain("cold"), 0)
    waiting.leave("r0", 0.0)
    assert waiting.front(0.0, everything) is front
    assert front.keys[0] == "r1"
