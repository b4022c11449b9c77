"""`chunktune report`: a study as one HTML file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.studies import StudiesOption, StudyArgument, check_output, find_study
from tuner.errors import ChunktuneError, UsageError

if TYPE_CHECKING:
    from tuner.domain.experiment import Round, SettingId, StudySummary
    from tuner.domain.observation import MemoryTimeline
    from tuner.experiment.store import StudyRecord
    from tuner.report.data import ReportData


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
    from tuner.experiment.store import read_study
    from tuner.files import refuse_foreign, write_whole
    from tuner.report.html import render

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
    timelines, ttfts_ms = _rounds(record, missing)
    try:
        importances, reason = knob_importances(record.directory), ""
    except ChunktuneError as error:
        importances, reason = {}, error.message
    return ReportData(
        study=record.study,
        summary=record.summary or _summary_so_far(record),
        results=record.results,
        timelines=timelines,
        ttfts_ms=ttfts_ms,
        importances=importances or None,
        importances_reason=reason,
        command=_frozen_command(record),
        missing=missing,
    )


def _frozen_command(record: StudyRecord) -> list[str]:
    """What `freeze --format args` writes of the frozen setting."""
    from tuner.experiment.store import Store
    from tuner.freeze import load_frozen, to_args

    path = Store(record.directory).frozen_file
    try:
        return shlex.split(to_args(load_frozen(path))) if path.exists() else []
    except ChunktuneError:
        return []


def _rounds(
    record: StudyRecord, missing: list[str]
) -> tuple[dict[int, dict[int, MemoryTimeline]], dict[SettingId, list[float]]]:
    """Samples and TTFTs of the kept rounds of the finals, or of the search where no final start completed."""
    from tuner.experiment.store import Store

    store, results = Store(record.directory), record.results
    shown: list[Round] = results.kept(starts=results.numbers("final") or None)
    timelines: dict[int, dict[int, MemoryTimeline]] = {}
    ttfts_ms: dict[SettingId, list[float]] = {}
    for row in shown:
        try:
            timeline = store.read_telemetry(row.start, row.round)
            requests = store.read_requests(row.start, row.round)
        except ChunktuneError as error:
            missing.append(f"Start {row.start}, round {row.round}: {error.message}")
            continue
        timelines.setdefault(row.start, {})[row.round] = timeline
        found = (r.ttft_ms for r in requests if r.phase == "measured")
        ttfts_ms.setdefault(row.setting, []).extend(t for t in found if t is not None)
    return timelines, ttfts_ms


def _summary_so_far(record: StudyRecord) -> StudySummary:
    """What can be said of a study that has not come to its end: no winner, but the settings."""
    from tuner.domain.profile import Profile
    from tuner.domain.units import counted
    from tuner.study.settings import problem_of
    from tuner.study.summary import build_summary
    from tuner.study.verdict import Decision

    results, settings = record.results, dict(record.results.settings())
    profile = Profile.model_validate(record.study.profile)
    done = f"{counted(len(results.kept()), 'round')} of {counted(len(settings), 'setting')}"
    sentence = f"No verdict yet: the study has not ended, {done} measured so far"
    live = any(start.live for start in results.starts)
    problem = problem_of(profile, default_chunk=None, live=live)
    decision = Decision("none", None, None, sentence)
    return build_summary(record.study, profile, problem, results, decision, states={}, settings=settings)
