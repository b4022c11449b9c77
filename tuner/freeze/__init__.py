"""The frozen document: made from a measured setting, read from a file, exported, compared with a run's surroundings."""

from tuner.freeze.document import Evidence, evidence_of, freeze_setting, frozen_args, load_frozen, save_frozen
from tuner.freeze.export import to_args, to_json, to_yaml
from tuner.freeze.fingerprint import Difference, differences
from tuner.freeze.measured import measured_of, rounds_by_start

__all__ = [
    "Difference",
    "Evidence",
    "differences",
    "evidence_of",
    "freeze_setting",
    "frozen_args",
    "load_frozen",
    "measured_of",
    "rounds_by_start",
    "save_frozen",
    "to_args",
    "to_json",
    "to_yaml",
]
