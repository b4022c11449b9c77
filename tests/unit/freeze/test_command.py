"""What `chunktune freeze` takes out of a study, and what it says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.frozen import CHUNK_512, PROFILE, STUDY, rows_of, start_of
from tuner.cli.freeze import freeze
from tuner.domain.experiment import Round, StudySummary, StudyTime
from tuner.domain.setting import STOCK, Setting
from tuner.errors import NoVerdict, UsageError
from tuner.experiment.store import Store
from tuner.files import write_json
from tuner.freeze import load_frozen

SENTENCE = "No setting was better than stock beyond doubt."


def study_in(folder: Path, verdict: str | None = "better", winner: int | str | None = 3, **changes: Any) -> Path:
    """Stock, 3 and 8 were searched, stock and 3 were in two finals; 8 breaks the limit on P99."""
    store = Store(folder / "s")
    write_json(store.study_file, STUDY.model_copy(update=changes).to_json())
    defined = {"stock": STOCK, "3": CHUNK_512, "8": Setting(knobs={"max_num_batched_tokens": 256})}
    rows: list[Round] = []
    store.write_start(start_of(1, purpose="search", settings=["stock", 3, 8], defined=defined))
    rows += [*rows_of(1, [120.0], "stock"), *rows_of(1, [70.0]), *rows_of(1, [400.0], 8)]
    for number in (2, 3):
        store.write_start(start_of(number))
        rows += [*rows_of(number, [120.0], "stock"), *rows_of(number, [80.0])]
    for row in rows:
        store.append_round(row)
    if verdict is not None:
        time = StudyTime(total_s=1.0, engine_start_s=0.0, load_s=0.0, overhead_s=1.0)
        summary = StudySummary(
            study="s",
            simulated=False,
            verdict=verdict,
            sentence=SENTENCE,
            winner=winner,
            counts={"measured": 3},
            time=time,
        )
        write_json(store.summary_file, summary.to_json())
    return store.path


def frozen_from(study: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[dict[str, Any], str]:
    assert freeze(study, **options) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_the_winner_is_frozen_from_its_finals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, said = frozen_from(study_in(tmp_path), capsys)
    assert (found["verdict"], found["setting"], found["engine_args"]["max_num_batched_tokens"]) == ("better", 3, 512)
    assert (found["measured"]["starts"], found["stock"]["starts"]) == (2, 2)
    assert found["study"] == {"name": "s", "counts": {"measured": 3}, "sampler": "enumeration", "seed": 7}
    assert said == ""


def test_what_the_sweep_wrote_is_taken_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_in(tmp_path)
    made, _ = frozen_from(study, capsys)
    (study / "frozen.json").write_text(json.dumps(made | {"created_at": "2020-01-01T00:00:00+00:00"}))
    for options in ({}, {"trial": "3"}):
        assert frozen_from(study, capsys, **options)[0]["created_at"] == "2020-01-01T00:00:00+00:00"


def test_stock_is_frozen_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, said = frozen_from(study_in(tmp_path, "stock", "stock"), capsys)
    assert (found["verdict"], found["setting"], found["engine_args"]["max_num_batched_tokens"]) == (
        "stock",
        "stock",
        1024,
    )
    assert SENTENCE in said


def test_another_setting_is_marked_as_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, said = frozen_from(study_in(tmp_path), capsys, trial="stock")
    assert (found["verdict"], found["setting"], found["measured"]["starts"]) == ("chosen", "stock", 2)
    assert said == ""


def test_a_setting_that_was_in_no_final_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loose = PROFILE.model_copy(update={"constraints": []}).to_json()
    found, said = frozen_from(study_in(tmp_path, profile=loose), capsys, trial="8")
    assert (found["setting"], found["measured"]["starts"]) == (8, 1)
    assert "setting 8 was in no final start" in said


def test_a_setting_that_breaks_a_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"setting 8 breaks a constraint of the profile: ttft_ms\.p99 <= 500"):
        freeze(study_in(tmp_path), trial="8")


@pytest.mark.parametrize("named", ["9", "stok", "-1"])
def test_a_setting_that_is_not_there_lists_those_that_are(tmp_path: Path, named: str) -> None:
    with pytest.raises(UsageError, match=f"no setting {named}") as caught:
        freeze(study_in(tmp_path), trial=named)
    assert caught.value.hint == "Settings there: stock, 3, 8."


def test_a_study_without_an_answer_has_nothing_to_freeze(tmp_path: Path) -> None:
    with pytest.raises(NoVerdict, match=SENTENCE):
        freeze(study_in(tmp_path / "none", "none", None))
    with pytest.raises(UsageError, match="is not finished"):
        freeze(study_in(tmp_path / "unfinished", None))


def test_a_simulated_study_needs_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_in(tmp_path, simulated=True)
    with pytest.raises(UsageError, match="is SIMULATED"):
        freeze(study)
    found, said = frozen_from(study, capsys, allow_simulated=True)
    assert found["simulated"] is True
    assert "SIMULATED" in said


def test_a_written_file_is_read_again(tmp_path: Path) -> None:
    assert freeze(study_in(tmp_path), output=tmp_path / "out.json") == 0
    assert load_frozen(tmp_path / "out.json").setting == 3
