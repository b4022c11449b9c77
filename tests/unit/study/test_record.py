"""Optuna's record: ids that stay, trials that say what became of settings, proposals, and storages that go away."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tests.fakes.profiles import SMALL
from tuner.clock import FakeClock
from tuner.domain.experiment import Results, Round, Start
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.setting import Setting
from tuner.errors import UsageError
from tuner.profile import parse_profile
from tuner.study.importance import knob_importances
from tuner.study.record import Record
from tuner.study.settings import problem_of
from tuner.study.storage import StorageAddress, StorageAway, given_up

LIMITED = SMALL + "constraints: [ttft_ms.p99 <= 100]\n"


def chunk(size: int) -> Setting:
    return Setting(knobs={"max_num_batched_tokens": size})


def record(
    folder: Path,
    *overrides: str,
    results: Results | None = None,
    url: str | None = None,
    clock: FakeClock | None = None,
    say: list[str] | None = None,
) -> Record:
    profile = parse_profile(LIMITED, overrides=list(overrides))
    return Record(
        StorageAddress(folder / "journal.log", url),
        "s",
        profile,
        problem_of(profile, default_chunk=8192, live=True),
        results or Results(),
        seed=1,
        clock=clock or FakeClock(),
        say=(say if say is not None else []).append,
    )


async def opened(folder: Path, *overrides: str, results: Results | None = None, url: str | None = None) -> Record:
    made = record(folder, *overrides, results=results, url=url)
    await made.open()
    return made


def row(setting: int, p90: float, cycle: int = 0) -> Round:
    latency = Latency(p50=p90, p90=p90, p99=p90 * 2, mean=p90, n=9)
    measured = Measurement(ttft_ms=latency)
    return Round(
        start=1, round=1, cycle=cycle, position=0, setting=setting, state="kept", measurement=measured, load_s=1.0
    )


def trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    return optuna.load_study(study_name="s", storage=optuna.storages.JournalStorage(backend)).trials


async def test_each_setting_is_a_trial_with_what_became_of_it(tmp_path: Path) -> None:
    made = await opened(tmp_path, "references=[stock, no_chunking]", "engine.args.max_model_len=512")
    names = [made.id_of(s) for s in (Setting(), chunk(128), chunk(256), chunk(512), chunk(16))]
    assert names == ["stock", 0, 1, 2, 3]
    for number, p90 in ((0, 40.0), (0, 50.0), (0, 42.0), (1, 60.0)):
        made.note(row(number, p90, cycle=int(p90) % 3))
    await made.save()
    assert [t.state.name for t in trials(tmp_path)] == ["RUNNING", "RUNNING", "WAITING", "WAITING"]
    states = {"stock": ("measured", ""), 0: ("measured", ""), 1: ("eliminated", "slower"), 3: ("infeasible", "c")}
    made.settle(states, finished=False)  # type: ignore[arg-type]
    await made.save()
    assert [t.state for t in trials(tmp_path)][:2] == [TrialState.RUNNING, TrialState.PRUNED]
    made.settle({**states, 2: ("failed", "engine_died")}, finished=True)  # type: ignore[dict-item]
    await made.save()
    found = trials(tmp_path)
    assert [t.state.name for t in found] == ["COMPLETE", "PRUNED", "FAIL", "PRUNED"]
    assert found[0].values == [42.0]
    assert found[0].constraints == {"ttft_ms.p99 <= 100": pytest.approx(-0.16)}
    assert found[0].params == {"max_num_batched_tokens": 128}
    assert found[1].intermediate_values == {0: 60.0}
    assert found[3].constraints == {"starts": 1.0}
    assert found[1].user_attrs["cause"] == "slower"
    before = (tmp_path / "journal.log").read_bytes()
    await made.save()
    assert (tmp_path / "journal.log").read_bytes() == before, "nothing new, nothing written"


async def test_ids_are_the_same_after_a_resume_and_after_the_journal_was_lost(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    assert [first.id_of(chunk(c)) for c in (512, 128, 256)] == [0, 1, 2]
    await first.save()
    assert [(await opened(tmp_path)).id_of(chunk(c)) for c in (128, 512)] == [1, 0]
    (tmp_path / "journal.log").unlink()
    start = Start(
        number=1,
        purpose="search",
        state="interrupted",
        engine_args={},
        settings=["stock", 2],
        defined={"2": chunk(256)},
    )
    again = await opened(tmp_path, results=Results([start], [row(2, 33.0)]))
    assert again.id_of(chunk(256)) == 2
    assert again.id_of(chunk(640)) == 3
    again.settle({2: ("measured", "")}, finished=True)
    await again.save()
    assert [t.state.name for t in trials(tmp_path)] == ["FAIL", "FAIL", "COMPLETE", "WAITING"]
    assert trials(tmp_path)[2].values == [33.0]


async def test_a_journal_that_vanishes_while_it_is_used_is_written_anew(tmp_path: Path) -> None:
    made = await opened(tmp_path)
    made.id_of(chunk(128))
    await made.save()
    (tmp_path / "journal.log").unlink()
    made.id_of(chunk(256))
    await made.save()
    assert len(trials(tmp_path)) == 2


@pytest.mark.parametrize("overrides", [(), ("objective={minimize: [ttft_ms.p90], maximize: [request_throughput]}",)])
async def test_what_was_not_measured_has_no_value(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    made = await opened(tmp_path, *overrides)
    made.id_of(chunk(128))
    made.settle({0: ("measured", "")}, finished=True)
    await made.save()
    assert trials(tmp_path)[0].state == TrialState.FAIL


async def test_a_locked_database_is_waited_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/optuna.db?timeout=0.01"
    made = await opened(tmp_path, url=url)
    made.id_of(chunk(128))
    holder = sqlite3.connect(tmp_path / "optuna.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    said: list[str] = []

    class Releasing(FakeClock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            if self.monotonic_s() >= 1008 and holder.in_transaction:
                holder.execute("COMMIT")

    patient = record(tmp_path, url=url, clock=Releasing(), say=said)
    patient.id_of(chunk(128))
    await patient.save()
    holder.close()
    assert len(said) == 1
    assert "database is locked" in said[0]
    assert (await opened(tmp_path, url=url)).id_of(chunk(128)) == 0


async def test_a_database_that_stays_locked_is_given_up_in_one_sentence(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/optuna.db?timeout=0.01"
    made = await opened(tmp_path, url=url)
    made.id_of(chunk(128))
    await made.save()
    holder = sqlite3.connect(tmp_path / "optuna.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StorageAway) as away:
        await record(tmp_path, url=url).open()
    assert (given_up(away.value, before_start=True).exit_code, given_up(away.value, before_start=False).exit_code) == (
        2,
        3,
    )
    holder.execute("COMMIT")
    holder.close()
    assert (await opened(tmp_path, url=url)).id_of(chunk(128)) == 0


async def test_a_database_that_was_removed_is_made_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/optuna.db"
    made = await opened(tmp_path, url=url)
    made.id_of(chunk(128))
    await made.save()
    (tmp_path / "optuna.db").unlink()
    await made.save()
    assert (await opened(tmp_path, url=url)).id_of(chunk(128)) == 0


@pytest.mark.parametrize("url", ["nonsense://user:hunter2@host/db", "nothing", "redis://h"])
async def test_a_storage_that_cannot_be_is_refused_at_once(tmp_path: Path, url: str) -> None:
    clock = FakeClock()
    with pytest.raises(UsageError, match="--storage") as refused:
        await record(tmp_path, url=url, clock=clock).open()
    assert "hunter2" not in str(refused.value)
    assert clock.monotonic_s() == 1000.0


async def test_a_file_that_cannot_be_made_is_not_waited_for(tmp_path: Path) -> None:
    clock = FakeClock()
    with pytest.raises(StorageAway, match="unable to open"):
        await record(tmp_path, url="sqlite:////no/such/folder/x.db", clock=clock).open()
    assert clock.monotonic_s() == 1000.0


async def test_anothers_trials_are_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/optuna.db"
    first = await opened(tmp_path, url=url)
    first.id_of(chunk(128))
    other = record(tmp_path, url=url)
    other.id_of(chunk(512))
    await first.save()
    with pytest.raises(UsageError, match="another sweep"):
        await other.save()


async def test_a_dead_journal_lock_and_a_cut_off_line_do_no_harm(tmp_path: Path) -> None:
    made = await opened(tmp_path)
    made.id_of(chunk(128))
    await made.save()
    Path(f"{tmp_path}/journal.log.lock").symlink_to(tmp_path / "journal.log")
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(b'{"op_code": 4, "worker_id": "cut')
    again = await opened(tmp_path)
    again.id_of(chunk(256))
    await again.save()
    assert len(trials(tmp_path)) == 2


async def test_small_spaces_are_enumerated_and_large_ones_sampled(tmp_path: Path) -> None:
    assert record(tmp_path).sampler == "enumeration"
    assert record(tmp_path, "budget.trials=2").sampler == "TPESampler"


async def test_proposals_are_new_allowed_and_follow_what_was_measured(tmp_path: Path) -> None:
    made = await opened(
        tmp_path,
        "space.max_num_batched_tokens={low: 64, high: 8192, step: 64}",
        "space.max_num_seqs=[128, 96]",
        "engine.args.max_num_seqs=96",
        "budget.trials=40",
    )
    group = made._problem.groups[0]
    assert group.boot == {}
    proposed: list[int] = []
    for _ in range(8):
        batch = made.propose(group, 5)
        numbers = [made.id_of(setting) for setting in batch]
        assert made.propose(group, 5) == batch, "asking changes nothing"
        for number, setting in zip(numbers, batch, strict=True):
            assert isinstance(number, int)
            assert set(setting.knobs) == {"max_num_batched_tokens"}
            made.note(row(number, 10 + abs((setting.chunk or 0) - 2048) / 100))
            proposed.append(setting.chunk or 0)
    assert len(set(proposed)) == 40
    assert min(proposed) >= 128
    near = [sum(abs(c - 2048) < 1024 for c in part) for part in (proposed[:10], proposed[-10:])]
    assert near[1] > near[0]


async def test_proposals_end_with_the_space(tmp_path: Path) -> None:
    made = await opened(tmp_path)
    found = made.propose(made._problem.groups[0], 9)
    assert sorted(s.chunk or 0 for s in found) == [128, 256, 512]


async def test_importances_count_what_was_eliminated_and_no_reference(tmp_path: Path) -> None:
    made = await opened(
        tmp_path, "references=[stock, no_chunking]", "engine.args.max_model_len=512", "space.watermark=[0.0, 0.1]"
    )
    settings = [
        Setting(knobs={"max_num_batched_tokens": c, "watermark": w}) for c in (128, 256, 512) for w in (0.1, 0.2)
    ]
    reference = made._problem.references[0]
    for setting in [*settings, reference]:
        number = made.id_of(setting)
        assert isinstance(number, int)
        made.note(row(number, float(setting.chunk or 0)))
        made.settle({number: ("measured" if number < 2 else "eliminated", "")}, finished=True)
    await made.save()
    shares = knob_importances(tmp_path)
    assert set(shares) == {"max_num_batched_tokens", "watermark"}
    assert shares["max_num_batched_tokens"] > 0.7
