"""An experiment's folder: who writes which file, and how it is read again.

results/<study>/study.json, summary.json, frozen.json, journal.log, rounds.jsonl
results/<study>/starts/0007/start.json, engine.log, round-1.requests.jsonl.gz, round-1.telemetry.jsonl.gz
"""

from __future__ import annotations

import dataclasses
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson
from pydantic import ValidationError

from tuner.domain.base import Document
from tuner.domain.experiment import (
    START_SCHEMA,
    STUDY_SCHEMA,
    SUMMARY_SCHEMA,
    Results,
    Round,
    Start,
    StudyFile,
    StudySummary,
)
from tuner.domain.observation import ClientStats, MemorySample, MemoryTimeline, RequestRecord, RoundObservation
from tuner.errors import FileFormatError, UsageError
from tuner.files import append_json_line, read_json, read_json_lines, write_json, write_whole

DocumentT = TypeVar("DocumentT", bound=Document)

_EARLIER_SCHEMA: Final = "chunktune.study/1"
KILLED: Final = "the run was stopped or killed during this start"


@dataclass(frozen=True)
class StudyRecord:
    """A study as it lies on disk."""

    directory: Path
    study: StudyFile
    results: Results
    summary: StudySummary | None


@dataclass(frozen=True)
class Store:
    """The folder of a study below `results/`, or of one run of `regress` or `compare`; the only writer of its starts
    and rounds."""

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
    def rounds_file(self) -> Path:
        return self.path / "rounds.jsonl"

    @property
    def lock_file(self) -> Path:
        return self.path / ".lock"

    @property
    def record_dir(self) -> Path:
        """Where running engines are recorded, so that leftovers of a killed run are found."""
        return self.path / ".running"

    def start_dir(self, number: int) -> Path:
        return self.path / "starts" / f"{number:04d}"

    def start_file(self, number: int) -> Path:
        return self.start_dir(number) / "start.json"

    def engine_log(self, number: int) -> Path:
        return self.start_dir(number) / "engine.log"

    def next_start_number(self) -> int:
        """From 1; never the number of a start that has left a folder or rows."""
        return 1 + max([*self._numbers(), *(row.start for row in self._rows())], default=0)

    def write_start(self, start: Start) -> None:
        write_json(self.start_file(start.number), start.to_json())

    def append_round(self, row: Round) -> None:
        append_json_line(self.rounds_file, row.to_json())

    def write_round_data(
        self, start: int, round_number: int, observation: RoundObservation, timeline: MemoryTimeline
    ) -> None:
        """Everything that one round saw, compressed; times become seconds since the round began."""
        folder = self.start_dir(start)
        requests = [_record_json(r, observation.started_s) for r in observation.records]
        write_whole(folder / f"round-{round_number}.requests.jsonl.gz", _lines_gz(requests))
        head = {
            "source": timeline.source,
            "total_bytes": timeline.total_bytes,
            "reason": timeline.reason,
            "asked_in_flight": observation.client.asked_in_flight,
        }
        samples = [dataclasses.asdict(s) | {"at_s": round(s.at_s - observation.started_s, 4)} for s in timeline.samples]
        write_whole(folder / f"round-{round_number}.telemetry.jsonl.gz", _lines_gz([head, *samples]))

    def results(self) -> Results:
        """Everything measured so far; rows of a start without `start.json` are left out.

        `elapsed_s` is the time of all earlier runs: the summary's, and that of starts made since it was written.
        """
        self._refuse_earlier()
        starts = [_read(self.start_file(n), Start, START_SCHEMA) for n in self._numbers() if self._started(n)]
        known = {start.number for start in starts}
        summary = self.summary()
        elapsed_s, told = (summary.time.total_s, summary.time.starts) if summary else (0.0, 0)
        elapsed_s += sum(start.time.total_s for start in starts[told:])
        return Results(starts, [row for row in self._rows() if row.start in known], elapsed_s)

    def settle(self) -> list[Start]:
        """Say of each start that a run left open that it was; these starts. Only for the holder of the lock."""
        settled = []
        for start in self.results().starts:
            if start.state == "interrupted" and start.message is None:
                settled.append(start.model_copy(update={"message": KILLED}))
                self.write_start(settled[-1])
        return settled

    def study(self) -> StudyFile:
        """FileFormatError for a study of an earlier chunktune, which is named."""
        self._refuse_earlier()
        return _read(self.study_file, StudyFile, STUDY_SCHEMA)

    def summary(self) -> StudySummary | None:
        """None until a run of the study has ended."""
        return _read(self.summary_file, StudySummary, SUMMARY_SCHEMA) if self.summary_file.exists() else None

    def read_requests(self, start: int, round_number: int) -> list[RequestRecord]:
        """The requests of one round; times are seconds since the round began."""
        path = self.start_dir(start) / f"round-{round_number}.requests.jsonl.gz"
        try:
            return [RequestRecord(**_known(RequestRecord, row)) for row in _read_lines_gz(path)]
        except TypeError:
            raise _not_ours(path) from None

    def read_observation(self, start: int, round_number: int) -> RoundObservation:
        """A round's requests as the statistics take them; what the client noted about itself is in the measurement."""
        records = self.read_requests(start, round_number)
        measured = [r for r in records if r.phase == "measured"]
        ends = [r.finished_s for r in measured if r.finished_s is not None]
        return RoundObservation(
            records=records,
            client=ClientStats(None, 0, self._asked_in_flight(start, round_number), None, limited=False),
            started_s=0.0,
            measured_from_s=min((r.sent_s for r in measured), default=0.0),
            measured_to_s=max(ends, default=0.0),
        )

    def _asked_in_flight(self, start: int, round_number: int) -> int | None:
        """The closed loop's concurrency; None for an open loop, and where the round's samples are gone."""
        try:
            head = _read_lines_gz(self.start_dir(start) / f"round-{round_number}.telemetry.jsonl.gz")[0]
        except (FileFormatError, IndexError):
            return None
        asked = head.get("asked_in_flight")
        return asked if isinstance(asked, int) else None

    def read_telemetry(self, start: int, round_number: int) -> MemoryTimeline:
        """The memory samples of one round; times are seconds since the round began."""
        path = self.start_dir(start) / f"round-{round_number}.telemetry.jsonl.gz"
        try:
            head, *rows = _read_lines_gz(path)
            samples = [MemorySample(**_known(MemorySample, row)) for row in rows]
            return MemoryTimeline(head["source"], samples, head["total_bytes"], head["reason"])
        except (KeyError, TypeError, ValueError):
            raise _not_ours(path) from None

    def _numbers(self) -> list[int]:
        """Numbers of the starts that have a folder, rising."""
        folder = self.path / "starts"
        if not folder.is_dir():
            return []
        return sorted(int(f.name) for f in folder.iterdir() if f.is_dir() and f.name.isdecimal())

    def _started(self, number: int) -> bool:
        return self.start_file(number).exists()

    def _rows(self) -> Iterator[Round]:
        if not self.rounds_file.exists():
            return
        for number, row in enumerate(read_json_lines(self.rounds_file), 1):
            yield _validated(f"{self.rounds_file}, row {number}", row, Round)

    def _refuse_earlier(self) -> None:
        file = self.study_file
        if (self.path / "trials").is_dir() or (file.is_file() and read_json(file).get("schema") == _EARLIER_SCHEMA):
            raise FileFormatError(
                f"{self.path} was written by an earlier chunktune ({_EARLIER_SCHEMA})",
                "Start a new study with --fresh, or name another one with --study NAME; nothing is deleted.",
            )


