"""Two configurations, or two servers, against each other, on fake engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.frozen import frozen_of, round_of
from tests.fakes.heard import Heard
from tests.fakes.scripted_starts import carry_out, scripted
from tests.fakes.sessions import FakeEngines, Fault, Level, observed
from tuner.clock import FakeClock
from tuner.domain.experiment import Results
from tuner.domain.frozen import Frozen
from tuner.domain.observation import MemoryTimeline
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Setting
from tuner.errors import EngineError, LoadError, UsageError
from tuner.experiment.design import StartPlan
from tuner.experiment.events import Silent
from tuner.experiment.session import RoundResult, Session, SessionFacts
from tuner.experiment.store import Store
from tuner.regress.compare import ComparePlan, common_args, configuration_differences, same_kind, shared_start
from tuner.regress.sides import Servers, compare_servers, run_compare
from tuner.regress.verdict import Rules

GATE = "ttft_ms.p90"
ARGS: dict[str, Any] = {CHUNK_KNOB: 512, "max_num_seqs": 64, "max_model_len": 2048}


def frozen(**changes: Any) -> Frozen:
    return frozen_of().model_copy(update={"engine_args": ARGS, "regress_metrics": [GATE], **changes})


def plan_of(b: Frozen, *, starts: int = 2, live: bool = True, rules: Rules | None = None) -> ComparePlan:
    a = frozen()
    shared = shared_start(a, b) if live else None
    return ComparePlan(("a", "b"), [GATE], rules or Rules(), starts, 3, (a, b), shared)


OTHER_BOOT = frozen(engine_args={**ARGS, "max_num_seqs": 32})
OTHER_CHUNK = frozen(engine_args={**ARGS, CHUNK_KNOB: 2048})


async def test_configurations_with_other_boot_options_get_fresh_starts_turn_about() -> None:
    plan, engines, heard = plan_of(OTHER_BOOT), scripted({"A": [100.0], "B": [130.0]}), Heard()
    results = await carry_out(plan.design(), engines, heard)
    assert engines.order[:4] == ["A", "B", "B", "A"]
    assert [s.engine_args["max_num_seqs"] for s in results.starts[:2]] == [64, 32]
    assert not any(s.live for s in results.starts)
    assert heard.told == [
        "4 starts in all, 3 rounds on each",
        f"a suspicion ({GATE}): 8 starts in all, 3 rounds on each",
    ]
    result = plan.result(results)
    assert result.verdict == "regressed"
    assert result.metrics[GATE].change == pytest.approx(0.3, abs=0.01)


async def test_equal_configurations_do_not_differ() -> None:
    plan, engines = plan_of(frozen(), live=False), scripted({"A": [100.0, 101.0], "B": [101.0, 100.0]})
    assert plan.result(await carry_out(plan.design(), engines)).verdict == "ok"
    assert len(engines.order) == 4


def measured(plan: ComparePlan, b_ms: float, **noise: float) -> tuple[FakeEngines, ComparePlan]:
    """Engines on which B's TTFT P90 is `b_ms` and A's is 100."""

    def level(setting: Setting) -> Level:
        return Level(b_ms if setting.chunk == 2048 else 100.0)

    return FakeEngines(level, FakeClock(), **noise), plan  # type: ignore[arg-type]


async def test_configurations_that_differ_in_live_knobs_share_each_start() -> None:
    engines, plan = measured(plan_of(OTHER_CHUNK), 108.0, start_sd=0.3, cycle_sd=0.2, seed=1)
    results = await carry_out(plan.design(), engines)
    assert results.starts[0].engine_args == {**ARGS, CHUNK_KNOB: 2048}
    assert all(s.live and s.settings == ["A", "B"] for s in results.starts)
    assert [r.setting for r in results.rounds[:6]] == ["A", "B", "B", "A", "A", "B"]
    assert [r.cycle for r in results.rounds[:6]] == [0, 0, 1, 1, 2, 2]
    result = plan.result(results)
    assert result.verdict == "regressed", "the starts differ by 30 %, the pairs do not"
    assert result.metrics[GATE].change == pytest.approx(0.08, abs=0.03)


async def test_the_same_on_starts_of_their_own_is_not_seen() -> None:
    engines, plan = measured(plan_of(OTHER_CHUNK, live=False), 108.0, start_sd=0.3, cycle_sd=0.2, seed=1)
    assert plan.result(await carry_out(plan.design(), engines)).verdict == "ok"


async def test_a_start_that_dies_in_mid_cycle_is_made_again_whole() -> None:
    engines, plan = measured(plan_of(OTHER_CHUNK), 100.0)
    engines.faults.append(Fault("round", "engine_died", start=1, nth=2, setting=f"chunk {512}"))
    results = await carry_out(plan.design(), engines)
    assert [s.state for s in results.starts] == ["engine_failed", "completed", "completed"]
    evidence = plan.design().measured(results)
    assert [s.number for s in evidence.starts] == [2, 3]
    assert len(evidence.rounds) == 12


def test_a_shared_start_boots_with_the_larger_chunk_and_without_other_knobs_that_differ() -> None:
    b = frozen(engine_args={**ARGS, CHUNK_KNOB: 256, "long_prefill_token_threshold": 64})
    b = b.model_copy(update={"reuse_budget": ReuseBudget(max_cached_blocks=100)})
    plan = shared_start(frozen(), b)
    assert plan is not None
    assert plan.engine_args == ARGS
    assert common_args(frozen(), b) == {"max_num_seqs": 64, "max_model_len": 2048}
    assert [n.setting.knobs for n in plan.settings] == [
        {CHUNK_KNOB: 512},
        {CHUNK_KNOB: 256, "long_prefill_token_threshold": 64},
    ]
    assert plan.live_budget


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "org/other"},
        {"engine_env": {"A": "1"}},
        {"engine_args": {**ARGS, "max_num_seqs": 32}},
        {"engine_args": {"max_num_seqs": 64, "max_model_len": 2048}},
    ],
)
def test_configurations_that_need_starts_of_their_own(changes: dict[str, Any]) -> None:
    assert shared_start(frozen(), frozen(**changes)) is None


@pytest.mark.parametrize(
    ("b_ms", "failed", "word"),
    [
        (70.0, {"A": 0, "B": 0}, "improved"),
        (70.0, {"A": 0, "B": 1}, "inconclusive"),
        (70.0, {"A": 1, "B": 0}, "improved"),
        (130.0, {"A": 0, "B": 1}, "regressed"),
        (130.0, {"A": 1, "B": 0}, "inconclusive"),
    ],
)
async def test_the_side_that_fails_more_requests_is_never_better(
    b_ms: float, failed: Mapping[str, int], word: str
) -> None:
    plan, engines = plan_of(OTHER_BOOT), scripted({"A": [100.0], "B": [b_ms]}, failed=failed)
    result = plan.result(await carry_out(plan.design(), engines))
    assert result.verdict == word
    row = result.metrics["failed_requests"]
    assert (row.baseline, row.now) == (failed["A"], failed["B"])
    assert row.reason.startswith("A 0 of " if not failed["A"] else "A ")
    assert f"requests, B {'0 of' if not failed['B'] else ''}" in row.reason


@dataclass
class OneServer:
    """A server whose TTFT P90 is known."""

    p90: float
    asked: list[str]
    side: str
    load_s: float = 0.0
    facts: SessionFacts = field(default_factory=lambda: SessionFacts(warnings=["one engine"]))

    async def apply(self, setting: Setting) -> None:
        raise AssertionError("a running server is not changed")

    async def warm_up(self, key: str) -> None:
        self.asked.append(f"warm up {self.side}")

    async def round(self, content_key: str, arrivals_key: str) -> RoundResult:
        self.asked.append(f"{self.side} {arrivals_key}")
        self.load_s += 1.0
        measurement = round_of(self.p90 * (1 + 0.004 * (len(self.asked) % 3)))
        observation = observed(measurement, 0.0, 1.0, None)
        return RoundResult(measurement, observation, MemoryTimeline("unavailable", [], {}, "elsewhere"))


def servers(b_ms: float, asked: list[str]) -> Any:
    @asynccontextmanager
    async def open_session(plan: StartPlan, number: int) -> AsyncIterator[Session]:
        yield Servers({"A": OneServer(100.0, asked, "A"), "B": OneServer(b_ms, asked, "B")})

    return open_session


async def test_two_servers_are_one_start_measured_in_turn(tmp_path: Path) -> None:
    plan, asked, heard = compare_servers(("http://a", "http://b"), [GATE], Rules(), cycles=3), list[str](), Heard()
    store = Store(tmp_path / "run")
    result = await run_compare(plan, store, servers(130.0, asked), FakeClock(), heard)
    assert result.verdict == "regressed"
    assert result.differences is None
    assert asked[:6] == ["warm up A", "warm up B", "A cycle-0", "B cycle-0", "B cycle-1", "A cycle-1"]
    assert len(asked) == 2 + 12, "a suspicion doubles the cycles"
    assert heard.told == [
        "1 start in all, 3 rounds of each setting on each",
        f"a suspicion ({GATE}): 1 start in all, 6 rounds of each setting on each",
    ]
    kept: Results = store.results()
    assert [s.label for s in kept.starts] == ["A http://a and B http://b"]
    assert kept.starts[0].time.load_s == 12
    assert kept.starts[0].warnings == ["A: one engine", "B: one engine"]
    assert json.loads((store.path / "result.json").read_text())["verdict"] == "regressed"


async def test_equal_servers_do_not_differ(tmp_path: Path) -> None:
    plan, asked = compare_servers(("http://a", "http://b"), [GATE], Rules(), cycles=3), list[str]()
    result = await run_compare(plan, Store(tmp_path), servers(100.0, asked), FakeClock(), Silent())
    assert result.verdict == "ok"
    assert len(asked) == 2 + 6


async def test_a_failed_side_is_named() -> None:
    plan = plan_of(OTHER_CHUNK)
    engines, _ = measured(plan, 100.0)
    engines.faults.append(Fault("round", "engine_died", setting="chunk 2048"))
    with pytest.raises(EngineError, match="start 2, A and B, under B: a fault on demand"):
        await carry_out(plan.design(), engines)


async def test_a_side_that_the_engine_does_not_take_is_an_error_with_a_way_out() -> None:
    engines, plan = measured(plan_of(OTHER_CHUNK), 100.0)
    engines.faults.append(Fault("refuse", setting="chunk 2048", message="the chunk is too large"))
    with pytest.raises(LoadError, match="under B: the chunk is too large") as error:
        await carry_out(plan.design(), engines)
    assert "--no-live" in error.value.hint


async def test_the_json_document_has_what_the_contract_says() -> None:
    plan, engines = plan_of(OTHER_CHUNK, starts=1, rules=Rules(stages=1)), scripted({"A": [100.0], "B": [100.0]})
    document = plan.result(await carry_out(plan.design(), engines), ["a note"]).to_json()
    assert set(document) >= {"verdict", "metrics", "change_point", "suspects"}
    assert set(document["metrics"][GATE]) >= {"baseline", "now", "change", "ci95", "vs_stock", "verdict"}
    assert document["differences"] == {CHUNK_KNOB: {"a": 512, "b": 2048}}
    assert document["notes"] == ["a note"]


def test_how_two_configurations_differ() -> None:
    a = frozen()
    assert configuration_differences(a, a) == {}
    assert configuration_differences(a, a.model_copy(update={"reuse_budget": ReuseBudget()})) == {}
    b = frozen(
        engine_args={CHUNK_KNOB: 2048, "max_num_seqs": 64},
        reuse_budget=ReuseBudget(max_cached_blocks=100),
        engine_env={},
    )
    assert configuration_differences(a, b) == {
        CHUNK_KNOB: (512, 2048),
        "max_model_len": (2048, None),
        "env HF_HOME": ("/models", None),
        "reuse_budget.max_cached_blocks": (0, 100),
    }


def test_sides_of_a_comparison_are_two_servers_or_two_files() -> None:
    assert same_kind("http://a", "https://b")
    assert not same_kind("a.json", "b.json")
    with pytest.raises(UsageError, match="a server and a file"):
        same_kind("http://a", "b.json")
