"""A study's folder: who writes which file, and how it is read again.

results/<study>/study.json, summary.json, frozen.json, journal.log
results/<study>/trials/0007/trial.json, engine.log, round-1.requests.jsonl.gz, round-1.telemetry.jsonl.gz
"""

from __future__ import annotations

import dataclasses
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from tuner.domain.base import Document
from tuner.domain.experiment import STUDY_SCHEMA, SUMMARY_SCHEMA, TRIAL_SCHEMA, StudyFile, Summary, Trial
from tuner.domain.observation import ClientStats, MemorySample, MemoryTimeline, RequestRecord, RoundObservation
from tuner.errors import FileFormatError, UsageError
from tuner.files import read_json, write_json, write_whole

DocumentT = TypeVar("DocumentT", bound=Document)


@dataclass(frozen=True)
class StudyRecord:
    """A study as it lies on disk; trials by rising number."""

    directory: Path
    study: StudyFile
    trials: list[Trial]
    summary: Summary | None


@dataclass(frozen=True)
class StudyDirectory:
    """Paths of one study, and the only writer of its documents."""

    path: Path

    @property
    def study_file(self) -> Path:
        return self.path / "study.json"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def frozen_file(self) -> Path:
        return self.path / "frozen.json"

    @property
    def journal_file(self) -> Path:
        return self.path / "journal.log"

    @property
    def lock_file(self) -> Path:
        return self.path / ".lock"

    @property
    def record_dir(self) -> Path:
        """Where running engines are recorded, so that leftovers of a killed run are found."""
        return self.path / ".running"

    def trial_dir(self, number: int) -> Path:
        return self.path / "trials" / f"{number:04d}"

    def trial_file(self, number: int) -> Path:
        return self.trial_dir(number) / "trial.json"

    def engine_log(self, number: int) -> Path:
        return self.trial_dir(number) / "engine.log"

    def numbers(self) -> list[int]:
        """Numbers of the trials that have a folder, rising."""
        folder = self.path / "trials"
        if not folder.is_dir():
            return []
        return sorted(int(f.name) for f in folder.iterdir() if f.is_dir() and f.name.isdecimal())

    def write_trial(self, trial: Trial) -> None:
        write_json(self.trial_file(trial.number), trial.to_json())

    def write_round(
        self, number: int, round_number: int, observation: RoundObservation, timeline: MemoryTimeline
    ) -> None:
        """Everything one round saw, compressed; `round_number` counts from 1."""
        folder = self.trial_dir(number)
        requests = [_record_json(r, observation.started_s) for r in observation.records]
        write_whole(folder / f"round-{round_number}.requests.jsonl.gz", _lines_gz(requests))
        head = {"source": timeline.source, "total_bytes": timeline.total_bytes, "reason": timeline.reason}
        samples = [dataclasses.asdict(s) | {"at_s": round(s.at_s - observation.started_s, 4)} for s in timeline.samples]
        write_whole(folder / f"round-{round_number}.telemetry.jsonl.gz", _lines_gz([head, *samples]))

    def trials(self) -> list[Trial]:
        """Every trial that has a `trial.json`."""
        return [self.trial(number) for number in self.numbers() if self.trial_file(number).exists()]

    def trial(self, number: int) -> Trial:
        return _read(self.trial_file(number), Trial, TRIAL_SCHEMA)

    def study(self) -> StudyFile:
        return _read(self.study_file, StudyFile, STUDY_SCHEMA)


def read_study(directory: Path) -> StudyRecord:
    """A study's documents; FileFormatError where the folder is no study or a file is damaged."""
    folder = StudyDirectory(directory)
    if not directory.is_dir():
        raise UsageError(f"{directory} is no folder", "Give the folder of a study, results/<name of the study>.")
    if not folder.study_file.exists():
        raise FileFormatError(f"{directory} holds no study: study.json is missing", _known_studies(directory))
    summary = _read(folder.summary_file, Summary, SUMMARY_SCHEMA) if folder.summary_file.exists() else None
    return StudyRecord(directory, folder.study(), folder.trials(), summary)


