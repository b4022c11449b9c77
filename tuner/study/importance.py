"""Which knobs mattered, read from a study's journal without touching it."""

from __future__ import annotations

import warnings
from pathlib import Path
from statistics import median

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import TrialState

from tuner.errors import UsageError

_ENOUGH = 4
"""Fewer settings say nothing about shares of a variance."""


def knob_importances(study_dir: Path) -> dict[str, float]:
    """Share of each knob in the objective's variance; empty when too few settings were measured.

    UsageError where the study kept no journal of its own (`--storage`) or it cannot be read.
    """
    journal = study_dir / "journal.log"
    if not journal.exists():
        raise UsageError("the study keeps no journal.log in its folder")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (optuna.exceptions.ExperimentalWarning, UserWarning))
        try:
            storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
            names = optuna.get_all_study_names(storage)
            return importances(optuna.load_study(study_name=names[0], storage=storage)) if names else {}
        except Exception as error:
            raise UsageError(f"{journal} cannot be read: {error}") from None


def importances(study: optuna.Study) -> dict[str, float]:
    """Share of each knob in the variance of the first objective; empty when too little is known.

    An eliminated setting counts with what it measured until then; references are left out.
    """
    copied = optuna.create_study(direction=study.directions[0])
    for trial in study.get_trials(deepcopy=False):
        value = _first_objective(trial)
        if value is not None and trial.params and "reference" not in trial.user_attrs:
            copied.add_trial(
                optuna.trial.create_trial(value=value, params=trial.params, distributions=trial.distributions)
            )
    if len(copied.trials) < _ENOUGH:
        return {}
    # The evaluator ranks towards low targets.
    sign = -1.0 if copied.direction == StudyDirection.MAXIMIZE else 1.0
    try:
        return dict(optuna.importance.get_param_importances(copied, target=lambda t: sign * t.values[0]))
    except (ValueError, RuntimeError):
        return {}


def _first_objective(trial: optuna.trial.FrozenTrial) -> float | None:
    if trial.state == TrialState.COMPLETE:
        return float(trial.values[0])
    values = list(trial.intermediate_values.values()) if trial.state == TrialState.PRUNED else []
    return median(values) if values else None
