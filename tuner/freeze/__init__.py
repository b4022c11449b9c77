"""The frozen document: made from a trial, read from a file, exported, compared with tonight's surroundings."""

from tuner.freeze.document import control_of, freeze_trial, load_frozen, repeats_of, save_frozen
from tuner.freeze.export import to_args, to_json, to_yaml
from tuner.freeze.fingerprint import Difference, differences

__all__ = [
    "Difference",
    "control_of",
    "differences",
    "freeze_trial",
    "load_frozen",
    "repeats_of",
    "save_frozen",
    "to_args",
    "to_json",
    "to_yaml",
]