def earlier_s(directory: StudyDirectory, trials: Sequence[Trial]) -> float:
    """The seconds of a study's earlier runs: the summary's, and those of trials whose run was killed and wrote none."""
    if not directory.summary_file.exists():
        return sum(t.time.total_s for t in trials)
    summary = _read(directory.summary_file, Summary, SUMMARY_SCHEMA)
    told = {line.number for line in summary.trials}
    return summary.time.total_s + sum(t.time.total_s for t in trials if t.number not in told)


def newest_study(out: Path) -> Path:
    """The study below `out` that was written to last; UsageError when there is none."""
    studies = [f.parent for f in out.glob("*/study.json")] if out.is_dir() else []
    if not studies:
        raise UsageError(f"no study below {out}/", "Run `chunktune sweep` first, or name a study's folder.")

    def written(folder: Path) -> float:
        summary = folder / "summary.json"
        return (summary if summary.exists() else folder / "study.json").stat().st_mtime

    return max(studies, key=written)


def read_requests(directory: Path, trial: int, round_number: int) -> list[RequestRecord]:
    """The requests of one round; times are seconds since the round began."""
    path = StudyDirectory(directory).trial_dir(trial) / f"round-{round_number}.requests.jsonl.gz"
    try:
        return [RequestRecord(**_known(RequestRecord, row)) for row in _read_lines_gz(path)]
    except TypeError:
        raise _not_ours(path) from None


def read_observation(directory: Path, trial: int, round_number: int) -> RoundObservation:
    """A round's requests as the statistics take them; what the client noted about itself is in the measurement."""
    records = read_requests(directory, trial, round_number)
    measured = [r for r in records if r.phase == "measured"]
    ends = [r.finished_s for r in measured if r.finished_s is not None]
    return RoundObservation(
        records=records,
        client=ClientStats(None, 0, None, None, limited=False),
        started_s=0.0,
        measured_from_s=min((r.sent_s for r in measured), default=0.0),
        measured_to_s=max(ends, default=0.0),
    )


def read_telemetry(directory: Path, trial: int, round_number: int) -> MemoryTimeline:
    """The memory samples of one round; times are seconds since the round began."""
    path = StudyDirectory(directory).trial_dir(trial) / f"round-{round_number}.telemetry.jsonl.gz"
    try:
        head, *rows = _read_lines_gz(path)
        samples = [MemorySample(**_known(MemorySample, row)) for row in rows]
        return MemoryTimeline(head["source"], samples, head["total_bytes"], head["reason"])
    except (KeyError, TypeError, ValueError):
        raise _not_ours(path) from None


def _known_studies(directory: Path) -> str:
    below = sorted(f.parent.name for f in directory.glob("*/study.json"))
    if below:
        return f"Studies below it: {', '.join(below[:10])}."
    return "Name the folder of a study; `chunktune sweep` makes one."


def _read(path: Path, model: type[DocumentT], schema: str) -> DocumentT:
    value = read_json(path, schema=schema)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(f"{path}: {where}: {first['msg']}", "The file was edited or damaged.") from None


def _record_json(record: RequestRecord, origin_s: float) -> dict[str, Any]:
    row = dataclasses.asdict(record)
    for name, value in row.items():
        if name.endswith("_s") and value is not None:
            row[name] = round(value - origin_s, 6)
    row["token_gaps_ms"] = [round(gap, 3) for gap in record.token_gaps_ms]
    return row


def _known(kind: Any, row: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(kind)}
    return {name: value for name, value in row.items() if name in names}


def _lines_gz(rows: list[dict[str, Any]]) -> bytes:
    text = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    return gzip.compress(text, compresslevel=5, mtime=0)


def _not_ours(path: Path) -> FileFormatError:
    return FileFormatError(f"{path} is damaged: its lines are not what a round writes")


def _read_lines_gz(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[Any] = [orjson.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    except FileNotFoundError:
        raise FileFormatError(f"{path} does not exist") from None
    except (OSError, EOFError, zlib.error, orjson.JSONDecodeError) as error:
        raise FileFormatError(f"{path} is damaged: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise _not_ours(path)
    return rows
