"""The answer of a study in words: pure, and the same for the terminal and for the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from tuner.domain.setting import CHUNK_KNOB
from tuner.domain.measurement import metric
from tuner.domain.experiment import Improvement, StudyFile, Summary, TableRow, Trial
from tuner.domain.profile import Objective
from tuner.report.numbers import is_better, metric_title, metric_unit, metric_value, signed_percent

FAILED_STATES = ("engine_failed", "load_failed")
STATE_WORDS = {
    "completed": "completed",
    "infeasible": "cannot run",
    "engine_failed": "engine failed",
    "load_failed": "load failed",
    "interrupted": "interrupted",
    "pruned": "stopped early",
}
Kind = Literal["winner", "stock_will_do", "stock_best", "no_feasible", "nothing_measured", "unfinished"]
"""`stock_will_do`: what measured best of the others is not better than stock; it is marked and frozen all the same."""


SIMULATED = "SIMULATED: no engine and no GPU were measured; the numbers come from a model of them."
TTFT_COLUMNS = ("ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99")
"""What every table of configurations shows."""


@dataclass(frozen=True)
class Answer:
    """What to tell a colleague."""

    kind: Kind
    sentence: str
    """With the interval, ready to be quoted."""
    metric: str
    """Path of the objective that it is about."""
    winner: Trial | None = None
    baseline: Trial | None = None
    improvement: Improvement | None = None


@dataclass(frozen=True)
class Failure:
    """Trials that failed alike."""

    cause: str
    state: str
    message: str
    hint: str
    trials: tuple[int, ...]


def objective_of(study: StudyFile) -> Objective:
    """The profile's objective; TTFT P90 when the profile cannot be understood (another version's)."""
    try:
        return Objective.model_validate(study.profile.get("objective") or {"minimize": "ttft_ms.p90"})
    except ValidationError:
        return Objective(minimize=["ttft_ms.p90"])


def objectives_beside(study: StudyFile, columns: Collection[str]) -> list[str]:
    """What the study optimizes that a table with these columns (metric paths) would not show."""
    return [path for path in objective_of(study).metrics if path not in columns]


def trial_label(trial: Trial) -> str:
    """What people call it; made from its knobs when it has no label."""
    if trial.label:
        return trial.label
    if trial.role == "baseline":
        return "stock"
    knobs = dict(trial.knobs)
    chunk = knobs.pop(CHUNK_KNOB, None)
    parts = [f"chunk {chunk}"] if chunk is not None else []
    parts += [f"{name}={value}" for name, value in sorted(knobs.items())]
    return ", ".join(parts) or f"trial {trial.number}"


def by_number(trials: Sequence[Trial], number: int | None) -> Trial | None:
    """The trial of that number; None when there is none."""
    return next((t for t in trials if t.number == number), None)


def answer(study: StudyFile, summary: Summary, trials: Sequence[Trial]) -> Answer:
    """The study's answer in one sentence, whatever the study came to."""
    path = objective_of(study).metrics[0]
    winner, baseline = by_number(trials, summary.best), by_number(trials, summary.baseline)
    if winner is None:
        return _no_winner(path, summary, trials, baseline)
    improvement = summary.improvement.get(path)
    value = improvement.best if improvement else None if winner.median is None else metric(winner.median, path)
    name = trial_label(winner)
    what = f"{metric_title(path)} of {metric_value(path, value)}"
    if summary.baseline in (winner.number, winner.final_of):
        return Answer(
            "stock_best",
            f"Keep the stock configuration: no candidate beats its {what}.",
            path,
            winner,
            baseline,
            improvement,
        )
    if improvement is None:
        return Answer(
            "winner", f"Take {name}: {what}; there is no baseline to compare it with.", path, winner, baseline
        )
    broken = broken_by_stock(summary, trials)
    clause = compared(path, improvement)
    told = f"Take {name}: {what}, {clause}."
    if broken:
        base = metric_value(path, improvement.baseline)
        told = f"Take {name}: {what}. The stock configuration, at {base}, breaks {' and '.join(broken)}."
    elif not is_better(path, improvement.change):
        told = f"Keep the stock configuration: the best of the others, {name}, has a {what}, {clause}."
        return Answer("stock_will_do", told, path, winner, baseline, improvement)
    elif _in_noise(improvement):
        told = f"{name[:1].upper()}{name[1:]} measured best, but its {what} is {clause}."
    return Answer("winner", told, path, winner, baseline, improvement)


