"""The search design on engines in memory: starts, cycles, elimination, refinement, faults, and a run that was cut."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import count

import pytest

from tests.fakes.engines_in_memory import Engines, Levels, Numbers, chunk, problem
from tuner.domain.experiment import STOCK_ID, Results, Start
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Setting
from tuner.experiment.design import StartPlan, StudyStopped
from tuner.study.design import SweepDesign
from tuner.study.problem import Group, Problem
from tuner.study.verdict import decide

LIST = (chunk(256), chunk(512), chunk(1024), chunk(2048))
BY_CHUNK = {256: 150.0, 512: 80.0, 1024: 90.0, 2048: 110.0, None: 100.0}


def by_chunk(setting: Setting) -> Levels:
    return Levels(BY_CHUNK[setting.chunk])


def ran(asked: Problem, engines: Engines, numbers: Numbers | None = None) -> tuple[SweepDesign, Results, Numbers]:
    registry = numbers or Numbers()
    design = SweepDesign(asked, registry)
    return design, engines.run(design), registry


def cycles_of(results: Results, start: int) -> dict[int, list[object]]:
    found: dict[int, list[object]] = {}
    for r in results.rounds:
        if r.start == start:
            found.setdefault(r.cycle, []).append(r.setting)
    return found


def test_one_start_searches_three_meet_again_and_one_runs_the_frozen_command() -> None:
    asked = problem(*LIST)
    engines = Engines(by_chunk)
    _, results, numbers = ran(asked, engines)
    assert [s.purpose for s in results.starts] == ["search", "final", "final", "final", "literal"]
    assert [p.label for p in engines.plans] == ["search", *(f"final {i} of 3" for i in (1, 2, 3)), "literal"]
    best = numbers.id_of(chunk(512))
    for start in results.starts[1:4]:
        assert start.live
        assert {best, STOCK_ID} < set(start.settings)
        assert len(start.settings) == 3
    literal = engines.plans[-1]
    assert not literal.live
    assert literal.engine_args == {"max_model_len": 8192, CHUNK_KNOB: 512}
    assert decide(asked, results, numbers).winner == best


def test_each_cycle_measures_every_setting_in_question_once_in_an_order_of_its_own() -> None:
    _, results, _ = ran(problem(*LIST), Engines(by_chunk))
    cycles = cycles_of(results, 1)
    first = list(cycles.values())[:3]
    assert all(len(names) == len(set(names)) for names in cycles.values())
    assert all(set(names) == {0, 1, 2, 3, STOCK_ID} for names in first)
    assert len({tuple(names) for names in first}) > 1
    assert all(STOCK_ID in names for names in cycles.values())
    assert [r.cycle for r in results.rounds] == sorted(r.cycle for r in results.rounds)


def test_what_cannot_win_is_measured_no_more_and_says_why() -> None:
    design, results, numbers = ran(problem(*LIST), Engines(by_chunk))
    states = design.states(results)
    worst = numbers.id_of(chunk(256))
    assert Counter(r.setting for r in results.rounds if r.start == 1)[worst] == 3
    state, why = states[worst]
    assert state == "eliminated"
    assert "worse than chunk 512 after 3 cycles" in why
    assert states[numbers.id_of(chunk(512))] == ("measured", "")
    assert states[STOCK_ID] == ("measured", "")


def test_the_profile_says_how_many_cycles_come_before_an_elimination() -> None:
    _, results, numbers = ran(problem(*LIST, rounds=6), Engines(by_chunk))
    assert Counter(r.setting for r in results.rounds if r.start == 1)[numbers.id_of(chunk(256))] == 6
    assert all(len(cycles_of(results, s)) >= 6 for s in (2, 3, 4))


def test_settings_equal_to_stock_end_the_search_early() -> None:
    _, results, _ = ran(problem(*LIST), Engines(lambda s: Levels(100.0), round_sd=0.005))
    assert len(cycles_of(results, 1)) <= 5
    assert len(results.starts) == 5


def test_a_setting_that_turns_out_to_be_stock_is_not_measured() -> None:
    asked = problem(chunk(512), chunk(8192), default_chunk=None)
    engines = Engines(lambda s: Levels(100.0))
    _, results, numbers = ran(asked, engines)
    assert engines.plans[0].engine_args[CHUNK_KNOB] == 8192
    assert numbers.id_of(chunk(8192)) not in {r.setting for r in results.rounds}


@pytest.mark.parametrize(
    ("stock_chunk", "expected", "boots"),
    [
        (8192, 8192, [None]),
        (2048, 8192, [None, 4096]),
        (8192, 2048, [4096, None]),
        (8192, None, [4096, None]),
        (2048, 2048, [4096]),
    ],
)
def test_a_live_start_boots_with_the_largest_chunk(stock_chunk: int, expected: int | None, boots: list[object]) -> None:
    asked = problem(chunk(512), chunk(4096), default_chunk=expected)
    engines = Engines(lambda s: Levels(100.0), stock_chunk=stock_chunk)
    _, results, _ = ran(asked, engines)
    searches = [p for p in engines.plans if p.purpose == "search"]
    assert [p.engine_args.get(CHUNK_KNOB) for p in searches] == boots
    assert {r.start for r in results.rounds if r.start <= len(boots)} == {len(boots)}


def test_the_next_smaller_chunk_boots_where_the_largest_cannot() -> None:
    def refuses(plan: StartPlan) -> str | None:
        asked = plan.engine_args.get(CHUNK_KNOB, 2048)
        return "cuda_oom" if isinstance(asked, int) and asked > 2048 else None

    asked = problem(chunk(512), chunk(4096), chunk(8192), default_chunk=2048)
    engines = Engines(lambda s: Levels(100.0), refuses=refuses, stock_chunk=2048)
    design, results, numbers = ran(asked, engines)
    assert [p.engine_args.get(CHUNK_KNOB) for p in engines.plans[:3]] == [8192, 4096, None]
    states = design.states(results)
    assert states[numbers.id_of(chunk(8192))] == states[numbers.id_of(chunk(4096))] == ("infeasible", "cuda_oom")
    assert len([s for s in results.starts if s.purpose == "final"]) == 3


def test_a_stock_that_cannot_boot_is_infeasible_and_the_best_other_wins() -> None:
    def refuses(plan: StartPlan) -> str | None:
        return None if CHUNK_KNOB in plan.engine_args else "cuda_oom"

    asked = problem(*LIST)
    design, results, numbers = ran(asked, Engines(by_chunk, refuses=refuses))
    assert design.states(results)[STOCK_ID] == ("infeasible", "cuda_oom")
    decision = decide(asked, results, numbers)
    assert decision.winner == numbers.id_of(chunk(512))
    assert "Stock could not be measured" in decision.sentence


def test_nothing_that_boots_stops_the_study_with_the_cause() -> None:
    with pytest.raises(StudyStopped) as stopped:
        ran(problem(*LIST), Engines(by_chunk, refuses=lambda plan: "cuda_oom"))
    assert stopped.value.start.cause == "cuda_oom"


def test_the_chunk_is_refined_between_the_ends_of_the_list() -> None:
    def valley(setting: Setting) -> Levels:
        size = setting.chunk or 8192
        return Levels(60 + 40 * abs(size / 1500 - 1) ** 0.8)

    asked = problem(chunk(256), chunk(1024), chunk(4096), refine=True)
    _, results, numbers = ran(asked, Engines(valley))
    refined = {s.chunk for s in numbers.settings} - {256, 1024, 4096}
    assert refined
    assert all(size is not None and size % 128 == 0 and 256 < size < 4096 for size in refined)
    winner = decide(asked, results, numbers).setting
    assert winner is not None
    assert winner.chunk is not None
    assert 1152 <= winner.chunk <= 1920
    assert len([s for s in results.starts if s.purpose == "search"]) == 1


def test_small_chunks_are_refined_in_steps_of_a_block() -> None:
    asked = problem(chunk(64), chunk(256), refine=True, chunk_unit=32)
    _, _, numbers = ran(asked, Engines(lambda s: Levels(100.0 if s.chunk is None else 60 + abs((s.chunk) - 128) / 8)))
    sizes = {s.chunk for s in numbers.settings} - {64, 256}
    assert sizes
    assert all(size is not None and size % 32 == 0 for size in sizes)


def binding(setting: Setting) -> Levels:
    """A larger chunk is better for TTFT and worse for ITL: 250 ms at a chunk of 3,333."""
    size = setting.chunk or 8192
    return Levels(p90=1000 * (3333 / size) ** 0.3, itl=0.075 * size)


def test_the_chunk_is_refined_along_the_limit_that_binds() -> None:
    asked = problem(chunk(512), chunk(2048), chunk(4096), limits=("itl_ms.p99 <= 250",), refine=True)
    within = 0
    for seed in range(10):
        _, results, numbers = ran(dataclasses.replace(asked, seed=seed), Engines(binding, seed=seed))
        decision = decide(asked, results, numbers)
        assert decision.verdict == "better"
        assert decision.setting is not None
        size = decision.setting.chunk
        assert size is not None
        within += size <= 3333
        assert 2500 < size < 3600
    assert within >= 9


def test_other_knobs_of_refined_settings_are_those_of_the_best() -> None:
    budget = ReuseBudget(max_cached_blocks=64)

    def levels(setting: Setting) -> Levels:
        size = setting.chunk or 8192
        return Levels((60 if setting.reuse_budget else 90) + 40 * abs(size / 1500 - 1))

    listed = [s.model_copy(update={"reuse_budget": b}) for s in (chunk(1024), chunk(4096)) for b in (None, budget)]
    _, _, numbers = ran(problem(*listed, refine=True), Engines(levels))
    refined = [s for s in numbers.settings if s.chunk not in (1024, 4096)]
    assert refined
    assert all(s.reuse_budget == budget for s in refined)


def test_settings_stay_below_the_most_that_were_asked_for() -> None:
    many = [chunk(size) for size in range(128, 128 * 41, 128)]
    _, results, _ = ran(problem(*many, max_settings=15, refine=True), Engines(lambda s: Levels(100.0)))
    assert len({r.setting for r in results.rounds if r.setting != STOCK_ID}) <= 15


def test_a_sampler_proposes_where_the_space_is_too_large() -> None:
    proposals = [chunk(128 * i) for i in range(1, 41)]
    asked = problem(max_settings=24)
    _, results, _ = ran(asked, Engines(lambda s: Levels(100.0 - (s.chunk == 640) * 40)), Numbers(*proposals))
    measured = {r.setting for r in results.rounds if r.setting != STOCK_ID}
    assert 12 < len(measured) <= 24
    assert decide(asked, results, Numbers(*proposals)).setting == chunk(640)


def test_references_are_measured_and_never_win() -> None:
    reference = Setting(knobs={"enable_chunked_prefill": False, CHUNK_KNOB: 8192})
    asked = problem(*LIST, references=(reference,))
    levels = {**BY_CHUNK, 8192: 20.0}
    _, results, numbers = ran(asked, Engines(lambda s: Levels(levels[s.chunk])))
    name = numbers.id_of(reference)
    assert Counter(r.setting for r in results.rounds)[name] == 3
    assert decide(asked, results, numbers).winner == numbers.id_of(chunk(512))


# --- faults ---


def test_a_cut_cycle_is_not_completed_on_another_start() -> None:
    engines = Engines(by_chunk, kill_after=8)
    asked = problem(*LIST)
    numbers = Numbers()
    engines.run(SweepDesign(asked, numbers))
    assert len(engines.results.rounds) == 8
    cut = engines.results.rounds[-1].cycle
    results = engines.run(SweepDesign(asked, numbers))
    assert [s.state for s in results.starts[:2]] == ["interrupted", "completed"]
    assert {r.start for r in results.rounds if r.cycle == cut} == {1}
    assert results.rounds[8].start == 2
    assert results.rounds[8].cycle == cut + 1
    assert decide(asked, results, numbers).winner == numbers.id_of(chunk(512))


def test_a_final_start_that_was_cut_is_replaced_whole() -> None:
    asked, numbers = problem(*LIST), Numbers()
    whole = Engines(by_chunk)
    whole.run(SweepDesign(asked, numbers))
    searched = sum(r.start == 1 for r in whole.results.rounds)
    engines = Engines(by_chunk, kill_after=searched + 4)
    engines.run(SweepDesign(asked, numbers))
    results = engines.run(SweepDesign(asked, numbers))
    finals = [s for s in results.starts if s.purpose == "final"]
    assert [s.state for s in finals] == ["interrupted", "completed", "completed", "completed"]
    assert [s.label for s in finals[:2]] == ["final 1 of 3"] * 2
    assert len({tuple(s.settings) for s in finals}) == 1


def test_the_same_results_give_the_same_next_step_to_a_new_design() -> None:
    engines = Engines(by_chunk)
    asked, numbers = problem(*LIST), Numbers()
    results = engines.run(SweepDesign(asked, numbers))
    start = results.starts[0]
    for upto in range(sum(r.start == 1 for r in results.rounds)):
        cut = Results([start], results.rounds[:upto])
        step = SweepDesign(asked, numbers).next_step(cut, start)
        following = results.rounds[upto]
        assert step is not None
        assert (step.named.id, step.cycle, step.position) == (following.setting, following.cycle, following.position)


def test_a_setting_that_kills_the_engine_twice_is_left_out_and_the_finals_are_held() -> None:
    engines = Engines(by_chunk, crashes=lambda s, start: "engine_died" if s.chunk == 512 else None)
    asked = problem(*LIST)
    design, results, numbers = ran(asked, engines)
    assert design.states(results)[numbers.id_of(chunk(512))] == ("failed", "engine_died")
    assert [s.state for s in results.starts if s.purpose == "search"] == ["engine_failed", "engine_failed", "completed"]
    assert decide(asked, results, numbers).winner == numbers.id_of(chunk(1024))


def test_a_finalist_that_kills_the_engine_is_left_out_of_the_finals() -> None:
    def crashes(setting: Setting, start: Start) -> str | None:
        return "engine_died" if setting.chunk == 512 and start.purpose == "final" else None

    asked = problem(*LIST)
    design, results, numbers = ran(asked, Engines(by_chunk, crashes=crashes))
    assert design.states(results)[numbers.id_of(chunk(512))][0] == "failed"
    assert sum(s.purpose == "final" and s.state == "completed" for s in results.starts) == 3
    assert decide(asked, results, numbers).winner != numbers.id_of(chunk(512))


def test_four_settings_that_kill_the_engine_do_not_end_the_study() -> None:
    engines = Engines(by_chunk, crashes=lambda s, start: "engine_died" if s.chunk in (256, 512, 2048) else None)
    asked = problem(*LIST)
    _, results, numbers = ran(asked, engines)
    assert decide(asked, results, numbers).winner == numbers.id_of(chunk(1024))


def test_a_start_that_its_surroundings_fail_is_made_again_three_times_at_most() -> None:
    tries: list[int] = []

    def refuses(plan: StartPlan) -> str | None:
        tries.append(1)
        return "engine_died" if len(tries) <= 3 else None

    _, results, _ = ran(problem(*LIST), Engines(by_chunk, refuses=refuses))
    assert [s.state for s in results.starts[:4]] == ["engine_failed"] * 3 + ["completed"]
    with pytest.raises(StudyStopped) as stopped:
        ran(problem(*LIST), Engines(by_chunk, refuses=lambda plan: "engine_died"))
    assert stopped.value.start.number == 4


def test_a_fatal_cause_stops_at_once() -> None:
    engines = Engines(by_chunk, refuses=lambda plan: "gated_model")
    with pytest.raises(StudyStopped):
        ran(problem(*LIST), engines)
    assert len(engines.plans) == 1


def test_a_setting_that_was_measured_is_not_infeasible_for_one_refusal() -> None:
    asked, seen = problem(*LIST), count()
    engines = Engines(by_chunk, discards=lambda s: "switch_refused" if s.chunk == 512 and next(seen) == 1 else None)
    design, results, numbers = ran(asked, engines)
    assert design.states(results)[numbers.id_of(chunk(512))][0] in ("measured", "eliminated")


def test_a_setting_that_the_engine_refuses_is_infeasible() -> None:
    asked = problem(*LIST)
    engines = Engines(by_chunk, discards=lambda s: "switch_refused" if s.chunk == 512 else None)
    design, results, numbers = ran(asked, engines)
    assert design.states(results)[numbers.id_of(chunk(512))] == ("infeasible", "switch_refused")
    assert sum(r.setting == numbers.id_of(chunk(512)) for r in results.rounds) == 1


def test_a_setting_of_which_no_round_counts_is_left_out() -> None:
    asked = problem(*LIST)
    engines = Engines(by_chunk, discards=lambda s: "too_many_failures" if s.chunk == 512 else None)
    design, results, numbers = ran(asked, engines)
    assert design.states(results)[numbers.id_of(chunk(512))] == ("failed", "too_many_failures")
    assert sum(r.setting == numbers.id_of(chunk(512)) for r in results.rounds) == 2


def test_no_round_that_counts_at_all_stops_the_study() -> None:
    with pytest.raises(StudyStopped) as stopped:
        ran(problem(*LIST), Engines(by_chunk, discards=lambda s: "client_limited"))
    assert stopped.value.start.message == "because of client_limited"


def test_a_frozen_command_that_does_not_start_is_not_frozen() -> None:
    asked = problem(*LIST)
    engines = Engines(by_chunk, refuses=lambda p: "cuda_oom" if p.engine_args.get(CHUNK_KNOB) == 512 else None)
    _, results, numbers = ran(asked, engines)
    assert decide(asked, results, numbers).winner != numbers.id_of(chunk(512))


# --- time, groups, engines that cannot be switched ---


def test_the_search_leaves_the_finals_their_time() -> None:
    asked = problem(*LIST, time_s=3600.0)
    engines = Engines(lambda s: Levels(100.0), round_sd=0.3, round_s=60.0)
    _, results, _ = ran(asked, engines)
    assert sum(s.purpose == "final" for s in results.starts) == 3
    assert results.elapsed_s < 3600 + 600


def test_the_search_takes_no_longer_than_starts_are_worth() -> None:
    listed = [chunk(128 * i) for i in range(4, 16)]
    rounds = {}
    for start_s in (5.0, 500.0):
        engines = Engines(lambda s: Levels(100.0), round_sd=0.1, round_s=5.0, start_s=start_s)
        _, results, _ = ran(problem(*listed), engines)
        rounds[start_s] = Counter(s.purpose for r in results.rounds for s in results.starts if s.number == r.start)
    assert rounds[5.0]["search"] <= 4 * 13
    assert rounds[500.0]["search"] > 2 * rounds[5.0]["search"]
    assert 3 * 3 * 3 <= rounds[5.0]["final"] <= 3 * 3 * 3 + rounds[5.0]["search"]
    assert rounds[500.0]["final"] >= rounds[5.0]["final"]


def test_groups_have_a_search_start_each_and_meet_by_their_levels() -> None:
    seqs = {"max_num_seqs": 64}
    groups = (Group({}, LIST), Group(seqs, tuple(chunk(s.chunk or 0, **seqs) for s in LIST)))
    asked = dataclasses.replace(problem(), groups=groups)
    engines = Engines(lambda s: Levels(BY_CHUNK[s.chunk] * (0.7 if "max_num_seqs" in s.knobs else 1.0)))
    _, results, numbers = ran(asked, engines)
    searches = [s for s in results.starts if s.purpose == "search"]
    assert [s.engine_args.get("max_num_seqs") for s in searches] == [None, 64]
    assert numbers.id_of(Setting(knobs=dict(seqs))) in searches[1].settings
    assert STOCK_ID not in searches[1].settings
    finals = [s for s in results.starts if s.purpose == "final"]
    assert Counter(s.engine_args.get("max_num_seqs") for s in finals) == {None: 3, 64: 3}
    decision = decide(asked, results, numbers)
    assert decision.verdict == "better"
    assert decision.winner == numbers.id_of(chunk(512, **seqs))


def test_a_group_that_is_far_behind_is_left_out_of_the_finals() -> None:
    seqs = {"max_num_seqs": 4}
    groups = (Group({}, LIST), Group(seqs, tuple(chunk(s.chunk or 0, **seqs) for s in LIST)))
    asked = dataclasses.replace(problem(), groups=groups)
    engines = Engines(lambda s: Levels(BY_CHUNK[s.chunk] * (3.0 if "max_num_seqs" in s.knobs else 1.0)))
    _, results, _ = ran(asked, engines)
    assert {s.engine_args.get("max_num_seqs") for s in results.starts if s.purpose == "final"} == {None}


def test_an_engine_that_cannot_be_switched_gets_a_setting_a_start() -> None:
    asked = problem(*LIST, live=False)
    engines = Engines(lambda s: Levels(BY_CHUNK[s.chunk] - (s.chunk == 512) * 30))
    _, results, numbers = ran(asked, engines)
    assert all(not s.live and len(s.settings) == 1 for s in results.starts)
    assert Counter(s.purpose for s in results.starts) == {"search": 5, "final": 9}
    assert all(sum(r.start == s.number for r in results.rounds) == 3 for s in results.starts)
    finals = [s.settings[0] for s in results.starts if s.purpose == "final"]
    assert set(Counter(finals).values()) == {3}
    decision = decide(asked, results, numbers)
    assert (decision.verdict, decision.winner) == ("better", numbers.id_of(chunk(512)))


def test_a_boot_that_fails_costs_an_unswitched_study_one_setting() -> None:
    asked = problem(*LIST, live=False)
    engines = Engines(by_chunk, refuses=lambda p: "cuda_oom" if p.engine_args.get(CHUNK_KNOB) == 2048 else None)
    design, results, numbers = ran(asked, engines)
    assert design.states(results)[numbers.id_of(chunk(2048))] == ("infeasible", "cuda_oom")
    assert sum(s.purpose == "final" for s in results.starts) == 9


def test_the_outlook_names_what_is_to_come() -> None:
    asked, numbers = problem(*LIST), Numbers()
    design = SweepDesign(asked, numbers)
    before = design.outlook(Results())
    assert (before.starts, before.settings) == (5, 5)
    assert before.least_rounds < before.rounds < before.most_rounds
    results = Engines(by_chunk).run(design)
    assert before.least_rounds <= len(results.rounds) <= before.most_rounds
    after = design.outlook(results)
    assert (after.starts, after.rounds) == (0, 0)
    unswitched = SweepDesign(dataclasses.replace(asked, live=False), Numbers()).outlook(Results())
    assert unswitched.least_starts == 14
