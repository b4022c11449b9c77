"""`chunktune freeze`."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.studies import StudiesOption, StudyArgument, check_output, find_study

if TYPE_CHECKING:
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
        int | None, typer.Option("--trial", help="Freeze this trial in place of the winner.", show_default=False)
    ] = None,
    allow_simulated: Annotated[
        bool, typer.Option("--allow-simulated", help="Freeze a result of the simulated engine too.")
    ] = False,
    out: StudiesOption = Path("results"),
    json_: Annotated[bool, typer.Option("--json", help="Print the frozen document on stdout, whatever else.")] = False,
) -> int:
    """Write the winner of a study as a frozen configuration: JSON, YAML for vLLM, or a command line."""
    from tuner.freeze import to_args, to_json, to_yaml
    from tuner.experiment.store import read_study

    record = read_study(find_study(study_dir, out))
    if study_dir is None:
        _say(f"study: {record.directory}")
    frozen = frozen_of(record, trial)
    if trial is None and record.summary is not None:
        from tuner.report.answer import answer, beats_stock

        if not beats_stock(record.study, record.summary, record.trials):
            _say(f"note: {answer(record.study, record.summary, record.trials).sentence}")
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


def frozen_of(record: StudyRecord, number: int | None) -> Frozen:
    """The study's winner, or trial `number`, frozen. NoVerdict when there is no winner."""
    from pydantic import ValidationError

    from tuner.domain.profile import Profile
    from tuner.errors import FileFormatError, NoVerdict, UsageError
    from tuner.freeze import control_of, freeze_trial, load_frozen, repeats_of
    from tuner.report.answer import answer

    if number is None:
        if record.summary is None:
            raise UsageError(
                f"{record.directory} is not finished: it has no winner yet",
                "Run the same `chunktune sweep` again to continue it, or name a trial with --trial.",
            )
        number = record.summary.best
        if number is None:
            said = answer(record.study, record.summary, record.trials)
            raise NoVerdict(
                f"study {record.study.study} has no winner: {said.sentence.removeprefix('No answer: ')}",
                "--trial freezes a trial of your choice; `chunktune sweep` continues a study that is not at its end.",
            )
        written = record.directory / "frozen.json"
        if written.exists():
            # The sweep judged the winner over all its starts; a single one of them may look different.
            return load_frozen(written)
    chosen = next((t for t in record.trials if t.number == number), None)
    if chosen is None:
        known = ", ".join(str(t.number) for t in record.trials) or "none"
        raise UsageError(f"study {record.study.study} has no trial {number}", f"Trials there: {known}.")
    try:
        profile = Profile.model_validate(record.study.profile)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(f"{record.directory}/study.json: profile.{where}: {first['msg']}") from None
    return freeze_trial(
        chosen,
        repeats_of(chosen, record.trials),
        record.study,
        profile,
        control=control_of(record.trials),
        counts=record.summary.counts if record.summary else None,
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