def broken_by_stock(summary: Summary, trials: Sequence[Trial]) -> list[str]:
    """The limits that the baseline broke on any of its starts, each with a value that it had."""
    found = {v.partition(":")[0]: v for t in trials if is_baseline(t, summary) for v in t.violations}
    return [limit_text(violation) for violation in found.values()]


def limit_text(violation: str) -> str:
    """A trial's "itl_ms.p99 <= 250: 605.246" as people read it: "itl_ms.p99 <= 250 (605 ms)"."""
    limit, _, found = violation.partition(": ")
    try:
        path, _, bound = limit.split()
        rounded = metric_value(path, float(found))
        # Rounded to its limit it would look as if it held.
        same = rounded == metric_value(path, float(bound))
    except ValueError:
        return f"{limit} ({found})" if found else limit
    return f"{limit} ({f'{found} {metric_unit(path)}'.rstrip('% ') if same else rounded})"


def beats_stock(study: StudyFile, summary: Summary, trials: Sequence[Trial]) -> bool:
    """Whether the winner is better than stock beyond the noise, or stock breaks a limit, or is not there to compare."""
    said = answer(study, summary, trials)
    if said.improvement is None or broken_by_stock(summary, trials):
        return said.kind == "winner"
    return said.kind == "winner" and not _in_noise(said.improvement)


def _in_noise(improvement: Improvement) -> bool:
    return improvement.ci95 is not None and improvement.ci95[0] <= 0 <= improvement.ci95[1]


def compared(path: str, improvement: Improvement) -> str:
    """The comparison with the baseline as a clause, with its interval and honest about noise."""
    base = metric_value(path, improvement.baseline)
    low, high = improvement.ci95 or (improvement.change, improvement.change)
    interval = (
        f"95 % interval {signed_percent(low)} to {signed_percent(high)}"
        if improvement.ci95
        else "no interval: too few rounds"
    )
    if _in_noise(improvement):
        return (
            f"not distinguishable from the stock configuration's {base} "
            f"(measured {signed_percent(improvement.change)}, {interval})"
        )
    direction = "lower" if improvement.change < 0 else "higher"
    verdict = "" if is_better(path, improvement.change) else ", which is worse"
    size = signed_percent(abs(improvement.change)).lstrip("+±")
    return f"{size} {direction} than the stock configuration's {base}{verdict} ({interval})"


def _no_winner(path: str, summary: Summary, trials: Sequence[Trial], baseline: Trial | None) -> Answer:
    measured = [t for t in trials if t.median is not None and t.state == "completed"]
    if not trials:
        return Answer("unfinished", "Nothing is measured yet: the study has no finished trial.", path)
    failed = [t for t in trials if t.state != "interrupted"]
    if not failed:
        return Answer("unfinished", "Nothing is measured yet: the study was interrupted in its first trial.", path)
    if not measured:
        causes = Counter(t.cause or t.state for t in failed)
        worst, _ = causes.most_common(1)[0]
        told = f"No answer: none of {_count(len(failed), 'trial')} could be measured, most often because of {worst}."
        return Answer("nothing_measured", told, path, None, baseline)
    if all(t.median is not None and metric(t.median, path) is None for t in measured):
        why = next((r for name, r, _ in unmeasured(measured) if name == path.partition(".")[0]), "")
        told = f"No answer: {path}, which is optimized, could be measured in none of {_count(len(measured), 'trial')}"
        return Answer("nothing_measured", f"{told}{f': {why}' if why else ''}.", path, None, baseline)
    searched = [t for t in measured if t.role in ("candidate", "final")]
    if searched and all(t.violations for t in searched):
        broken = Counter(v.partition(":")[0] for t in searched for v in t.violations)
        often = f"; most often broken: {broken.most_common(1)[0][0]}" if broken else ""
        told = f"No answer: {_count(len(searched), 'candidate')} measured, none of them meets the constraints{often}."
        return Answer("no_feasible", told, path, None, baseline)
    return Answer(
        "unfinished",
        f"No winner yet: {_count(len(measured), 'trial')} measured, the study has not come to its end.",
        path,
        None,
        baseline,
    )


