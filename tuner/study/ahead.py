"""How far a study is: which outcomes stand, and how many trials are still to come. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.domain.experiment import Role, Trial
from tuner.domain.profile import Profile
from tuner.study import finals
from tuner.study.references import reference_candidates

AGAIN = ("interrupted", "engine_failed")
"""States that say nothing about the configuration: it is measured again."""


def standing(trials: Sequence[Trial], role: Role | None = None) -> list[Trial]:
    """The trials (of one role) whose outcome stands."""
    return [t for t in trials if t.state not in AGAIN and role in (None, t.role)]


def trials_ahead(trials: Sequence[Trial], profile: Profile, candidates_left: int) -> int:
    """How many trials the study still makes: exact once the candidates are through, before that the most likely."""
    baseline = next(iter(standing(trials, "baseline")), None)
    measured = {t.label for t in standing(trials, "reference")}
    references = sum(label not in measured for label, _ in reference_candidates(profile))
    last = finals.starts_ahead(
        baseline, [t for t in trials if t.role == "candidate"], standing(trials, "final"), profile, candidates_left
    )
    return (baseline is None) + references + candidates_left + last
