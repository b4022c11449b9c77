"""Levels and contrasts of the settings of a study. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.domain.experiment import Results, SettingLine
from tuner.study.problem import Problem


def setting_lines(problem: Problem, results: Results, starts: Sequence[int] | None = None) -> list[SettingLine]:
    """One line for each setting with a kept round in these starts (all when None); `state` is always `measured`."""
    raise NotImplementedError
