"""The whole sweep in process: fake engines and a fake clock, real files, Optuna and decisions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from tests.fakes.heard import Heard
from tests.fakes.profiles import SMALL
from tests.fakes.sessions import FakeEngines, Fault, Levels, by_chunk
from tuner.clock import FakeClock
from tuner.domain.experiment import Fingerprint
from tuner.errors import EngineError, FileFormatError, NoVerdict, UsageError
from tuner.experiment.choice import EngineChoice
from tuner.experiment.events import Events, Silent
from tuner.experiment.store import Store
from tuner.freeze import load_frozen
from tuner.profile import parse_profile
from tuner.study.expected import assumed
from tuner.study.preview import preview
from tuner.study.settings import problem_of
from tuner.study.sweep import Prepared, SweepRequest, SweepResult, sweep

LIMITED = SMALL + "constraints: [itl_ms.p99 <= 50]\n"
TTFT = {n: 100.0 - 8 * (n / 128) ** 0.5 for n in range(16, 8193, 16)}
ITL = {n: 5 + n / 20 for n in range(16, 8193, 16)}
LEVELS = by_chunk(TTFT, TTFT[8192], {**ITL, 0: ITL[8192]})
"""The larger the chunk, the lower the TTFT; from 900 on the limit on ITL is broken, stock breaks it."""


def prepared(
    out: Path, *overrides: str, live: bool = True, text: str = LIMITED, storage: str | None = None
) -> Prepared:
    profile = parse_profile(text, overrides=["space.max_num_batched_tokens=[256, 512, 1024]", *overrides])
    choice = EngineChoice("sim", ("sim",), "asked for")
    request = SweepRequest(profile, choice, out, "s", storage_url=storage, live=live)
    fingerprint = Fingerprint(model="m", vllm_version="0.32.0", engine="sim")
    problem = problem_of(profile, default_chunk=8192, live=live)
    return Prepared(
        request, fingerprint, problem, "" if live else "--no-live", "", assumed(profile, simulated=True), 1.0
    )


def engines(*faults: Fault, levels: Levels = LEVELS) -> FakeEngines:
    return FakeEngines(levels, FakeClock(), faults=list(faults))


async def swept(given: Prepared, machine: FakeEngines, events: Events | None = None) -> SweepResult:
    return await sweep(given, machine.clock, events or Silent(), open_session=machine.open)


def count(machine: FakeEngines, what: str) -> int:
    return sum(call.startswith(f"{what} ") for call in machine.calls)


def files(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.rglob("*") if f.is_file()}


async def test_the_found_chunk_keeps_the_limit_that_stock_breaks(tmp_path: Path) -> None:
    machine = engines()
    result = await swept(prepared(tmp_path), machine)
    summary, frozen = result.summary, load_frozen(tmp_path / "s/frozen.json")
    assert result.error is None
    assert (summary.verdict, frozen.verdict) == ("better", "better")
    assert 512 <= int(str(frozen.engine_args["max_num_batched_tokens"])) <= 900
    assert frozen.setting == summary.winner
    assert [row.setting for row in summary.table if row.winner] == [summary.winner]
    stock = next(row for row in summary.table if row.setting == "stock")
    assert stock.violates == ["itl_ms.p99 <= 50"]
    assert frozen.study.sampler == "enumeration"
    assert frozen.stock is not None
    assert summary.time.starts == len(Store(tmp_path / "s").results().starts) == count(machine, "start")
    trials = optuna_trials(tmp_path / "s")
    assert {t.state.name for t in trials} <= {"COMPLETE", "PRUNED"}
    assert trials[int(str(summary.winner))].state.name == "COMPLETE"
    assert [line.id for line in summary.settings] == ["stock", *range(len(trials))]


def optuna_trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    return optuna.load_study(study_name="s", storage=optuna.storages.JournalStorage(backend)).trials


async def test_a_finished_study_gives_its_answer_again_and_writes_nothing(tmp_path: Path) -> None:
    first = await swept(prepared(tmp_path), engines())
    before = files(tmp_path)
    machine = engines()
    again = await swept(prepared(tmp_path), machine)
    assert again.summary == first.summary
    assert preview(prepared(tmp_path), FakeClock()).expected.sentence == "nothing is left to measure"
    assert files(tmp_path) == before
    assert machine.calls == []


async def interrupted(given: Prepared, at_round: int) -> None:
    def stop(number: int) -> None:
        if number == at_round:
            task.cancel()

    task = asyncio.ensure_future(swept(given, engines(), Heard(on_round=stop)))
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("live", [True, False])
async def test_interrupted_anywhere_the_same_command_continues(tmp_path: Path, live: bool) -> None:
    given = prepared(tmp_path, "space.refine=false", live=live)
    for rounds in (1, 3, 8):
        await interrupted(given, rounds)
        assert Store(tmp_path / "s").summary() is not None
    kept = len(Store(tmp_path / "s").results().kept())
    result = await swept(given, engines())
    assert result.error is None
    assert result.summary.verdict == "better"
    assert len(Store(tmp_path / "s").results().kept()) > kept
    assert {line.label for line in result.summary.settings} == {"stock", "chunk 256", "chunk 512", "chunk 1024"}


async def test_a_sweep_without_an_answer_says_so(tmp_path: Path) -> None:
    result = await swept(prepared(tmp_path, "constraints=[itl_ms.p99 <= 1]"), engines())
    assert isinstance(result.error, NoVerdict)
    assert result.summary.verdict == "none"
    assert not (tmp_path / "s/frozen.json").exists()


async def test_an_answer_that_is_gone_takes_its_frozen_file_along(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    await swept(prepared(tmp_path), engines())
    assert (tmp_path / "s/frozen.json").exists()
    rows = [json.loads(row) for row in (tmp_path / "s/rounds.jsonl").read_text().splitlines()]
    for row in rows:
        row["measurement"]["itl_ms"]["p99"] = 1000.0
    (tmp_path / "s/rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = await swept(prepared(tmp_path), engines())
    assert result.summary.verdict == "none"
    assert not (tmp_path / "s/frozen.json").exists()


async def test_no_start_that_completes_is_a_failure_of_the_engine(tmp_path: Path) -> None:
    result = await swept(prepared(tmp_path), engines(Fault("boot", code="no_free_memory")))
    assert isinstance(result.error, EngineError)
    assert result.error.exit_code == 3
    assert not result.summary.finals


async def test_a_wrong_profile_is_the_users_to_fix(tmp_path: Path) -> None:
    result = await swept(prepared(tmp_path), engines(Fault("boot", code="unknown_option")))
    assert isinstance(result.error, UsageError)


async def test_an_objective_that_cannot_be_measured_ends_the_sweep_at_once(tmp_path: Path) -> None:
    machine = engines()
    result = await swept(prepared(tmp_path, "objective={maximize: goodput}"), machine)
    assert isinstance(result.error, NoVerdict)
    assert "goodput" in result.error.message
    assert count(machine, "round") == 1


async def test_a_journal_of_somebody_elses_is_named_and_rounds_that_are_gone_too(tmp_path: Path) -> None:
    await swept(prepared(tmp_path), engines())
    journal = tmp_path / "s/journal.log"
    kept = journal.read_bytes()
    journal.write_text("xx\n")
    with pytest.raises(FileFormatError, match=r"journal\.log is damaged") as caught:
        await swept(prepared(tmp_path), engines())
    assert "written anew" in caught.value.hint
    journal.write_bytes(kept)
    (tmp_path / "s/rounds.jsonl").unlink()
    result = await swept(prepared(tmp_path), engines())
    assert isinstance(result.error, EngineError)
    assert "rounds.jsonl is gone" in result.error.message


async def test_a_storage_that_vanishes_loses_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/db/optuna.db"
    (tmp_path / "db").mkdir()

    class Vandal(Silent):
        def start_ended(self, *_: object) -> None:
            if (tmp_path / "db").exists():
                (tmp_path / "db/optuna.db").unlink()
                (tmp_path / "db").rmdir()

    result = await swept(prepared(tmp_path, storage=url), engines(), Vandal())
    assert isinstance(result.error, UsageError | EngineError)
    assert result.summary.verdict == "better"
    (tmp_path / "db").mkdir()
    again = await swept(prepared(tmp_path, storage=url), engines())
    assert again.error is None
    assert again.summary == result.summary


async def test_the_expected_time_comes_before_the_first_start_and_is_corrected(tmp_path: Path) -> None:
    heard = Heard()
    await swept(prepared(tmp_path), engines(), heard)
    expected = [text for text in heard.told if text.startswith("expected: ")]
    assert len(expected) == len(heard.expectations) == sum(entry.startswith("began") for entry in heard.order)
    assert "assumed until it is measured" in expected[0]
    assert "as measured so far" in expected[1]
    assert (heard.expectations[0][1] or 0) < 240 < (heard.expectations[1][1] or 0)


@pytest.mark.parametrize("live", [True, False])
def test_a_dry_run_names_starts_settings_and_time_and_writes_nothing(tmp_path: Path, live: bool) -> None:
    given = prepared(tmp_path, "engine.args.max_num_seqs=384", "space.max_num_seqs=[384, 400]", live=live)
    found = preview(given, FakeClock())
    measured = [set(start.settings) for start in found.starts]
    if live:
        assert measured[0] == {"stock", "chunk 512", "chunk 1024"}
        assert len(measured) == 2
    else:
        assert [len(settings) for settings in measured] == [1] * (1 + 4)
    assert len(found.then) == (2 if live else 1)
    assert set(found.infeasible) == {"chunk 256", "chunk 256, max_num_seqs 400"}
    assert all(start.command for start in found.starts)
    assert found.expected.seconds > 0
    assert list(tmp_path.iterdir()) == []
    assert ("settings cannot be switched" in found.first_line) is not live


def test_the_first_line_says_what_it_costs_not_to_switch(tmp_path: Path) -> None:
    given = replace(prepared(tmp_path, live=False), not_live="its version is unknown")
    assert given.first_line == (
        "SIMULATED engine (asked for); settings cannot be switched within an engine start (its version is unknown): "
        "the search makes about 4 starts in place of 1, the finals three of each setting in place of three"
    )


async def test_a_space_too_large_to_list_is_sampled(tmp_path: Path) -> None:
    wide = [f"space.reuse_budget.{n}={{low: 0, high: 1}}" for n in ("min_reuse_ratio", "merge_below", "evict_above")]
    given = prepared(tmp_path, *wide, "space.max_num_batched_tokens=[256, 512, 768, 1024]", "budget.trials=24")
    result = await swept(given, engines())
    assert result.error is None
    assert result.study.design["sampler"] == load_frozen(tmp_path / "s/frozen.json").study.sampler == "TPESampler"
    measured = [line for line in result.summary.settings if line.rounds]
    assert 12 < len(measured) <= 25
    assert len({line.label for line in measured}) == len(measured)
    trials = optuna_trials(tmp_path / "s")
    assert {t.number for t in trials if t.state.name != "WAITING"} == {line.id for line in measured} - {"stock"}
