"""What becomes of a sweep when engines fail: one table, in process. Who tells the causes apart is tested there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.sessions import Fault
from tests.unit.study.test_sweep import count, engines, prepared, swept
from tuner.errors import EngineError, ProfileError
from tuner.experiment.store import Store


@dataclass(frozen=True)
class Case:
    """What is played, and what is expected of the study."""

    name: str
    faults: tuple[Fault, ...]
    error: type[Exception] | None = None
    causes: tuple[str, ...] = ()
    """Of the starts that did not complete, in order."""
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    """State and cause of settings, by label; the others are measured or eliminated."""
    live: bool = True


def fault(kind: str, code: str = "engine_died", **more: object) -> tuple[Fault, ...]:
    return (Fault(kind, code, **more),)  # type: ignore[arg-type]


ALL = ("stock", "chunk 256", "chunk 512", "chunk 1024")
CASES = [
    Case("memory is not back yet, once", fault("boot", "no_free_memory", times=1), causes=("no_free_memory",)),
    Case("the port is taken, once", fault("boot", "port_in_use", times=1), causes=("port_in_use",)),
    Case("another tenant keeps the memory", fault("boot", "no_free_memory"), EngineError, ("no_free_memory",) * 4),
    Case("never ready", fault("boot", "startup_timeout"), EngineError, ("startup_timeout",) * 2),
    Case("fails for a reason that nobody knows", fault("boot", "unknown"), EngineError, ("unknown",) * 4),
    *(
        Case(f"{code} stops after one start", fault("boot", code), error, (code,))
        for code, error in {
            "gated_model": EngineError,
            "unsupported_gpu": EngineError,
            "missing_tokenizer": EngineError,
            "missing_model": ProfileError,
            "unknown_option": ProfileError,
        }.items()
    ),
    Case(
        "chunks from 1024 up do not start",
        fault("boot", "kv_cache_too_small", chunk_above=1024),
        causes=("kv_cache_too_small",) * 2,
        states=dict.fromkeys(("stock", "chunk 1024"), ("infeasible", "kv_cache_too_small")),
    ),
    Case(
        "chunks from 1024 up do not start, one setting a start",
        fault("boot", "cuda_oom", chunk_above=1024),
        causes=("cuda_oom",) * 2,
        states=dict.fromkeys(("stock", "chunk 1024"), ("infeasible", "cuda_oom")),
        live=False,
    ),
    Case("no chunk starts", fault("boot", "block_size"), EngineError, ("block_size",) * 4),
    Case(
        "one setting kills the engine",
        fault("round", "engine_died", setting="chunk 256"),
        causes=("engine_died",) * 2,
        states={"chunk 256": ("failed", "engine_died")},
    ),
    Case(
        "one setting runs out of memory under load",
        fault("round", "cuda_oom", setting="chunk 1024"),
        causes=("cuda_oom",) * 2,
        states={"chunk 1024": ("failed", "cuda_oom")},
    ),
    Case(
        "one setting stalls",
        fault("discard", "engine_stalled", setting="chunk 256"),
        causes=("engine_stalled",) * 2,
        states={"chunk 256": ("failed", "engine_stalled")},
    ),
    Case("the engine dies once in mid-cycle", fault("round", nth=2, times=1), causes=("engine_died",)),
    Case("live control is lost once", fault("apply", "live_lost", nth=1, times=1), causes=("live_lost",)),
    Case("every engine dies", fault("round"), EngineError),
    Case("a server that wants a key", fault("discard", "auth"), EngineError, ("auth",)),
    Case("every request fails", fault("discard", "http_error"), EngineError),
    Case("the client is always the limit", fault("discard", "client_limited"), EngineError),
    Case(
        "one setting is refused by the running engine",
        fault("refuse", setting="chunk 256"),
        states={"chunk 256": ("infeasible", "switch_refused")},
    ),
    Case(
        "one setting is not run as applied",
        fault("discard", "not_as_applied", setting="chunk 256"),
        states={"chunk 256": ("failed", "not_as_applied")},
    ),
    Case("an engine cannot be stopped once", fault("stop", "not_stopped", times=1), causes=("not_stopped",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_fault(case: Case, tmp_path: Path) -> None:
    machine = engines(*case.faults)
    result = await swept(prepared(tmp_path, "space.refine=false", live=case.live), machine)
    results = Store(tmp_path / "s").results()
    failed = [s for s in results.starts if s.state != "completed"]
    if case.causes or case.error is None:
        assert [s.cause for s in failed] == list(case.causes), [s.message for s in failed]
    assert all(s.message and s.hint for s in failed)
    assert count(machine, "start") == len(results.starts)
    if case.error is not None:
        assert isinstance(result.error, case.error)
        assert not (tmp_path / "s/frozen.json").exists()
        return
    assert result.error is None
    assert (tmp_path / "s/frozen.json").exists()
    found = {line.label: (line.state, line.cause) for line in result.summary.settings}
    assert set(found) == set(ALL)
    expected = {name: case.states.get(name) for name in ALL}
    assert {n: f for n, f in found.items() if f[0] in ("infeasible", "failed")} == {
        n: e for n, e in expected.items() if e
    }
    finals = [s for s in results.starts if s.purpose == "final" and s.state == "completed"]
    assert len(finals) == (3 if case.live else 3 * len({n for s in finals for n in s.settings}))


async def test_a_final_start_that_died_is_replaced_whole(tmp_path: Path) -> None:
    plain = engines()
    await swept(prepared(tmp_path / "plain", "space.refine=false"), plain)
    second_final = [s.purpose for s in Store(tmp_path / "plain/s").results().starts].index("final") + 2
    machine = engines(Fault("round", start=second_final, nth=2))
    result = await swept(prepared(tmp_path, "space.refine=false"), machine)
    assert result.error is None
    results = Store(tmp_path / "s").results()
    finals = [s for s in results.starts if s.purpose == "final"]
    assert Counter(s.state for s in finals) == {"completed": 3, "engine_failed": 1}
    cycles = [{r.cycle for r in results.rounds if r.start == s.number} for s in finals]
    assert all(not (one & other) for i, one in enumerate(cycles) for other in cycles[:i]), "no cycle on two starts"
    complete = [s.number for s in finals if s.state == "completed"]
    assert all(line.starts == 3 for line in result.summary.finals)
    assert all(results.kept("stock", starts=[number]) for number in complete)


async def test_the_literal_start_is_made_again_when_it_fails(tmp_path: Path) -> None:
    plain = engines()
    await swept(prepared(tmp_path / "plain", "space.refine=false"), plain)
    last = len(Store(tmp_path / "plain/s").results().starts)
    result = await swept(prepared(tmp_path, "space.refine=false"), engines(Fault("round", start=last, times=1)))
    assert result.error is None
    literal = [s.state for s in Store(tmp_path / "s").results().starts if s.purpose == "literal"]
    assert literal == ["engine_failed", "completed"]
