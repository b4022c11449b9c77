"""How long a sweep is going to take, and where that is known from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fakes.profiles import SMALL
from tuner.clock import FakeClock
from tuner.domain.experiment import Fingerprint, Results, Round, Start, StartTime
from tuner.domain.measurement import Measurement
from tuner.domain.setting import STOCK, Setting
from tuner.experiment.store import Store
from tuner.profile import load_profile, parse_profile
from tuner.study.design import Outlook
from tuner.study.expected import Pace, assumed, expect, history, measured
from tuner.study.opening import open_or_create

PROFILE = parse_profile(SMALL)
PACE = Pace(start_s=240.0, round_s=5.0, warm_up_s=1.0, source="assumed", range=2.0)


def outlook(starts: int = 4, rounds: int = 60) -> Outlook:
    return Outlook(
        starts=starts,
        least_starts=starts,
        most_starts=starts + 2,
        rounds=rounds,
        least_rounds=rounds // 2,
        most_rounds=rounds * 2,
        needed_rounds=rounds // 4,
        settings=10,
        cycles=4,
    )


def results(start_s: float = 200.0, round_s: float = 4.0) -> Results:
    start = Start(
        number=1,
        purpose="search",
        state="completed",
        engine_args={},
        settings=["stock", 0],
        defined={"stock": STOCK, "0": Setting(knobs={"max_num_batched_tokens": 128})},
        time=StartTime(
            total_s=start_s + 4 * round_s + 3.0, engine_start_s=start_s - 10, load_s=4 * round_s + 3.0, stop_s=10.0
        ),
    )
    rows = [
        Round(
            start=1,
            round=1 + n,
            cycle=n // 2,
            position=n % 2,
            setting=("stock", 0)[n % 2],
            state="kept",
            load_s=round_s,
            measurement=Measurement(),
        )
        for n in range(4)
    ]
    return Results([start], rows)


def test_the_time_is_starts_rounds_and_warm_ups() -> None:
    found = expect(outlook(), PACE)
    assert found.seconds == 4 * 240 + 60 * 5 + (10 + 9) * 1
    assert found.low_s < found.seconds / 2
    assert found.high_s > 2 * found.seconds
    assert found.sentence == (
        "expected: 4 engine starts (4 to 6), 10 settings in about 4 cycles, 21 min 19 s (9 min 24 s to 1 h 08 min), "
        "with 4 min 00 s a start and 5 s a round, assumed"
    )


def test_nothing_left_takes_no_time() -> None:
    none = Outlook(0, 0, 0, 0, 0, 0, 0, 10, 0)
    assert (expect(none, PACE).seconds, expect(none, PACE).sentence) == (0, "nothing is left to measure")


def test_what_was_measured_is_taken() -> None:
    pace = measured(results(), "as measured so far")
    assert pace is not None
    assert (pace.start_s, pace.round_s, pace.warm_up_s) == (200.0, 4.0, 1.5)
    assert measured(Results(), "") is None


def test_discarded_rounds_and_pauses_make_rounds_longer() -> None:
    found = results()
    found.rounds[0] = found.rounds[0].model_copy(update={"state": "discarded"})
    found.starts[0] = found.starts[0].model_copy(
        update={"time": found.starts[0].time.model_copy(update={"total_s": 200.0 + 16.0 + 3.0 + 8.0})}
    )
    pace = measured(found, "")
    assert pace is not None
    assert (pace.start_s, pace.round_s) == (200.0, (16.0 + 8.0) / 3)


def test_without_a_measurement_an_engine_takes_minutes_and_a_simulated_one_seconds() -> None:
    assert assumed(PROFILE, simulated=False).start_s == 240.0
    assert assumed(PROFILE, simulated=True).start_s == 3.0


@pytest.mark.parametrize(
    ("name", "least", "most"), [("default", 1, 15), ("mixed", 15, 120), ("open-loop", 12, 12), ("trace", 30, 30)]
)
def test_an_assumed_round_is_of_the_right_size(name: str, least: float, most: float) -> None:
    assert least <= assumed(load_profile(name), simulated=True).round_s <= most


def study(out: Path, name: str, at: int, *overrides: str, round_s: float = 4.0, engine: str = "vllm") -> None:
    profile = parse_profile(SMALL, overrides=list(overrides))
    store = Store(out / name)
    fingerprint = Fingerprint(model=profile.model, engine=engine)  # type: ignore[arg-type]
    open_or_create(store, profile, fingerprint, {}, seed=0, clock=FakeClock())
    done = results(round_s=round_s)
    store.write_start(done.starts[0])
    for row in done.rounds:
        store.append_round(row)
    os.utime(store.study_file, (at, at))


def test_the_latest_study_of_the_same_load_tells(tmp_path: Path) -> None:
    wanted = Fingerprint(model="m", engine="vllm")
    assert history(tmp_path / "none", PROFILE, wanted) is None
    study(tmp_path, "old", 100, round_s=2.0)
    study(tmp_path, "new", 200, round_s=3.0)
    study(tmp_path, "another-load", 300, "workload.requests=9")
    study(tmp_path, "another-engine", 400, engine="sim")
    study(tmp_path, "damaged", 500)
    (tmp_path / "damaged/rounds.jsonl").write_text("{}\n{}\n{}\n")
    pace = history(tmp_path, PROFILE, wanted)
    assert pace is not None
    assert (pace.round_s, pace.source) == (3.0, "as in study new")


def test_a_budget_bounds_the_time_within_a_start() -> None:
    free = expect(outlook(), PACE)
    left_s = free.seconds - 1.5 * PACE.start_s
    bound = expect(outlook(), PACE, left_s)
    assert bound.seconds == left_s + PACE.start_s < free.seconds
    assert bound.low_s <= bound.seconds <= bound.high_s == bound.seconds
    assert expect(outlook(), PACE, 10 * free.high_s) == free


def test_a_budget_too_short_for_the_finals_is_said_and_not_promised() -> None:
    short = expect(outlook(), PACE, 60.0)
    assert short.seconds == 4 * 240 + 15 * 5 + (10 + 9) * 1
    assert short.sentence.endswith("; the finals need more than the time budget, and are held in any case")
    assert "budget" not in expect(outlook(), PACE, 2000.0).sentence
