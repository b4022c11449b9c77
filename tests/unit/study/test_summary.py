"""What a study's summary says: settings, finals, table, time, and advice for whom it is true."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes.profiles import SMALL
from tests.fakes.sessions import FakeEngines, by_chunk
from tuner.clock import FakeClock
from tuner.domain.experiment import (
    STOCK_ID,
    Fingerprint,
    Results,
    Round,
    SettingId,
    Start,
    StartTime,
    StudyFile,
    StudySummary,
    StudyTime,
)
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.setting import STOCK, Setting
from tuner.profile import parse_profile
from tuner.study.advice import advice
from tuner.study.problem import Group, Problem
from tuner.study.settings import problem_of
from tuner.study.summary import States, build_summary, study_time
from tuner.study.verdict import Decision

LIMITED = SMALL + "constraints: [itl_ms.p99 <= 30]\nreferences: [stock, no_chunking]\n"
PROFILE = parse_profile(LIMITED, overrides=["engine.args.max_model_len=8192"])
PROBLEM = problem_of(PROFILE, default_chunk=8192, live=True)
STUDY = StudyFile(
    study="s",
    profile=PROFILE.to_json(),
    fingerprint=Fingerprint(model="m", engine="sim"),
    workload_sha256="0" * 64,
    engine_kind="sim",
    simulated=True,
    versions={},
    seed=0,
    created_at="",
)
SETTINGS: dict[SettingId, Setting] = {
    STOCK_ID: STOCK,
    0: Setting(knobs={"max_num_batched_tokens": 128}),
    1: Setting(knobs={"max_num_batched_tokens": 256}),
    2: Setting(knobs={"max_num_batched_tokens": 256, "watermark": 0.1}),
    3: Setting(knobs={"max_num_batched_tokens": 16}),
    4: PROBLEM.references[0],
}
LEVELS = by_chunk({128: 120.0, 256: 80.0, 8192: 95.0}, 100.0, {128: 10.0, 256: 20.0, 8192: 60.0, 0: 50.0})
ENGINES = FakeEngines(LEVELS, FakeClock())
STATES: States = {
    STOCK_ID: ("measured", ""),
    0: ("eliminated", "slower than chunk 256"),
    1: ("measured", ""),
    2: ("measured", ""),
    3: ("infeasible", "invalid_combination"),
    4: ("measured", ""),
}


def start(number: int, settings: Sequence[SettingId], **more: Any) -> Start:
    given: dict[str, Any] = {"purpose": "search", "state": "completed", "live": True, "stock_chunk": 8192, **more}
    return Start(
        number=number,
        engine_args={},
        settings=list(settings),
        defined={str(name): SETTINGS[name] for name in settings},
        time=StartTime(total_s=90.0, engine_start_s=48.0, load_s=36.0, stop_s=4.0),
        **given,
    )


def rounds(number: int, settings: Sequence[SettingId], cycles: int = 3) -> list[Round]:
    return [
        Round(
            start=number,
            round=1 + cycle * len(settings) + position,
            cycle=10 * number + cycle,
            position=position,
            setting=name,
            state="kept",
            measurement=ENGINES.measured(SETTINGS[name], number, f"{number}/{cycle}/{name}", f"{number}/{cycle}"),
        )
        for cycle in range(cycles)
        for position, name in enumerate(settings)
    ]


def whole_study() -> Results:
    """A search over everything that runs, and two finals of the best."""
    search, final = (STOCK_ID, 0, 1, 2, 4), (STOCK_ID, 1)
    starts = [start(1, search), *(start(n, final, purpose="final", label=f"final {n - 1} of 2") for n in (2, 3))]
    return Results(starts, [*rounds(1, search), *rounds(2, final), *rounds(3, final)], 400.0)


def summary(results: Results) -> StudySummary:
    decision = Decision("better", 1, SETTINGS[1], "chunk 256 is better.")
    return build_summary(STUDY, PROFILE, PROBLEM, results, decision, states=STATES, settings=SETTINGS)


def test_every_setting_has_a_line_with_its_state_and_cause() -> None:
    found = summary(whole_study())
    assert [line.id for line in found.settings] == [STOCK_ID, 0, 1, 2, 3, 4]
    assert {line.id: line.state for line in found.settings} == {name: state for name, (state, _) in STATES.items()}
    assert found.settings[1].cause == "slower than chunk 256"
    assert found.settings[2].cause is None
    assert found.settings[4].median is None
    assert found.settings[3].knobs == {"max_num_batched_tokens": 256, "watermark": 0.1}
    assert found.counts == {"measured": 4, "eliminated": 1, "infeasible": 1}
    assert {line.id: (line.starts, line.rounds) for line in found.finals} == {STOCK_ID: (2, 6), 1: (2, 6)}
    assert found.settings[2].vs_stock["ttft_ms.p90"].change == pytest.approx(-0.2, abs=0.03)


def test_a_setting_of_which_no_round_counts_has_a_line_and_is_advised_on() -> None:
    results = whole_study()
    lost = {"state": "discarded", "code": "client_limited", "reason": "the client was the limit: late"}
    results.rounds += [r.model_copy(update={**lost, "setting": 9}) for r in rounds(1, [1, 1], 1)]
    found = summary(results)
    (line,) = [line for line in found.settings if line.id == 9]
    assert (line.state, line.cause, line.median) == ("failed", "client_limited", None)
    assert found.advice[-1] == (
        "1 measurement gave no round that counts (client_limited), the last one because the client was the limit: "
        "late. Lower the load, or run on a faster host."
    )


def test_the_table_has_a_row_for_each_chunk_with_its_best_setting() -> None:
    rows = summary(whole_study()).table
    assert [(row.setting, row.max_num_batched_tokens) for row in rows] == [
        (0, 128),
        (1, 256),
        (STOCK_ID, 8192),
        (4, 8192),
    ]
    assert [row.winner for row in rows] == [False, True, False, False]
    assert [row.violates for row in rows] == [[], [], ["itl_ms.p99 <= 30"], ["itl_ms.p99 <= 30"]]
    assert rows[1].ttft_p90_ms == pytest.approx(80, rel=0.03)
    assert rows[1].memory_source == "simulated"


def test_each_start_has_a_line() -> None:
    results = whole_study()
    results.starts.append(start(4, [], purpose="final", label="final 3 of 3", state="engine_failed", cause="cuda_oom"))
    results.rounds.append(rounds(4, [1], 1)[0].model_copy(update={"state": "discarded", "reason": "late"}))
    assert summary(results).starts == [
        "1, search: completed, 15 rounds of 5 settings in 1 min 30 s",
        "2, final 1 of 2: completed, 6 rounds of 2 settings in 1 min 30 s",
        "3, final 2 of 2: completed, 6 rounds of 2 settings in 1 min 30 s",
        "4, final 3 of 3: engine failed (cuda_oom), 1 discarded in 1 min 30 s",
    ]


@pytest.mark.parametrize("spent_s", [0.0, 100.0, 264.0, 1000.0])
def test_the_parts_of_the_time_add_up(spent_s: float) -> None:
    time = study_time(Results(whole_study().starts, [], spent_s))
    assert (time.engine_start_s, time.load_s, time.starts) == (3 * 52, 3 * 36, 3)
    assert time.overhead_s >= 0
    assert time.total_s == pytest.approx(time.engine_start_s + time.load_s + time.overhead_s)
    assert time.total_s >= spent_s


def test_a_study_without_starts_is_all_overhead() -> None:
    expected = StudyTime(total_s=5.0, engine_start_s=0.0, load_s=0.0, overhead_s=5.0)
    assert study_time(Results([], [], 5.0)) == expected


MIXED = """
workload:
  kind: mixed
  concurrency: 8
  requests: 120
  classes:
    - {name: chat, weight: 9, system_prompt_tokens: 1024, user_prompt_tokens: [64, 192], output_tokens: 8}
    - {name: document, weight: 1, user_prompt_tokens: 12000, output_tokens: 8}
