"""Which knobs mattered, read from a study's journal without touching it."""

from __future__ import annotations

import warnings
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend

from tuner.errors import UsageError
from tuner.study.search import importances


def knob_importances(study_dir: Path) -> dict[str, float]:
    """Share of each knob in the objective's variance; empty when too few trials say anything.

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
