"""Which candidate next: a small space is enumerated, a large one is sampled without repeats."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from tuner.domain.setting import Setting, Scalar
from tuner.domain.measurement import metric
from tuner.domain.experiment import Trial
from tuner.domain.profile import Profile
from tuner.space.search_space import Choices, Knob, SearchSpace

ENUMERATE_UP_TO = 64
"""A finite space of at most this many candidates is measured whole when no number of trials is given."""

DEFAULT_TRIALS = 24
_ASKS_FOR_A_NEW_ONE = 32


@dataclass(frozen=True)
class Suggestion:
    """A candidate, and the Optuna trial that it answers."""

    candidate: Setting
    trial: optuna.Trial


class Search:
    """Ask and tell. Optuna knows the candidates only: baseline, references and finals are not its trials."""

    def __init__(self, study: optuna.Study, space: SearchSpace, profile: Profile, seen: list[Setting]) -> None:
        self._study = study
        self._space = space
        self._profile = profile
        self._distributions = {knob.name: _distribution(knob) for knob in space.knobs}
        self._seen = {_key(candidate) for candidate in seen}
        self.total = planned_candidates(space, profile)
        self._grid = iter(_distinct(space)) if space.size is not None and self.total >= _count(space) else None
        self._used_up = False

    @property
    def sampler(self) -> str:
        """How candidates are chosen, for the records."""
        return "grid" if self._grid is not None else type(self._study.sampler).__name__

    @property
    def done(self) -> int:
        """Distinct candidates asked so far, earlier runs included."""
        return len(self._seen)

    @property
    def left(self) -> int:
        """How many candidates are still to come, as far as it is known."""
        return 0 if self._used_up else max(self.total - self.done, 0)

    def next(self) -> Suggestion | None:
        """A candidate that was not tried yet, or None when the space or the budget is used up."""
        found = self._untried() if self.left else None
        self._used_up = found is None
        return found

    def _untried(self) -> Suggestion | None:
        if self._grid is not None:
            for values in self._grid:
                if _key(self._space.candidate(values)) not in self._seen:
                    return self._ask(values)
            return None
        for _ in range(_ASKS_FOR_A_NEW_ONE):
            suggestion = self._ask(None)
            if suggestion is not None:
                return suggestion
        return self._first_untried()

    def again(self, suggestion: Suggestion) -> Suggestion:
        """The same candidate under a new Optuna trial: after a failure of the environment."""
        self._seen.discard(_key(suggestion.candidate))
        repeated = self._ask(dict(suggestion.trial.params))
        if repeated is None:
            raise AssertionError("a candidate that was just forgotten is new")
        return repeated

    def _ask(self, values: dict[str, Scalar] | None) -> Suggestion | None:
        if values is not None:
            self._study.enqueue_trial(values)
        trial = self._study.ask(self._distributions)
        candidate = self._space.candidate(dict(trial.params))
        if _key(candidate) in self._seen:
            trial.set_user_attr("repeat", True)
            self._study.tell(trial, state=TrialState.FAIL)
            return None
        self._seen.add(_key(candidate))
        return Suggestion(candidate, trial)

    def _first_untried(self) -> Suggestion | None:
        if self._space.size is None:
            return None
        for values in self._space.combinations():
            if _key(self._space.candidate(values)) not in self._seen:
                return self._ask(values)
        return None

    def tell(self, suggestion: Suggestion, trial: Trial) -> None:
        """Hand an outcome to the sampler: a failed trial never has a value.

        Infeasible ones are told as pruned with a violated constraint, which TPE ranks behind every
        measured one; failures that say nothing about the candidate are told as failed.
        """
        tell(self._study, suggestion.trial, trial, self._profile)


def tell(study: optuna.Study, asked: optuna.Trial, trial: Trial, profile: Profile) -> None:
    """`Search.tell` for a trial whose search is gone, as after a kill."""
    asked.set_user_attr("trial", trial.number)
    asked.set_user_attr("label", trial.label)
    asked.set_user_attr("state", trial.state)
    if trial.cause:
        asked.set_user_attr("cause", trial.cause)
    if trial.violations:
        # Optuna 5 keeps constraints by name, where optuna-dashboard 0.21 does not look.
        asked.set_user_attr("violations", trial.violations)
    if trial.state == "completed" and trial.median is not None:
        for constraint in profile.constraints:
            violation = constraint.violation(trial.median)
            asked.set_constraint(str(constraint), 1.0 if violation is None else violation)
        values = [metric(trial.median, path) for path in profile.objective.metrics]
        if all(value is not None for value in values):
            study.tell(asked, [float(v) for v in values if v is not None])
            return
    if trial.state == "infeasible":
        asked.set_constraint("starts", 1.0)
        study.tell(asked, state=TrialState.PRUNED)
        return
    study.tell(asked, state=TrialState.FAIL)


def open_study(storage: optuna.storages.BaseStorage, name: str, profile: Profile, seed: int) -> optuna.Study:
    """The Optuna study of that name, made when it is not there. One that is there is not written to."""
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
    try:
        return optuna.load_study(storage=storage, sampler=sampler, study_name=name)
    except KeyError:
        pass
    study = optuna.create_study(
        storage=storage,
        sampler=sampler,
        study_name=name,
        directions=profile.objective.directions,
        load_if_exists=True,
    )
    with warnings.catch_warnings():
        # The names are for optuna-dashboard only; nothing of ours depends on the experimental call.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(profile.objective.metrics)
    return study


def settle_leftovers(study: optuna.Study, trials: list[Trial], profile: Profile) -> int:
    """Close the Optuna trials that a killed run left open; how many.

    One whose `trial.json` got written before the kill is told its value; the others failed. Enqueued
    ones that nobody took are failed as well.
    """
    by_optuna_number = {t.number: t for t in trials}
    closed = 0
    for frozen in study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
        closed += 1
        asked = optuna.Trial(study, frozen._trial_id)
        finished = by_optuna_number.get(frozen.user_attrs.get("trial", -1))
        if frozen.state == TrialState.RUNNING and finished is not None and finished.state == "completed":
            tell(study, asked, finished, profile)
        else:
            study._storage.set_trial_state_values(frozen._trial_id, TrialState.FAIL)
    return closed


def planned_candidates(space: SearchSpace, profile: Profile) -> int:
    """How many candidates a study of this profile measures at most."""
    distinct = _count(space) if space.size is not None else None
    if profile.budget.trials is not None:
        return profile.budget.trials if distinct is None else min(distinct, profile.budget.trials)
    if distinct is not None and distinct <= ENUMERATE_UP_TO:
        return distinct
    return DEFAULT_TRIALS


def _distinct(space: SearchSpace) -> Iterator[dict[str, Scalar]]:
    keys = set()
    for values in space.combinations():
        key = _key(space.candidate(values))
        if key not in keys:
            keys.add(key)
            yield values


def _count(space: SearchSpace) -> int:
    return sum(1 for _ in _distinct(space))


def _key(candidate: Setting) -> str:
    return candidate.model_dump_json()


def _distribution(knob: Knob) -> BaseDistribution:
    if isinstance(knob, Choices):
        return CategoricalDistribution(knob.values)
    if knob.integer:
        step = None if knob.log else int(knob.step or 1)
        return IntDistribution(int(knob.low), int(knob.high), log=knob.log, **({} if step is None else {"step": step}))
    return FloatDistribution(knob.low, knob.high, log=knob.log, step=knob.step)