"""


def advised(text: str, results: Results, **measured: Any) -> str:
    """The advice where stock stays and was measured with these values."""
    groups = {n: Latency(p50=1.0, p90=1.0, p99=1.0, mean=1.0, n=c) for n, c in (("chat", 108), ("document", 12))}
    median = Measurement(groups=groups).model_copy(update=measured)
    lines = [line.model_copy(update={"median": median}) for line in summary(whole_study()).settings[:1]]
    profile = parse_profile(text)
    return " ".join(advice(profile, PROBLEM, results, lines, [], Decision("stock", STOCK_ID, STOCK, "")))


@pytest.mark.parametrize(
    ("hit_rate", "usage", "said", "unsaid"),
    [
        (0.41, 0.5, "this load shares only 41 % of its tokens", "memory"),
        (0.2, 0.5, "put reuse_budget", "evicted"),
        (0.2, 0.99, "the KV pool is full (99 %)", "put reuse_budget"),
    ],
)
def test_a_low_hit_rate_is_measured_against_what_the_load_shares(
    hit_rate: float, usage: float, said: str, unsaid: str
) -> None:
    text = SMALL[: SMALL.index("workload")] + MIXED.lstrip() + SMALL[SMALL.index("space") :]
    told = advised(text, Results(), prefix_hit_rate=hit_rate, kv_cache_usage_peak=usage)
    assert said in told
    assert unsaid not in told


def test_a_good_hit_rate_and_no_trouble_need_no_advice() -> None:
    assert advised(SMALL, Results(), prefix_hit_rate=0.9) == ""


def test_preemptions_are_told() -> None:
    assert "12 preemptions a round" in advised(SMALL, Results(), preemptions=12.0)


def test_failed_starts_are_told_once_a_cause() -> None:
    failed = {"state": "engine_failed", "cause": "cuda_oom", "message": "out of memory", "hint": "Lower it."}
    told = advised(SMALL, Results([start(1, [], **failed), start(2, [], **failed), start(3, [])]))
    assert told == "2 starts failed with cuda_oom: out of memory. Lower it."


def test_settings_that_the_time_budget_left_no_room_for_are_named() -> None:
    def told(problem: Problem) -> str:
        decision = Decision("stock", STOCK_ID, STOCK, "")
        return " ".join(advice(PROFILE, problem, whole_study(), [], [], decision))

    listed = Group({}, tuple(Setting(knobs={"max_num_batched_tokens": 256 * i}) for i in range(1, 12)))
    short = dataclasses.replace(PROBLEM, groups=(listed,), time_s=60.0)
    assert "before 10 settings could be measured (chunk 512, " in told(short)
    assert "--fresh and a larger --budget" in told(short)
    assert told(dataclasses.replace(short, time_s=None)) == ""
