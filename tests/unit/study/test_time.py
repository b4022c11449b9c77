"""Where the seconds of a study went, whatever became of its runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import studies
from tuner.domain.experiment import StudyTime
from tuner.files import write_json
from tuner.study.summary import study_time
from tuner.experiment.store import StudyDirectory, earlier_s

TRIALS = [studies.trial(n, {}, 90.0, role="baseline") for n in range(3)]
"""90 s each: 48 s start, 36 s load, 4 s stop."""


def written(path: Path, told: int, total_s: float) -> StudyDirectory:
    """A study whose summary tells of its first trials."""
    time = StudyTime(total_s=total_s, engine_start_s=0.0, load_s=0.0, overhead_s=total_s)
    summary = studies.summary_of(studies.study_file(), TRIALS[:told], None).model_copy(update={"time": time})
    write_json(StudyDirectory(path).summary_file, summary.to_json())
    return StudyDirectory(path)


def test_a_killed_run_is_known_by_its_trials(tmp_path: Path) -> None:
    assert earlier_s(StudyDirectory(tmp_path), []) == 0
    assert earlier_s(StudyDirectory(tmp_path), TRIALS) == 270, "no run came to its summary"
    assert earlier_s(written(tmp_path, 3, 300.0), TRIALS) == 300
    assert earlier_s(written(tmp_path, 1, 100.0), TRIALS) == 100 + 180, "the run after that summary was killed"


@pytest.mark.parametrize("spent_s", [0.0, 100.0, 264.0, 1000.0])
def test_the_parts_add_up(spent_s: float) -> None:
    time = study_time(TRIALS, spent_s)
    assert time.engine_start_s == 3 * 52
    assert time.load_s == 3 * 36
    assert time.overhead_s >= 0
    assert time.total_s == pytest.approx(time.engine_start_s + time.load_s + time.overhead_s)
    assert time.total_s >= spent_s


def test_a_study_without_trials_is_all_overhead() -> None:
    assert study_time([], 5.0) == StudyTime(total_s=5.0, engine_start_s=0.0, load_s=0.0, overhead_s=5.0)