def read_study(directory: Path) -> StudyRecord:
    """A study's documents; FileFormatError where the folder is no study or a file is damaged."""
    store = Store(directory)
    if not directory.is_dir():
        raise UsageError(f"{directory} is no folder", "Give the folder of a study, results/<name of the study>.")
    if not store.study_file.exists():
        raise FileFormatError(f"{directory} holds no study: study.json is missing", _known_studies(directory))
    return StudyRecord(directory, store.study(), store.results(), store.summary())


def newest_study(out: Path) -> Path:
    """The study below `out` that was written to last; UsageError when there is none."""
    studies = [f.parent for f in out.glob("*/study.json")] if out.is_dir() else []
    if not studies:
        raise UsageError(f"no study below {out}/", "Run `chunktune sweep` first, or name a study's folder.")

    def written(folder: Path) -> float:
        store = Store(folder)
        files = (store.study_file, store.rounds_file, store.summary_file)
        return max(file.stat().st_mtime for file in files if file.exists())

    return max(studies, key=written)


def _known_studies(directory: Path) -> str:
    below = sorted(f.parent.name for f in directory.glob("*/study.json"))
    if below:
        return f"Studies below it: {', '.join(below[:10])}."
    return "Name the folder of a study; `chunktune sweep` makes one."


def _read(path: Path, model: type[DocumentT], schema: str) -> DocumentT:
    return _validated(str(path), read_json(path, schema=schema), model)


def _validated(where: str, value: Any, model: type[DocumentT]) -> DocumentT:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise FileFormatError(f"{where}: {field}: {first['msg']}", "The file was edited or damaged.") from None


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