def failures(trials: Sequence[Trial]) -> list[Failure]:
    """Failed and interrupted trials by cause, the most frequent first."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if trial.state in (*FAILED_STATES, "interrupted") or (trial.state == "infeasible" and trial.cause):
            groups.setdefault((trial.cause or trial.state, trial.state), []).append(trial)
    found = [
        Failure(
            cause=cause,
            state=state,
            message=next((t.message for t in group if t.message), "") or "",
            hint=next((t.hint for t in group if t.hint), "") or "",
            trials=tuple(t.number for t in group),
        )
        for (cause, state), group in groups.items()
    ]
    return sorted(found, key=lambda f: (-len(f.trials), f.cause))


def unmeasured(trials: Sequence[Trial]) -> list[tuple[str, str, int]]:
    """What was not measured: (metric or `round`, reason, number of trials), the most frequent first.

    Reasons that differ only in their numbers count as one, told by the first.
    """
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for trial in trials:
        found: dict[str, str] = dict(trial.median.unmeasured) if trial.median is not None else {}
        if trial.median is not None and trial.median.memory.source == "unavailable":
            found.setdefault("memory", trial.median.memory.reason or "no source of memory figures")
        reasons = {*found.items(), *(("round", r.void) for r in trial.rounds if r.void)}
        kinds = {(name, re.sub(r"\d+", "#", reason)): reason for name, reason in sorted(reasons)}
        for kind, reason in kinds.items():
            examples.setdefault(kind, reason)
        counts.update(kinds.keys())
    return [(kind[0], examples[kind], n) for kind, n in counts.most_common()]


_OF_ONE_RUN = ("--host", "--port", "--served-model-name", "--uds")
_FOR_MEASURING = {"--enable-prompt-tokens-details": "enable_prompt_tokens_details"}


def copyable_command(trial: Trial) -> list[str]:
    """The trial's command for vLLM, without what belonged to that run alone (address, name, measuring aids)."""
    kept: list[str] = []
    command = trial.command
    if trial.simulated and "serve" in command:
        command = ["vllm", *command[command.index("serve") :]]
    words = iter(command)
    for word in words:
        name, equals, _ = word.partition("=")
        if _FOR_MEASURING.get(name, name) not in trial.engine_args and name in _FOR_MEASURING:
            continue
        if name not in _OF_ONE_RUN:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def row_name(row: TableRow, trial: Trial | None, summary: Summary) -> str:
    """The chunk size; the baseline and references by their names, with the chunk that the engine chose."""
    size = "" if row.max_num_batched_tokens is None else str(row.max_num_batched_tokens)
    plain = trial is None or (trial.role not in ("baseline", "reference") and not is_baseline(trial, summary))
    if size and plain:
        budget = None if trial is None else trial.reuse_budget
        return size if budget is None or budget.off else f"{size} +plug-in"
    name = row.label or "stock"
    return f"{name} ({size})" if size else name


def row_note(trial: Trial | None, summary: Summary, *, best: bool) -> str:
    """What a table says of a row: its part in the study, and the first limit that it breaks."""
    if best:
        return "winner"
    if trial is None:
        return ""
    notes = []
    if is_baseline(trial, summary):
        notes.append("baseline")
    if trial.violations:
        notes.append(f"outside {trial.violations[0].partition(':')[0]}")
    elif trial.state != "completed":
        notes.append(trial.cause or STATE_WORDS[trial.state])
    elif trial.role == "reference":
        notes.append("reference")
    return ", ".join(notes)


def is_baseline(trial: Trial | None, summary: Summary) -> bool:
    """The baseline's trial, or its final."""
    return trial is not None and summary.baseline is not None and summary.baseline in (trial.number, trial.final_of)


def advice_beside_failures(summary: Summary, found: Sequence[Failure]) -> list[str]:
    """The advice less the lines that only count failures, which are listed on their own."""
    return [a for a in summary.advice if not any(f" x {f.cause}: " in a for f in found)]


def sentence(text: str) -> str:
    """The text with a full stop where it ends without one."""
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
