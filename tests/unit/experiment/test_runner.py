"""The main path in process: starts, settings and rounds on fake engines, everything on disk at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.designs import CyclesOf
from tests.fakes.heard import Heard
from tests.fakes.sessions import FakeEngines, Fault, by_chunk
from tuner.clock import FakeClock
from tuner.domain.experiment import Results, Start
from tuner.domain.setting import CHUNK_KNOB, STOCK, Setting
from tuner.experiment.design import Named, Step
from tuner.experiment.events import Silent
from tuner.experiment.runner import ATTEMPTS, PAUSES_S, run
from tuner.experiment.store import Store

STOCK_NAMED = Named("stock", STOCK)
SMALL = Named(0, Setting(knobs={CHUNK_KNOB: 256}))
LARGE = Named(1, Setting(knobs={CHUNK_KNOB: 4096}))
LEVELS = by_chunk({256: 120.0, 4096: 80.0}, stock=100.0)


@dataclass
class Ran:
    """An experiment that is over, and what is on disk of it."""

    results: Results
    engines: FakeEngines
    store: Store

    @property
    def start(self) -> Start:
        return self.results.starts[-1]

    def rows(self, state: str) -> list[object]:
        return [r.setting for r in self.results.rounds if r.state == state]


def play(path: Path, design: CyclesOf, *faults: Fault, events: Silent | None = None) -> Ran:
    """Run the design; what a new Store reads is what the run returned."""
    clock = FakeClock()
    engines = FakeEngines(LEVELS, clock, faults=list(faults))
    results = asyncio.run(run(design, Store(path), engines.open, clock, events or Silent()))
    on_disk = Store(path).results()
    assert on_disk.starts == results.starts
    assert on_disk.rounds == results.rounds
    assert engines.running == 0
    return Ran(results, engines, Store(path))


def test_a_start_measures_its_cycles_in_order(tmp_path: Path) -> None:
    heard = Heard()
    ran = play(tmp_path, CyclesOf([STOCK_NAMED, SMALL], cycles=2), events=heard)
    rounds = [f"{what} {name}{more}" for name in ("stock", 0) for what, more in (("round", " attempt 1"), ("kept", ""))]
    assert heard.order == ["began start 1", "ready", *rounds, *rounds, "ended completed"]
    assert [(r.round, r.cycle, r.position) for r in ran.results.rounds] == [(1, 0, 0), (2, 0, 1), (3, 1, 0), (4, 1, 1)]
    assert ran.start.state == "completed"
    assert ran.start.settings == ["stock", 0]
    assert ran.start.defined == {"stock": STOCK, "0": SMALL.setting}
    assert ran.start.effective_args == {CHUNK_KNOB: 8192}
    assert ran.start.stock_chunk == 8192
    assert ran.start.simulated
    for number in range(1, 5):
        assert len(ran.store.read_requests(ran.start.number, number)) == 20
        assert ran.store.read_telemetry(ran.start.number, number).source == "simulated"


def test_every_second_of_a_start_is_in_one_of_its_parts(tmp_path: Path) -> None:
    ran = play(tmp_path, CyclesOf([STOCK_NAMED, SMALL], cycles=2))
    time, engines = ran.start.time, ran.engines
    assert time.engine_start_s == ran.start.start_s == engines.start_s
    assert time.load_s == 4 * engines.round_s + 2 * engines.warm_up_s
    assert time.stop_s == engines.stop_s
    assert time.total_s == time.engine_start_s + time.load_s + time.stop_s == ran.results.elapsed_s
    assert [r.load_s for r in ran.results.rounds] == [engines.round_s] * 4


def test_each_distinct_chunk_is_warmed_up_once_a_start(tmp_path: Path) -> None:
    again = Named(2, Setting(knobs={CHUNK_KNOB: 256, "long_prefill_token_threshold": 64}))
    ran = play(tmp_path, CyclesOf([STOCK_NAMED, SMALL, again], cycles=2, starts=2))
    warmed = ["warm up stock", "warm up chunk 256"]
    assert [c for c in ran.engines.calls if c.startswith("warm up")] == [*warmed, *warmed]
    at = ran.engines.calls.index("warm up stock")
    assert ran.engines.calls[at : at + 3] == ["warm up stock", "apply stock", "round stock cycle-0"], "reset after it"


def test_contents_are_new_and_arrivals_shared_within_a_cycle(tmp_path: Path) -> None:
    ran = play(tmp_path, CyclesOf([STOCK_NAMED, SMALL], cycles=2, starts=2))
    assert len(set(ran.engines.content_keys)) == len(ran.engines.content_keys) == 8 + 4
    driven = [c.rpartition(" ")[2] for c in ran.engines.calls if c.startswith("round")]
    assert driven == [f"cycle-{n}" for n in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert [r.cycle for r in ran.results.rounds] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_discarded_round_is_driven_again_on_new_content(tmp_path: Path) -> None:
    fault = Fault("discard", "warm_cache", setting="chunk 256", times=1, message="64 tokens were cached")
    heard = Heard()
    ran = play(tmp_path, CyclesOf([STOCK_NAMED, SMALL], cycles=1), fault, events=heard)
    assert heard.order[4:8] == ["round 0 attempt 1", "discarded 0", "round 0 attempt 2", "kept 0"]
    assert [(r.state, r.code, r.reason) for r in ran.results.rounds] == [
        ("kept", None, None),
        ("discarded", "warm_cache", "64 tokens were cached"),
        ("kept", None, None),
    ]
    assert [r.cycle for r in ran.results.rounds] == [0, 0, 0], "with the arrivals of its cycle"
    assert ran.results.kept(0) == [ran.results.rounds[2]]
    assert ran.start.state == "completed"


def test_a_round_that_ran_another_setting_does_not_count(tmp_path: Path) -> None:
    fault = Fault("discard", "not_as_applied", nth=1, setting="chunk 256", message="asked for 256, ran 8192")
    ran = play(tmp_path, CyclesOf([SMALL], cycles=1), fault)
    assert ran.rows("discarded") == [0]
    assert ran.rows("kept") == [0]


def test_a_slow_client_gets_time_before_the_next_attempt(tmp_path: Path) -> None:
    ran = play(tmp_path, CyclesOf([SMALL], cycles=1), Fault("discard", "client_limited", times=2))
    assert ran.rows("discarded") == [0, 0]
    assert ran.rows("kept") == [0]
    measured_s = ran.start.time.engine_start_s + ran.start.time.load_s + ran.start.time.stop_s
    assert ran.start.time.total_s - measured_s == sum(PAUSES_S)


@pytest.mark.parametrize("code", ["warm_cache", "too_many_failures", "http_error", "client_limited", "not_as_applied"])
def test_a_step_is_given_up_after_some_attempts_and_the_others_go_on(tmp_path: Path, code: str) -> None:
    ran = play(tmp_path, CyclesOf([SMALL, LARGE], cycles=1), Fault("discard", code, setting="chunk 256"))
    assert ran.rows("discarded") == [0] * ATTEMPTS
    assert ran.rows("kept") == [1]
    assert ran.start.state == "completed"


def test_a_design_that_insists_on_a_step_that_was_given_up_ends_the_start(tmp_path: Path) -> None:
    fault = Fault("discard", "http_error", message="20 of 20 requests failed: HTTP 500")
    ran = play(tmp_path, CyclesOf([SMALL], insists=True), fault)
    assert ran.rows("discarded") == [0] * ATTEMPTS
    assert (ran.start.state, ran.start.cause) == ("load_failed", "http_error")
    assert ran.start.message == "20 of 20 requests failed: HTTP 500"
    assert ran.start.failed_setting == 0


@pytest.mark.parametrize("code", ["auth", "engine_stalled", "engine_died"])
def test_what_another_round_would_only_meet_again_ends_the_start_at_once(tmp_path: Path, code: str) -> None:
    fault = Fault("discard", code, setting="chunk 256", message="no hope")
    ran = play(tmp_path, CyclesOf([STOCK_NAMED, SMALL, LARGE]), fault)
    assert ran.rows("kept") == ["stock"]
    assert ran.rows("discarded") == [0]
    assert (ran.start.state, ran.start.cause, ran.start.failed_setting) == ("engine_failed", code, 0)


def test_a_setting_that_the_engine_does_not_take_is_told_once_and_the_others_go_on(tmp_path: Path) -> None:
    fault = Fault("refuse", setting="chunk 256", message="engine 1 of 2 did not answer")
    ran = play(tmp_path, CyclesOf([STOCK_NAMED, SMALL, LARGE], cycles=1), fault)
    assert ran.rows("kept") == ["stock", 1]
    refused = next(r for r in ran.results.rounds if not r.kept)
    assert (refused.code, refused.reason) == ("switch_refused", "engine 1 of 2 did not answer")
    assert ran.start.state == "completed"


@pytest.mark.parametrize("kind", ["apply", "warm_up", "round"])
def test_an_engine_that_dies_in_mid_cycle_keeps_what_was_measured(tmp_path: Path, kind: str) -> None:
    fault = Fault(kind, "engine_died", setting="chunk 4096", message="exit code 1")  # type: ignore[arg-type]
    ran = play(tmp_path, CyclesOf([STOCK_NAMED, LARGE, SMALL]), fault)
    assert ran.rows("kept") == ["stock"]
    assert (ran.start.state, ran.start.cause, ran.start.failed_setting) == ("engine_failed", "engine_died", 1)
    assert ran.start.hint == "Do something about it."
    assert ran.start.time.stop_s == ran.engines.stop_s


def test_out_of_memory_under_load_is_told_with_its_setting(tmp_path: Path) -> None:
    """Not `infeasible`: other settings ran on this start."""
    fault = Fault("round", "cuda_oom", setting="chunk 4096")
    ran = play(tmp_path, CyclesOf([SMALL, LARGE]), fault)
    assert (ran.start.state, ran.start.cause, ran.start.failed_setting) == ("engine_failed", "cuda_oom", 1)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("kv_cache_too_small", "infeasible"),
        ("cuda_oom", "infeasible"),
        ("block_size", "infeasible"),
        ("not_as_asked", "infeasible"),
        ("no_free_memory", "engine_failed"),
        ("port_in_use", "engine_failed"),
        ("startup_timeout", "engine_failed"),
        ("unknown", "engine_failed"),
        ("gated_model", "engine_failed"),
        ("not_openai", "load_failed"),
    ],
)
def test_an_engine_that_does_not_start_says_whose_fault_it_is(tmp_path: Path, code: str, state: str) -> None:
    fault = Fault("boot", code, chunk_above=4096, message="it did not start", bound=2096)
    heard = Heard()
    ran = play(tmp_path, CyclesOf([SMALL]), fault, events=heard)
    start = ran.start
    assert (start.state, start.cause, start.message, start.bound) == (state, code, "it did not start", 2096)
    assert start.failed_setting is None
    assert start.effective_args is None
    assert start.time.engine_start_s == start.time.total_s == ran.engines.start_s
    assert heard.order == ["began start 1", f"ended {state}"]
    assert ran.results.rounds == []


def test_an_engine_that_cannot_be_stopped_keeps_its_rounds(tmp_path: Path) -> None:
    ran = play(tmp_path, CyclesOf([SMALL], cycles=1), Fault("stop", "not_stopped"))
    assert ran.rows("kept") == [0]
    assert (ran.start.state, ran.start.cause, ran.start.failed_setting) == ("engine_failed", "not_stopped", None)


def test_an_engine_that_is_not_switched_runs_its_one_setting(tmp_path: Path) -> None:
    design = CyclesOf([SMALL], cycles=2, starts=2, live=False, args={CHUNK_KNOB: 256})
    ran = play(tmp_path, design)
    assert [s.live for s in ran.results.starts] == [False, False]
    assert ran.rows("kept") == [0] * 4


def test_a_cancelled_start_is_kept_as_interrupted_and_the_next_run_goes_on(tmp_path: Path) -> None:
    def cancel(rounds: int) -> None:
        if rounds == 3:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    design = CyclesOf([STOCK_NAMED, SMALL], starts=2)
    with pytest.raises(asyncio.CancelledError):
        play(tmp_path, design, events=Heard(cancel))
    left = Store(tmp_path).results()
    assert [s.state for s in left.starts] == ["interrupted"]
    assert left.starts[0].failed_setting is None
    assert left.starts[0].time.load_s > 0
    assert [r.setting for r in left.rounds] == ["stock", 0], "all but the round under way"

    ran = play(tmp_path, design)
    assert [s.state for s in ran.results.starts] == ["interrupted", "completed"]
    assert [r.setting for r in ran.results.rounds[:2]] == ["stock", 0]
    assert min(r.cycle for r in ran.results.rounds[2:]) == 1, "an incomplete cycle is not completed on another start"
    assert len({s.number for s in ran.results.starts}) == 2


def test_everything_is_on_disk_before_the_next_round(tmp_path: Path) -> None:
    seen: list[tuple[str, int, float]] = []

    def look(_: int) -> None:
        on_disk = Store(tmp_path).results()
        seen.append((on_disk.starts[-1].state, len(on_disk.rounds), on_disk.starts[-1].time.load_s))

    play(tmp_path, CyclesOf([SMALL], cycles=4), events=Heard(look))
    loads = [0.0, 3.0, 5.0, 7.0]
    assert seen == [("interrupted", n, s) for n, s in enumerate(loads)], "a kill leaves a start that is known to be cut"


def test_a_setting_that_comes_up_under_way_is_written_with_its_start(tmp_path: Path) -> None:
    class Refines(CyclesOf):
        def next_step(self, results: Results, start: Start) -> Step | None:
            step = super().next_step(results, start)
            if step is not None:
                return step
            return None if results.kept(1) else Step(LARGE, results.next_cycle, 0)

    ran = play(tmp_path, Refines([SMALL], cycles=1))
    assert ran.start.settings == [0, 1]
    assert dict(ran.results.settings()) == {0: SMALL.setting, 1: LARGE.setting}


def test_the_time_of_earlier_runs_counts_into_what_the_design_sees(tmp_path: Path) -> None:
    first = play(tmp_path, CyclesOf([SMALL], starts=1))
    both = play(tmp_path, CyclesOf([SMALL], starts=2))
    assert first.results.elapsed_s > 0
    assert both.results.elapsed_s == first.results.elapsed_s + both.start.time.total_s
