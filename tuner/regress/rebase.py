"""A new baseline on purpose; the old one stays in the file. Pure."""

from __future__ import annotations

from tuner.domain.frozen import Control, Frozen
from tuner.freeze.baseline import baseline_of_rounds
from tuner.regress.night import NightResult


def rebased(result: NightResult, at: str) -> Frozen:
    """The frozen document with tonight's rounds as its baseline, tonight's fingerprint, and the old pair kept.

    The stock control is tonight's as well. Where it did not run the new baseline has none: one of another day
    would take that day's difference for the machine's.
    """
    old = result.frozen
    control = None
    if old.control is not None and result.control_rounds:
        control = Control(engine_args=old.control.engine_args, baseline=baseline_of_rounds(result.control_rounds))
    kept = {
        "replaced_at": at,
        "created_at": old.created_at,
        "fingerprint": old.fingerprint.to_json(),
        "baseline": old.baseline.to_json(),
        "control": None if old.control is None else old.control.to_json(),
        "verdict": result.verdict,
    }
    return old.model_copy(
        update={
            "created_at": at,
            "fingerprint": result.fingerprint,
            "baseline": baseline_of_rounds(result.rounds),
            "control": control,
            "previous": [*old.previous, kept],
        }
    )
