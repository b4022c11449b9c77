"""`chunktune report`: a study as one HTML file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.studies import StudiesOption, StudyArgument, check_output, find_study
from tuner.errors import ChunktuneError, UsageError

if TYPE_CHECKING:
    from tuner.domain.observation import MemoryTimeline
    from tuner.domain.experiment import Summary, Trial
    from tuner.report.data import ReportData
    from tuner.experiment.store import StudyRecord


def report(
    study_dir: StudyArgument = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write. Default: report.html in the study's folder.",
            show_default=False,
        ),
    ] = None,
    out: StudiesOption = Path("results"),
) -> int:
    """Write one self-contained HTML file about a study; it opens offline and prints."""
    from tuner.files import refuse_foreign, write_whole
    from tuner.report.html import render
    from tuner.experiment.store import read_study

    directory = find_study(study_dir, out)
    record = read_study(directory)
    path = output or directory / "report.html"
    check_output(path, "report.html")
    page = render(collect(record))
    try:
        refuse_foreign(path, b"chunktune report")
        write_whole(path, page.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "Name another file.") from None
    typer.echo(str(path))
    return 0


def collect(record: StudyRecord) -> ReportData:
    """Everything that a report shows, read from the study's folder; what cannot be read is said, not fatal."""
    from tuner.report.data import ReportData
    from tuner.study.importance import knob_importances

    missing: list[str] = []
    timelines: dict[int, list[tuple[int, MemoryTimeline]]] = {}
    ttfts: dict[int, list[float]] = {}
    for trial in record.trials:
        _read_rounds(record, trial, timelines, ttfts, missing)
    merged = _merged_finals(record, missing)
    for trial in merged:
        starts = [t for t in record.trials if t.final_of == trial.final_of and t.knobs == trial.knobs]
        same = [t for t in starts if t.reuse_budget == trial.reuse_budget]
        ttfts[trial.number] = [ttft for t in same for ttft in ttfts.get(t.number, [])]
    try:
        importances, reason = knob_importances(record.directory), ""
    except ChunktuneError as error:
        importances, reason = {}, error.message
    return ReportData(
        study=record.study,
        summary=record.summary or _summary_so_far(record, merged),
        trials=record.trials,
        timelines=timelines,
        ttfts_ms=ttfts,
        importances=importances or None,
        importances_reason=reason,
        merged=merged,
        command=_frozen_command(record),
        missing=missing,
    )


def _frozen_command(record: StudyRecord) -> list[str]:
    """What `freeze --format args` writes of the winner."""
    from tuner.freeze import load_frozen, to_args

    path = record.directory / "frozen.json"
    try:
        return shlex.split(to_args(load_frozen(path))) if path.exists() else []
    except ChunktuneError:
        return []


def _read_rounds(
    record: StudyRecord,
    trial: Trial,
    timelines: dict[int, list[tuple[int, MemoryTimeline]]],
    ttfts: dict[int, list[float]],
    missing: list[str],
) -> None:
    from tuner.experiment.store import read_requests, read_telemetry

    for number, measurement in enumerate(trial.rounds, 1):
        if measurement.void is not None:
            continue
        try:
            timeline = read_telemetry(record.directory, trial.number, number)
            requests = read_requests(record.directory, trial.number, number)
        except ChunktuneError as error:
            missing.append(f"Trial {trial.number}, round {number}: {error.message}")
            continue
        timelines.setdefault(trial.number, []).append((number, timeline))
        found = (r.ttft_ms for r in requests if r.phase == "measured")
        ttfts.setdefault(trial.number, []).extend(t for t in found if t is not None)


def _merged_finals(record: StudyRecord, missing: list[str]) -> list[Trial]:
    """The finals, each configuration over all its starts; none of them where a round cannot be read."""
    from tuner.domain.profile import Profile
    from tuner.study.finals import merged
    from tuner.experiment.store import StudyDirectory

    finals = [t for t in record.trials if t.role == "final"]
    try:
        return merged(StudyDirectory(record.directory), finals, Profile.model_validate(record.study.profile))
    except (ChunktuneError, ValueError) as error:
        missing.append(f"The starts of the finals could not be put together: {error}")
        return []


def _summary_so_far(record: StudyRecord, merged: list[Trial]) -> Summary:
    """What can be said of a study that has not come to its end: no winner, but the table."""
    from tuner.domain.profile import Profile
    from tuner.study.summary import build_summary
    from tuner.experiment.store import StudyDirectory

    return build_summary(
        StudyDirectory(record.directory),
        record.study,
        Profile.model_validate(record.study.profile),
        record.trials,
        merged=merged,
        best=None,
        elapsed_s=sum(t.time.total_s for t in record.trials),
    )
