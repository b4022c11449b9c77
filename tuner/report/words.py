"""Words and look-ups that the terminal and the page share. Pure."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ValidationError

from tuner.domain.experiment import STOCK_ID, SettingId, SettingLine, StudyFile, StudySummary, TableRow
from tuner.domain.profile import Constraint, Objective
from tuner.domain.setting import CHUNK_KNOB

SIMULATED = "SIMULATED: no engine and no GPU were measured; the numbers come from a model of them."
FAILED_STATES = ("engine_failed", "load_failed")
STATE_WORDS = {
    "completed": "completed",
    "infeasible": "cannot run",
    "engine_failed": "engine failed",
    "load_failed": "load failed",
    "interrupted": "interrupted",
    "measured": "measured",
    "eliminated": "eliminated",
    "failed": "failed",
}
"""Of starts and of settings."""
TTFT_COLUMNS = ("ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99")
"""What every table of settings shows."""


def objective_of(study: StudyFile) -> Objective:
    """The profile's objective; TTFT P90 when the profile cannot be understood (another version's)."""
    try:
        return Objective.model_validate(study.profile.get("objective") or {"minimize": "ttft_ms.p90"})
    except ValidationError:
        return Objective(minimize=["ttft_ms.p90"])


def objectives_beside(study: StudyFile, columns: Collection[str]) -> list[str]:
    """What the study optimizes that a table with these columns (metric paths) would not show."""
    return [path for path in objective_of(study).metrics if path not in columns]


def constraints_of(study: StudyFile) -> list[Constraint]:
    """The profile's constraints, as far as they can be understood."""
    found = []
    for text in study.profile.get("constraints") or []:
        try:
            found.append(Constraint.parse(str(text)))
        except ValueError:
            continue
    return found


def line_of(summary: StudySummary, setting: SettingId | None) -> SettingLine | None:
    """A setting as the finals measured it, else as the search did; None when there is no such setting."""
    lines = [line for line in (*summary.finals, *summary.settings) if line.id == setting]
    return next((line for line in lines if line.median is not None), lines[0] if lines else None)


def row_name(row: TableRow) -> str:
    """The chunk size, with a plus where other knobs are set too; stock and references by their names."""
    size = "" if row.max_num_batched_tokens is None else str(row.max_num_batched_tokens)
    if size and row.setting != STOCK_ID and row.label.startswith(("chunk ", f"{CHUNK_KNOB} ")):
        return f"{size}+" if "," in row.label else size
    name = row.label or str(row.setting)
    return f"{name} ({size})" if size else name


def row_note(row: TableRow) -> str:
    """What a table says of a row: its part in the study, the knobs beside its chunk, the first limit that it breaks."""
    notes = ["winner"] if row.winner else []
    notes += [STOCK_ID] if row.setting == STOCK_ID else []
    notes += [row.label.partition(", ")[2]] if row_name(row).endswith("+") else []
    notes += [f"breaks {row.violates[0]}"] if row.violates else []
    return ", ".join(notes)


def sentence(text: str) -> str:
    """The text with a full stop where it ends without one."""
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."
