"""`chunktune freeze`."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tuner.cli.studies import StudiesOption, StudyArgument, check_output, find_study

if TYPE_CHECKING:
    from tuner.domain.experiment import SettingId
    from tuner.domain.frozen import Frozen
    from tuner.experiment.store import StudyRecord


class Format(enum.StrEnum):
    """What `freeze` can write."""

    json = "json"
    yaml = "yaml"
    args = "args"


def freeze(
    study_dir: StudyArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write. Default: stdout.", show_default=False),
    ] = None,
    format_: Annotated[
        Format,
        typer.Option(
            "--format", help="json: the document; yaml: for `vllm serve --config`; args: a shell-quoted command line."
        ),
    ] = Format.json,
    trial: Annotated[
        str | None,
        typer.Option(
            "--trial",
            metavar="ID",
            help="Freeze this setting in place of the winner: its number, or `stock`.",
            show_default=False,
        ),
    ] = None,
    allow_simulated: Annotated[
        bool, typer.Option("--allow-simulated", help="Freeze a result of the simulated engine too.")
    ] = False,
    out: StudiesOption = Path("results"),
    json_: Annotated[bool, typer.Option("--json", help="Print the frozen document on stdout, whatever else.")] = False,
) -> int:
    """Write the winner of a study as a frozen configuration: JSON, YAML for vLLM, or a command line."""
    from tuner.experiment.store import read_study
    from tuner.freeze import to_args, to_json, to_yaml

    record = read_study(find_study(study_dir, out))
    if study_dir is None:
        _say(f"study: {record.directory}")
    frozen = winner_of(record) if trial is None else chosen_of(record, trial)
    if trial is None and frozen.verdict == "stock" and record.summary is not None:
        _say(f"note: {record.summary.sentence}")
    if frozen.simulated:
        refuse_simulated(frozen, f"study {record.study.study}", allow_simulated)
    text = {Format.json: to_json, Format.yaml: to_yaml, Format.args: to_args}[format_](frozen)
    if output is not None:
        write_export(output, text)
    if json_:
        sys.stdout.write(to_json(frozen))
    elif output is None:
        sys.stdout.write(text)
    return 0


def winner_of(record: StudyRecord) -> Frozen:
    """What the study's verdict froze. UsageError when it has none yet, NoVerdict when nothing meets the constraints."""
    from tuner.domain.experiment import STOCK_ID
    from tuner.errors import NoVerdict, UsageError
    from tuner.experiment.store import Store
    from tuner.freeze import load_frozen

    summary, name = record.summary, record.study.study
    if summary is None:
        raise UsageError(
            f"{record.directory} is not finished: it has no winner yet",
            "Run the same `chunktune sweep` again to continue it, or name a setting with --trial.",
        )
    if summary.verdict == "none":
        raise NoVerdict(
            f"study {name} has no winner: {summary.sentence}",
            "--trial freezes a setting of your choice; `chunktune sweep` continues a study that is not at its end.",
        )
    written = Store(record.directory).frozen_file
    if written.exists():
        return load_frozen(written)
    winner = STOCK_ID if summary.verdict == "stock" or summary.winner is None else summary.winner
    return _frozen(record, winner, summary.verdict)


def chosen_of(record: StudyRecord, named: str) -> Frozen:
    """The setting that somebody named. UsageError when there is none, or it breaks a constraint of the profile."""
    from tuner.domain.experiment import STOCK_ID
    from tuner.errors import UsageError

    known = dict(record.results.settings())
    setting_id = int(named) if named.isdecimal() else named
    if setting_id not in known:
        listed = ", ".join(map(str, known)) or "none"
        raise UsageError(f"study {record.study.study} has no setting {named}", f"Settings there: {listed}.")
    summary = record.summary
    if summary is not None and summary.verdict != "none" and setting_id == (summary.winner or STOCK_ID):
        return winner_of(record)
    frozen = _frozen(record, setting_id, "chosen")
    broken = [c for c in frozen.constraints if c.holds(frozen.measured.median) is False]
    if broken:
        raise UsageError(
            f"setting {named} breaks a constraint of the profile: {', '.join(map(str, broken))}",
            "Freeze another setting, or sweep again with constraints that can be met.",
        )
    return frozen


def _frozen(record: StudyRecord, setting_id: SettingId, verdict: Literal["better", "stock", "chosen"]) -> Frozen:
    from pydantic import ValidationError

    from tuner.clock import SYSTEM_CLOCK
    from tuner.domain.profile import Profile
    from tuner.errors import FileFormatError
    from tuner.freeze import evidence_of, freeze_setting

    try:
        profile = Profile.model_validate(record.study.profile)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(f"{record.directory}/study.json: profile.{where}: {first['msg']}") from None
    evidence = evidence_of(record.results, setting_id)
    if evidence.starts and not evidence.from_finals:
        _say(f"note: setting {setting_id} was in no final start; its numbers are those of the search")
    return freeze_setting(
        verdict=verdict,
        setting_id=setting_id,
        setting=dict(record.results.settings())[setting_id],
        starts=evidence.starts,
        stock=evidence.stock,
        literal=evidence.literal,
        study=record.study,
        profile=profile,
        sampler=str(record.study.design.get("sampler", "")),
        counts=record.summary.counts if record.summary else {},
        now=SYSTEM_CLOCK.now(),
    )


def refuse_simulated(frozen: Frozen, what: str, allowed: bool) -> None:
    """UsageError unless a simulated result is allowed; then a warning."""
    from tuner.errors import UsageError

    if not allowed:
        raise UsageError(
            f"{what} is SIMULATED: its numbers were never measured on a GPU",
            "Sweep with --engine vllm on a GPU node, or add --allow-simulated if that is what you want.",
        )
    _say(f"warning: {what} is SIMULATED")


def write_export(path: Path, text: str) -> None:
    """The text in a file. UsageError where something stands there that is none of our exports."""
    from tuner.errors import UsageError
    from tuner.files import write_whole

    verb = "wrote"
    check_output(path, "frozen.json")
    if path.is_file():
        if not _is_ours(path):
            raise UsageError(f"{path} exists and was not written by chunktune", "Remove it, or name another file.")
        verb = "replaced"
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "Name another file.") from None
    _say(f"{verb} {path}")


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    # A command line carries no name of ours; it is one line that serves with options.
    is_command = head.count(b"\n") == 1 and b" serve " in head and b" --" in head
    return not head.strip() or b"chunktune.frozen/" in head or b"Frozen by chunktune" in head or is_command


def _say(text: str) -> None:
    sys.stderr.write(f"chunktune: {text}\n")
