"""Which setting is frozen and why: one decision, from which the frozen file, the table and the sentence are made. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.domain.experiment import Contrast, Results, SettingId, Verdict
from tuner.domain.setting import Setting
from tuner.study.problem import Problem, Registry


@dataclass(frozen=True)
class Decision:
    """What a study amounts to."""

    verdict: Verdict
    winner: SettingId | None
    """The setting to freeze: stock's id for the verdict `stock`; None for `none`."""
    setting: Setting | None
    sentence: str
    """The verdict in plain English, with its figures."""
    contrast: Contrast | None = None
    """The winner against stock in the first objective; None for stock itself, or where stock has no level."""
    p_feasible: float | None = None
    """Probability that the winner meets every constraint."""
    literal: str = ""
    """What the start with the frozen command said; empty when there was none."""
    literal_agrees: bool | None = None
    """Whether its level lies in the prediction interval of the finals; None when there was no such start."""


def decide(problem: Problem, results: Results, registry: Registry) -> Decision:
    """The verdict on what was measured so far."""
    raise NotImplementedError
